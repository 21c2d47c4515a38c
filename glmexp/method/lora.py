"""LoRA (Hu et al. 2021, arXiv:2106.09685) through PEFT: W x + (alpha / rank) B A x with W frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glmexp.config.registry import register
from glmexp.config.schema import Bound, Count, Named


@register("method", "lora")
@dataclass
class Lora(Named):
    """Low-rank adapters on linear layers; the base is frozen."""

    rank: Count
    """Inner width of each adapter."""
    alpha: Annotated[float, Bound(above=0)]
    """The adapter's output is scaled by alpha / rank."""
    dropout: Annotated[float, Bound(low=0, below=1)]
    """Dropout on the adapter's input."""
    target_modules: list[str] | None
    """Names of linear layers. Null: the model family's attention projections."""
    modules_to_save: list[str]
    """Modules trained whole and saved beside the adapter."""
    lr: Annotated[float, Bound(above=0)]
    """Default of optim.lr under this method."""
