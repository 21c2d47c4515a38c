"""The gradient norm of ZeRO stages 1 and 2, taken over all tensors at once."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist


def fuse(optimizer: Any) -> None:
    """Let DeepSpeed's optimizer of stage 1 or 2 take its norm with ``_grad_norm``; other optimizers stay as they are.

    Its own (0.19.8, ``get_grad_norm_direct``) starts several kernels a tensor: with the 224 of an adapter on
    Qwen2-7B the GPU waits for them at the end of each step.
    """
    if hasattr(optimizer, "get_grad_norm_direct"):
        optimizer.get_grad_norm_direct = MethodType(_grad_norm, optimizer)


def _grad_norm(optimizer: Any, gradients: Sequence[torch.Tensor], params: object, norm_type: float = 2) -> torch.Tensor:
    """2-norm over ``gradients`` of all ranks as a float32 scalar; -1, DeepSpeed's sign, where it is not finite.

    No parameter here is replicated or split by model parallelism, which the original looks at ``params`` for.
    """
    assert norm_type == 2, f"gradients are clipped by their 2-norm, not {norm_type}"
    own = [gradient.detach() for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
    if own:
        total = torch.stack(torch._foreach_norm(own, 2, dtype=torch.float32)).square().sum()
    else:
        total = torch.zeros((), dtype=torch.float32, device=optimizer.device)
    dist.all_reduce(total, group=optimizer.dp_process_group)
    norm = total.sqrt()
    return torch.where(torch.isfinite(norm), norm, -1.0)
