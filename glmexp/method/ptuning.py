"""P-Tuning v2 (Liu et al. 2021, arXiv:2110.07602): trained keys and values in front of every layer's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glmexp.config.registry import register
from glmexp.config.schema import Bound, Count, Named


@register("method", "ptuning")
@dataclass
class PTuning(Named):
    """A trained prefix in every layer; the base is frozen."""

    num_virtual_tokens: Count
    """Length of the prefix in tokens."""
    prefix_projection: bool
    """Make the prefix through a small network (embedding, linear, tanh, linear) in place of a table."""
    lr: Annotated[float, Bound(above=0)]
    """Default of optim.lr under this method."""
