"""The kernels of a decoding step as operators, which torch.compile leaves whole and a CUDA graph records."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""It comes with torch for CUDA on Linux. A constant: the compiler may not look for modules in what it traces."""


def define() -> None:
    """``torch.ops.glmexp.attend_slots`` and ``row_product``."""
    if hasattr(torch.ops.glmexp, "attend_slots"):
        return

    @torch.library.custom_op("glmexp::attend_slots", mutates_args=())
    def attend_slots(query: Tensor, keys: Tensor, values: Tensor, used: Tensor, scaling: float) -> Tensor:
        from glmexp.model import step_kernels

        return step_kernels.attention(query, keys, values, used, scaling)

    @attend_slots.register_fake
    def _(query: Tensor, keys: Tensor, values: Tensor, used: Tensor, scaling: float) -> Tensor:
        return torch.empty_like(query, memory_format=torch.contiguous_format)

    @torch.library.custom_op("glmexp::row_product", mutates_args=())
    def row_product(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not states.is_cuda:
            return nn.functional.linear(states, weight, bias)
        from glmexp.model import step_kernels

        return step_kernels.row_product(states, weight, bias)

    @row_product.register_fake
    def _(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return states.new_empty(*states.shape[:-1], weight.shape[0])


class RowLinear(nn.Linear):
    """A linear layer while it sees one row."""

    def forward(self, states: Tensor) -> Tensor:
        """``states`` (1, 1, in) to (1, 1, out)."""
        return torch.ops.glmexp.row_product(states, self.weight, self.bias)


def takes_rows(network: nn.Module) -> bool:
    """``RowLinear`` applies to a network's layers: 16 bit on an NVIDIA GPU of Ampere or later."""
    weight = next(network.parameters())
    return (
        weight.is_cuda
        and torch.version.cuda is not None
        and weight.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(weight.device) >= (8, 0)
        and HAS_TRITON
    )


@contextmanager
def one_row(layers: nn.Module) -> Iterator[None]:
    """The linear layers of ``layers`` are ``RowLinear`` meanwhile. Only their class is changed: weights, names and
    hooks stay, and blocks go on sharing what is compiled."""
    linears = [module for module in layers.modules() if type(module) is nn.Linear]
    try:
        for module in linears:
            module.__class__ = RowLinear
        yield
    finally:
        for module in linears:
            module.__class__ = nn.Linear
