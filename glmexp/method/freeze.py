"""Train some of the model's own weights and freeze the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.families import FamilyFacts
from glmexp.config.registry import register
from glmexp.config.schema import Bound, Count
from glmexp.method import weight_files

if TYPE_CHECKING:
    from torch import nn


@register("method", "freeze")
@dataclass
class Freeze(weight_files.OwnWeights):
    """Give one of num_layers and patterns."""

    num_layers: Count | None
    """Train this many of the last layers."""
    patterns: list[str] | None
    """Train the parameters whose names match one of these regular expressions (searched, not anchored)."""
    lr: Annotated[float, Bound(above=0)]
    """Default of optim.lr under this method."""

    def apply(self, model: Any, family: FamilyFacts) -> nn.Module:
        """Freeze all but the chosen parameters. Raises ConfigError where a pattern or a layer count chooses nothing."""
        chosen = set(self._chosen(model, family))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in chosen)
        return model

    def _chosen(self, model: Any, family: FamilyFacts) -> list[str]:
        names = [name for name, _ in model.named_parameters()]
        if self.num_layers is not None:
            layers = len(model.get_submodule(family.layers))
            if self.num_layers > layers:
                raise ConfigError(
                    Problem("method.num_layers", f"{self.num_layers} of {layers} layers", f"give at most {layers}")
                )
            last = tuple(f"{family.layers}.{index}." for index in range(layers - self.num_layers, layers))
            return [name for name in names if name.startswith(last)]
        assert self.patterns is not None, "the rules ask for num_layers or patterns"
        without = [pattern for pattern in self.patterns if not any(re.search(pattern, name) for name in names)]
        if without:
            raise ConfigError(
                *(
                    Problem(
                        "method.patterns",
                        f"{pattern!r} matches no parameter",
                        f"names look like {names[0]}, {names[-1]}",
                    )
                    for pattern in without
                )
            )
        return [name for name in names if any(re.search(pattern, name) for pattern in self.patterns)]

    def load(self, folder: Path, model: Any, family: FamilyFacts) -> nn.Module:
        """The base with the trained tensors over its own."""
        return weight_files.load(folder, model, self._chosen(model, family))
