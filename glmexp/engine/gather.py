"""From ZeRO partitions to whole tensors on rank 0, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from glmexp.engine import distributed, passing


def whole(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each parameter whole: a CPU copy on rank 0, None on the others. Collective: every rank walks the same names.

    ``engine.module.state_dict()`` under stage 3 holds tensors of shape (0,), silently; only inside GatheredParameters
    is a
    parameter whole, and only one is gathered at a time, so the peak is the largest tensor.
    """
    for name, parameter in parameters:
        with _gathered(parameter):
            copy = parameter.detach().to("cpu", copy=True) if distributed.rank() == 0 else None
        if copy is not None:
            expected = tuple(getattr(parameter, "ds_shape", parameter.shape))
            assert tuple(copy.shape) == expected, f"{name} was gathered as {tuple(copy.shape)}, it is {expected}"
        yield name, copy


def _gathered(parameter: nn.Parameter) -> Any:
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=None)


def tensors(
    parameters: Iterable[tuple[str, nn.Parameter]],
    change: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
) -> dict[str, torch.Tensor]:
    """``whole`` as a dict on rank 0 (empty on the others), each tensor passed through ``change`` as it comes."""
    return {name: change(name, tensor) for name, tensor in whole(parameters) if tensor is not None}


def masters(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Any = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each trained parameter's float32 master, whole, on every rank. Collective.

    ``optimizer``: DeepSpeed's, which at stage 0 in 16 bit keeps its masters to itself. Where there is no master
    (stage 0 in fp32) the parameter is one itself.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    passing.settle(optimizer)
    own = {
        id(low): high
        for group, masters in zip(
            getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", []), strict=False
        )
        for low, high in zip(group, masters, strict=True)
    }
    for name, parameter in parameters:
        master = own.get(id(parameter))
        if master is None:
            master = safe_get_full_fp32_param(parameter)
        if master is None:
            with _gathered(parameter):
                master = parameter.detach().clone()
        yield name, master.detach().reshape(getattr(parameter, "ds_shape", parameter.shape))
