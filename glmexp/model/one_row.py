"""What the modules of a block are while they see one row: weights are read as fast as memory gives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from glmexp.model.chatglm2 import MLP
from glmexp.model.step_ops import HAS_TRITON


class RowLinear(nn.Linear):
    """A linear layer while it sees one row."""

    def forward(self, states: Tensor) -> Tensor:
        """``states`` (1, 1, in) to (1, 1, out)."""
        return torch.ops.glmexp.row_product(states, self.weight, self.bias)


class RowMLP(MLP):
    """ChatGLM2's and 3's MLP while it sees one row: the gate goes with the products that it is made of."""

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` (1, 1, hidden) to the same."""
        gate, value = self.dense_h_to_4h.weight.chunk(2)
        return self.dense_4h_to_h(torch.ops.glmexp.gated_row_product(hidden, gate, value))


class RowQwen2MLP(nn.Module):
    """Qwen2's."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (1, 1, hidden) to the same."""
        return self.down_proj(torch.ops.glmexp.gated_row_product(x, self.gate_proj.weight, self.up_proj.weight))


def class_for_rows(module: nn.Module) -> type[nn.Module] | None:
    """What a module of a block is while it sees one row; None: what it is."""
    if type(module) is nn.Linear:
        return RowLinear
    if type(module) is MLP and module.dense_h_to_4h.bias is None:
        return RowMLP
    config: Any = getattr(module, "config", None)
    if type(module).__name__ == "Qwen2MLP" and config.hidden_act == "silu":
        return RowQwen2MLP
    return None


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
    """The linear layers and gated MLPs of ``layers`` are those for one row meanwhile. Only their class is changed:
    weights, names and hooks stay, and blocks go on sharing what is compiled."""
    changed = [(module, type(module), kind) for module in layers.modules() if (kind := class_for_rows(module))]
    try:
        for module, _, kind in changed:
            module.__class__ = kind
        yield
    finally:
        for module, plain, _ in changed:
            module.__class__ = plain
