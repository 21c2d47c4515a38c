"""Rules of entry=trainer: what transformers' Trainer cannot do, and keys that only it or the parity table reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from glmexp.config.entries import GOES_ON
from glmexp.config.errors import Problem
from glmexp.config.inherit import AUTO, entry_of
from glmexp.config.schema import RunConfig

if TYPE_CHECKING:
    from glmexp.config.rules import Facts


def check(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """All of them."""
    name = config.entry.name
    for section, reader in (("trainer", "trainer"), ("parity", "smoke"), ("smoke", "smoke")):
        for key in sorted(key for key in facts.explicit if key.startswith(f"{section}.") and name != reader):
            yield Problem(key, f"without effect under entry={name}", f"leave it out, or entry={reader}")
    if name in GOES_ON:
        yield from _resume(config)
    if name != "trainer":
        return
    for one in config.trainer.callbacks:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", one):
            yield Problem(
                "trainer.callbacks", f"{one!r} is not module:Class", "trainer.callbacks=[my_module:MyCallback]"
            )
    if config.train.keep_best is not None:
        yield Problem(
            "train.keep_best",
            "entry=trainer keeps its newest checkpoints alone: the hooks of eval are not the Trainer's own metrics",
            "train.keep_best=null, or entry=train",
        )


def _resume(config: RunConfig) -> Iterator[Problem]:
    """Checkpoints of the loop and of the Trainer are different files."""
    resume, name = config.train.resume, config.entry.name
    before = entry_of(Path(resume)) if resume not in (None, AUTO) and resume is not None else None
    if before is not None and before in GOES_ON and before != name:
        yield Problem(
            "train.resume",
            f"{resume} was trained by entry={before}, and entry={name} cannot read its checkpoints",
            f"entry={before} to go on with it, or a new run",
        )
