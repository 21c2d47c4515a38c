"""Train every weight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from glmexp.config.families import FamilyFacts
from glmexp.config.registry import register
from glmexp.config.schema import Bound
from glmexp.method import weight_files

if TYPE_CHECKING:
    from torch import nn


@register("method", "full")
@dataclass
class Full(weight_files.OwnWeights):
    """Nothing is frozen."""

    lr: Annotated[float, Bound(above=0)]
    """Default of optim.lr under this method."""

    def apply(self, model: Any, family: FamilyFacts) -> nn.Module:
        """Every parameter is trained."""
        return model.requires_grad_(True)

    def load(self, folder: Path, model: Any, family: FamilyFacts) -> nn.Module:
        """The folder's weights over all of the model's."""
        return weight_files.load(folder, model, [name for name, _ in model.named_parameters()])
