"""Train some of the model's own weights and freeze the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glmexp.config.registry import register
from glmexp.config.schema import Bound, Count, Named


@register("method", "freeze")
@dataclass
class Freeze(Named):
    """Give one of num_layers and patterns."""

    num_layers: Count | None
    """Train this many of the last layers."""
    patterns: list[str] | None
    """Train the parameters whose names match one of these regular expressions (searched, not anchored)."""
    lr: Annotated[float, Bound(above=0)]
    """Default of optim.lr under this method."""
