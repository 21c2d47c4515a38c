"""Train every weight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from glmexp.config.families import FamilyFacts
from glmexp.config.registry import register
from glmexp.config.schema import Bound, Named
from glmexp.method import weight_files
from glmexp.method.base import own_weights

if TYPE_CHECKING:
    import torch
    from torch import nn

    from glmexp.method.base import Whole


@register("method", "full")
@dataclass
class Full(Named):
    """Nothing is frozen."""

    lr: Annotated[float, Bound(above=0)]
    """Default of optim.lr under this method."""

    def apply(self, model: Any, family: FamilyFacts) -> nn.Module:
        """Every parameter is trained."""
        return model.requires_grad_(True)

    def must_move(self, names: list[str], steps: int) -> list[str]:
        """Everything."""
        return names

    def write(self, folder: Path, model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole model: safetensors under the released names, and config.json."""
        weight_files.write(folder, model, tensors)
        return tensors

    def load(self, folder: Path, model: Any, family: FamilyFacts) -> nn.Module:
        """The folder's weights over all of the model's."""
        return weight_files.load(folder, model, [name for name, _ in model.named_parameters()])

    def merged(self, model: Any) -> Whole:
        """The model's own parameters."""
        return own_weights(model)
