"""``gather=sharded``: what was trained stays in the ranks' partitions until somebody assembles it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glmexp.config.errors import ArtifactError, Problem
from glmexp.engine import ds_files
from glmexp.engine.ds_files import Lazy

FOLDER = "partitions"
_TAG = "final"


def write(engine: Any, artifact: Path) -> None:
    """Each rank writes its own part, nothing is gathered. Collective."""
    engine.save_checkpoint(artifact / FOLDER, tag=_TAG, exclude_frozen_parameters=True)


def lazy(artifact: Path, names: list[str]) -> Lazy:
    """The trained tensors, in float32 (stage 0: as the model held them), by the names of the live parameters.

    Raises ArtifactError where a trained tensor is absent.
    """
    folder = artifact / FOLDER / _TAG
    found, _ = ds_files.read(folder)
    absent = [name for name in names if name not in found]
    if absent:
        raise ArtifactError(
            Problem(
                str(folder), f"lacks {len(absent)} of {len(names)} trained tensors ({absent[0]}, ...)", "train again"
            )
        )
    return {name: found[name] for name in names}
