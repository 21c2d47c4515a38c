"""What makes two runs the same run: one short word for a composed configuration.

``train.resume=auto`` looks for a run with it. Where a run lies, who watches it and how its ranks are started may change
without making it another run; every value that a study could compare (sizes of buckets, steps, batch) makes another.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from glmexp.config.load import dump, flatten
from glmexp.config.schema import RunConfig

IGNORED_SECTIONS = ("run", "launcher", "slurm", "tracker", "inspect", "plan", "doctor", "parity", "smoke")
IGNORED_KEYS = ("train.resume", "train.stop_after", "train.stop_after_s", "train.grad_accum", "train.profile")
"""How a run begins and where it pauses; the accumulation follows from batch, micro batch and number of ranks."""


def identity(config: RunConfig) -> str:
    """24 hexadecimal digits: equal for configurations that describe the same run, whatever folder they run in.

    Call it on the configuration as it was composed: the launcher settles things that depend on the machine later.
    """
    text = json.dumps(identifying(config), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def identifying(config: RunConfig) -> dict[str, Any]:
    """Dotted key to value of all that makes the run what it is."""
    leaves = flatten(dump(config))
    return {
        key: value
        for key, value in leaves.items()
        if key.split(".")[0] not in IGNORED_SECTIONS and key not in IGNORED_KEYS
    }
