"""The kernels of a decoding step as operators, which torch.compile leaves whole and a CUDA graph records."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""It comes with torch for CUDA on Linux. A constant: the compiler may not look for modules in what it traces."""


def define() -> None:
    """``torch.ops.glmexp.attend_slots``, ``turn_and_attend``, ``row_product`` and ``gated_row_product``."""
    if hasattr(torch.ops.glmexp, "attend_slots"):
        return

    @torch.library.custom_op("glmexp::attend_slots", mutates_args=())
    def attend_slots(query: Tensor, keys: Tensor, values: Tensor, used: Tensor, scaling: float) -> Tensor:
        from glmexp.model import step_kernels

        return step_kernels.attention(query, keys, values, used, scaling)

    @attend_slots.register_fake
    def _(query: Tensor, keys: Tensor, values: Tensor, used: Tensor, scaling: float) -> Tensor:
        return torch.empty_like(query, memory_format=torch.contiguous_format)

    @torch.library.custom_op("glmexp::turn_and_attend", mutates_args=("keys", "values"))
    def turn_and_attend(
        fused: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, used: Tensor, scaling: float
    ) -> Tensor:
        from glmexp.model import step_kernels

        return step_kernels.attention(fused, keys, values, used, scaling, (cos, sin))

    @turn_and_attend.register_fake
    def _(
        fused: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, used: Tensor, scaling: float
    ) -> Tensor:
        return fused.new_empty(*fused.shape[:-1], fused.shape[-1] - 2 * keys.shape[2] * keys.shape[3])

    @torch.library.custom_op("glmexp::row_product", mutates_args=())
    def row_product(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not states.is_cuda:
            return nn.functional.linear(states, weight, bias)
        from glmexp.model import step_kernels

        return step_kernels.row_product(states, weight, bias)

    @row_product.register_fake
    def _(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return states.new_empty(*states.shape[:-1], weight.shape[0])

    @torch.library.custom_op("glmexp::gated_row_product", mutates_args=())
    def gated_row_product(states: Tensor, gate: Tensor, value: Tensor) -> Tensor:
        if not states.is_cuda:
            return nn.functional.silu(nn.functional.linear(states, gate)) * nn.functional.linear(states, value)
        from glmexp.model import step_kernels

        return step_kernels.gated_row_product(states, gate, value)

    @gated_row_product.register_fake
    def _(states: Tensor, gate: Tensor, value: Tensor) -> Tensor:
        return states.new_empty(*states.shape[:-1], gate.shape[0])
