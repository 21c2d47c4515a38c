"""Train every weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glmexp.config.registry import register
from glmexp.config.schema import Bound, Named


@register("method", "full")
@dataclass
class Full(Named):
    """Nothing is frozen."""

    lr: Annotated[float, Bound(above=0)]
    """Default of optim.lr under this method."""
