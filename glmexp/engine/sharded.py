"""``gather=sharded``: what was trained stays in the ranks' partitions until somebody assembles it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from glmexp.config.errors import ArtifactError, Problem

FOLDER = "partitions"
_TAG = "final"


def write(engine: Any, artifact: Path) -> None:
    """Each rank writes its own part, nothing is gathered. Collective."""
    engine.save_checkpoint(artifact / FOLDER, tag=_TAG, exclude_frozen_parameters=True)


def assemble(artifact: Path, stage: int, names: list[str]) -> dict[str, torch.Tensor]:
    """The trained tensors whole, in float32 (stage 0: as the model held them), by the names of the live parameters.

    Raises ArtifactError where a trained tensor is absent.
    """
    folder = artifact / FOLDER
    if stage == 0:
        # Nothing is partitioned: DeepSpeed's one file holds the module.
        file = folder / _TAG / "mp_rank_00_model_states.pt"
        found = torch.load(file, map_location="cpu", weights_only=False)["module"]
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        found = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=_TAG, exclude_frozen_parameters=True)
    absent = [name for name in names if name not in found]
    if absent:
        raise ArtifactError(
            Problem(
                str(folder), f"lacks {len(absent)} of {len(names)} trained tensors ({absent[0]}, ...)", "train again"
            )
        )
    return {name: found[name] for name in names}
