"""The model's own weights under their released names, as safetensors. Shared by freeze and full."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glmexp.config.errors import ArtifactError, Problem
from glmexp.method.base import check_keys, check_shapes

if TYPE_CHECKING:
    import torch
    from torch import nn

_PATTERN = "model{suffix}.safetensors"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def write(folder: Path, model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Safetensors (in shards of at most 5 GB with an index) and config.json."""
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(tensors, folder, filename_pattern=_PATTERN, safe_serialization=True)
    config = copy.deepcopy(model.config)
    # What from_pretrained loads by default is the dtype that config.json names, not the file's.
    config.dtype = next(iter(tensors.values())).dtype
    config.save_pretrained(folder)


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder. Raises ArtifactError where a file is absent or not whole."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = [SINGLE]
    if (folder / INDEX).exists():
        files = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(
                Problem(str(folder / name), f"cannot be read: {error}", "the artifact is not whole")
            ) from error
    return tensors


def load(folder: Path, model: Any, names: list[str]) -> nn.Module:
    """Put the folder's tensors over those of ``model``: exactly ``names`` of its parameters."""
    tensors = read(folder)
    own = dict(model.named_parameters())
    check_keys(folder, set(tensors), set(names))
    check_shapes(
        folder,
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        {name: tuple(own[name].shape) for name in names},
    )
    model.load_state_dict(tensors, strict=False)
    return model
