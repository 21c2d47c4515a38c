"""LoRA in compiled blocks with fewer passes over activations. Parameters and mathematics are PEFT's.

Adapters are thin: what they cost is reading and writing activations. PEFT scales the adapter's output, whose gradient
is then written once more for B; here what lies between A and B is scaled. And where layers stand side by side over the
same input (query, key and value; gate and up) one product takes all of their A, forward and backward: the input is read
once, and one gradient is added to its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn

ADAPTER = "default"
SIDE_BY_SIDE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that get the same tensor, in the order in which they are called."""


class Thin(Linear):
    """A PEFT layer that learns through one product with its neighbours' A. Not learning, it is PEFT's."""

    following: tuple[Thin, ...]
    """Neighbours that are called behind this one with the same input; only the first of them has any."""
    pending: tuple[Tensor, Tensor] | None
    """An input, and what this layer's A makes of it, scaled."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``x`` (..., in) to (..., out)."""
        if not self.training or self.disable_adapters or self.merged or args or kwargs:
            return super().forward(x, *args, **kwargs)
        return self.base_layer(x) + F.linear(self._inner(x), _weight(self.lora_B))

    def _inner(self, x: Tensor) -> Tensor:
        """(..., rank)."""
        pending, self.pending = self.pending, None
        if pending is not None and pending[0] is x:
            return pending[1]
        weights = [_weight(layer.lora_A) for layer in (self, *self.following)]
        all_of_them = torch.cat(weights) if self.following else weights[0]
        inner = F.linear(x.to(all_of_them.dtype), all_of_them) * self.scaling[ADAPTER]
        if not self.following:
            return inner
        own, *others = inner.split([len(weight) for weight in weights], dim=-1)
        for layer, part in zip(self.following, others, strict=True):
            layer.pending = (x, part)
        return own


def _weight(factors: nn.ModuleDict) -> Tensor:
    linear: Any = factors[ADAPTER]
    return linear.weight


def make_thin(model: nn.Module) -> int:
    """Let the plain LoRA layers of ``model`` learn so. Returns how many.

    Left to PEFT: those with dropout, whose inputs differ from layer to layer, a bias of their own, a variant such as
    DoRA, or several adapters. Not for weights that ZeRO stage 3 gathers where PEFT's own modules are called.
    """
    found = {name: module for name, module in model.named_modules() if _is_plain(module)}
    for module in found.values():
        module.__class__ = Thin
        module.following, module.pending = (), None
    for members in _side_by_side(found):
        members[0].following = tuple(members[1:])
    return len(found)


def _is_plain(module: nn.Module) -> bool:
    return (
        type(module) is Linear
        and list(module.lora_A) == [ADAPTER]
        and isinstance(module.lora_dropout[ADAPTER], nn.Identity)
        and not module.lora_variant
        and module.lora_A[ADAPTER].bias is None
        and module.lora_B[ADAPTER].bias is None
    )


def _side_by_side(found: dict[str, Any]) -> Iterator[list[Any]]:
    """Neighbours among ``found`` that scale alike."""
    parents = {name.rpartition(".")[0] for name in found}
    for parent in sorted(parents):
        for names in SIDE_BY_SIDE:
            members = [found[f"{parent}.{name}"] for name in names if f"{parent}.{name}" in found]
            if len(members) > 1 and len({member.scaling[ADAPTER] for member in members}) == 1:
                yield members
