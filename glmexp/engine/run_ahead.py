"""ZeRO without a wait of the host inside of a step: it gives work to the GPU ahead of what the GPU does.

DeepSpeed (0.19.8, ``stage_1_and_2.py``) waits for the whole device before each reduction and behind each backward pass
where reductions have a stream of their own (``overlap_comm``), and reads the gradient norm to clip by it. All that
follows, up to the next forward pass, then finds a GPU without work: 10 to 13 ms a step of LoRA on an H200.

Of several micro batches, only the last one's reductions are waited for at all: the others' last ones (the largest, as
the embeddings' gradient comes at the end) run beside the next forward pass.

At stage 3 (``stage3.py``) it waits behind each backward pass, and asks whether the norm is finite: 13 ms of a step of
390 on two H200.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from glmexp.engine import accumulation


def let(optimizer: Any) -> None:
    """Let DeepSpeed's optimizer of stage 1 or 2 order its streams instead; other optimizers stay as they are."""
    from deepspeed.runtime.zero import stage_1_and_2

    if not isinstance(optimizer, stage_1_and_2.DeepSpeedZeroOptimizer):
        return
    optimizer.unscale_and_clip_grads = _clipping(optimizer, optimizer.unscale_and_clip_grads)
    # Offloaded gradients are copied to the host, which must wait for them.
    if torch.cuda.is_available() and optimizer.overlap_comm and not optimizer.cpu_offload:
        order(optimizer, stage_1_and_2)


def let_blocks(optimizer: Any, checks_norm: bool) -> None:
    """The same at stage 3, where nothing is offloaded and blocks are fetched as one piece (``whole_blocks``).

    ``checks_norm``: a step whose gradient norm is not finite is skipped (fp16, ``precision.check_grad_overflow``); else
    it ends the run behind the step, as at stages 1 and 2.
    """
    from deepspeed.runtime.zero import stage3

    assert isinstance(optimizer, stage3.DeepSpeedZeroOptimizer_Stage3), type(optimizer).__name__
    if optimizer.offload_optimizer:
        return
    if not checks_norm:
        optimizer.step = unasked(optimizer.step, stage3)
    if torch.cuda.is_available():
        name, reductions = "independent_gradient_partition_epilogue", optimizer.reduce_and_partition_stream
        setattr(optimizer, name, in_order(getattr(optimizer, name), stage3, reductions, kind=_Resolving))


def unasked(step: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """``step`` without the question of ``module`` whether the norm is finite, for whose answer the host waits."""

    @wraps(step)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        plain = module.is_invalid_grad_norm
        module.is_invalid_grad_norm = lambda norm: False
        try:
            return step(*args, **kwargs)
        finally:
            module.is_invalid_grad_norm = plain

    return stepping


def order(optimizer: Any, module: Any) -> None:
    """Let the methods of ``optimizer``, which ``module`` defines, order streams where they let the host wait."""
    reductions = optimizer.reduction_stream
    optimizer.allreduce_and_copy = in_order(optimizer.allreduce_and_copy, module, reductions)
    epilogue, waits = optimizer.independent_gradient_partition_epilogue, _always
    if reads_sums_at_the_end_alone(optimizer):
        optimizer.average_tensor = recorded(optimizer.average_tensor, reductions)
        waits = optimizer.is_gradient_accumulation_boundary
        # Where the caller says only with step() which micro batch was the last one, nothing has waited yet.
        optimizer.finalize_gradient_accumulation_boundary = behind(
            optimizer.finalize_gradient_accumulation_boundary, module, reductions
        )
    optimizer.independent_gradient_partition_epilogue = in_order(epilogue, module, reductions, waits)


def reads_sums_at_the_end_alone(optimizer: Any) -> bool:
    """Whether sums over micro batches are made on the stream of the reductions (``engine/accumulation.py``) and read by
    no other one before the last micro batch."""
    groups = range(len(optimizer.bit16_groups))
    compact = any(optimizer._use_compact_grad_partition_buffer(group) for group in groups)
    return accumulation.applies(optimizer) and not compact


def recorded(average: Callable[..., None], reductions: Any) -> Callable[..., None]:
    """``average_tensor`` that keeps a bucket's memory from others until its reduction is over, whenever it is freed."""

    @wraps(average)
    def averaged(tensor: Tensor, *args: Any) -> None:
        tensor.record_stream(reductions)
        average(tensor, *args)

    return averaged


def behind(method: Callable[..., None], module: Any, reductions: Any) -> Callable[..., None]:
    """``method`` behind a wait of the current stream for ``reductions``."""

    @wraps(method)
    def called() -> None:
        module.get_accelerator().current_stream().wait_stream(reductions)
        method()

    return called


def _always() -> bool:
    return True


class _Ordering:
    """Stands before an accelerator."""

    def __init__(self, accelerator: Any, reductions: Any) -> None:
        self._accelerator, self._reductions = accelerator, reductions

    def synchronize(self) -> None:
        if self._reductions is not None:
            current = self._accelerator.current_stream()
            self._reductions.wait_stream(current)
            current.wait_stream(self._reductions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


class _Resolving(_Ordering):
    """At stage 3, which lets the host wait for its stream where the accelerator does not order streams by itself."""

    def resolves_data_dependency(self) -> bool:
        self.synchronize()
        return True


def in_order(
    method: Callable[..., Any],
    module: Any,
    reductions: Any,
    waits: Callable[[], bool] = _always,
    kind: type[_Ordering] = _Ordering,
) -> Callable[..., Any]:
    """``method`` with ``module.get_accelerator().synchronize()`` as a wait of the current stream and ``reductions`` for
    each other, or as none where ``waits`` says no.

    That is order enough. Reductions wait for the streams that made their gradients (``average_tensor``; here, where
    gradients are reduced as they lie: ``zero.contiguous_gradients=false``), tensors that they read are recorded on
    their stream, and what is freed or read behind ``method`` belongs to the current stream.
    """

    @wraps(method)
    def ordered(*args: Any, **kwargs: Any) -> Any:
        plain, waited_for = module.get_accelerator, reductions if waits() else None
        module.get_accelerator = lambda: kind(plain(), waited_for)
        try:
            return method(*args, **kwargs)
        finally:
            module.get_accelerator = plain

    return ordered


def _clipping(optimizer: Any, plain: Callable[..., None]) -> Callable[..., None]:
    """``unscale_and_clip_grads`` with a norm that stays on its device; the same operations else."""

    def clip(gradients: Sequence[Tensor], norm: Any) -> None:
        if not torch.is_tensor(norm) or not optimizer.clip_grad > 0:
            plain(gradients, norm)
            return
        valid = torch.where(norm >= 0, norm, torch.inf)  # -1 and nan: not finite
        factor = torch.clamp((valid / optimizer.loss_scale + 1e-6) / optimizer.clip_grad, min=1.0)
        for gradient in gradients:
            gradient.data.mul_(1.0 / (factor * optimizer.loss_scale))

    return clip
