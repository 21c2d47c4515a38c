"""Gradients of further micro batches added to those that are there, at ZeRO stages 1 and 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def add_in_place(optimizer: Any) -> None:
    """Let DeepSpeed's optimizer of stage 1 or 2 hold a rank's gradients once; other optimizers stay as they are.

    Its own (0.19.8, ``stage_1_and_2.py``) copies each micro batch's gradients of the rank's partition into a new buffer
    and adds that to the sum at the end of backward, so there are two from the second micro batch on: for 6 B
    parameters on one GPU 11.6 GiB more, with which full fine-tuning ran out of 140 GB. Sums are the same bits. With an
    offloaded optimizer the sum lies on the host and DeepSpeed has no such buffer.
    """
    if not applies(optimizer):
        return
    sums = _Sums(optimizer, optimizer.copy_grads_in_partition, optimizer.independent_gradient_partition_epilogue)
    optimizer.copy_grads_in_partition = sums.take
    optimizer.independent_gradient_partition_epilogue = sums.finish


def applies(optimizer: Any) -> bool:
    """Whether an optimizer's sums are made so: on its GPU, by the stream that reduces."""
    there = hasattr(optimizer, "copy_grads_in_partition") and optimizer.contiguous_gradients
    return bool(there and not optimizer.cpu_offload and not optimizer.use_grad_accum_attribute)


class _Sums:
    """Stands before two methods of the optimizer."""

    def __init__(self, optimizer: Any, copy: Callable[..., None], epilogue: Callable[[], None]) -> None:
        self.optimizer, self.copy, self.epilogue = optimizer, copy, epilogue
        self.places = {
            id(parameter): (group, place)
            for group, parameters in enumerate(optimizer.params_in_partition)
            for place, parameter in enumerate(parameters)
        }

    def _sum(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Of the micro batches before; None at the first one."""
        group, place = self.places[id(parameter)]
        tensors = self.optimizer.all_grad_tensors.get(group)
        return None if tensors is None else tensors[place]

    def take(self, parameter: torch.nn.Parameter, group: int | None = None) -> None:
        """In place of ``copy_grads_in_partition``: the reduced gradient lies in a bucket that is written over next."""
        total, grad = self._sum(parameter), parameter.grad
        if total is None or grad is None:
            self.copy(parameter, group)
        else:
            total.view(-1).add_(grad.view(-1))
            grad.data = total.view_as(grad)

    def finish(self) -> None:
        """In place of ``independent_gradient_partition_epilogue``, which makes its list of sums anew where there is
        none: out of the parameters' gradients, which are the sums by now."""
        reduce = self.optimizer.reduce_ipg_grads
        reduce()
        for group, parameters in enumerate(self.optimizer.params_in_partition):
            for parameter in parameters:
                if parameter.grad is None:  # this micro batch did not reach it
                    parameter.grad = self._sum(parameter)
            self.optimizer.all_grad_tensors[group] = None
        self.optimizer.reduce_ipg_grads = lambda: None  # the epilogue begins with it
        try:
            self.epilogue()
        finally:
            self.optimizer.reduce_ipg_grads = reduce
