"""Token cross entropy as a sum, so that micro batches and ranks add up whatever their lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

IGNORED = -100
CHUNK_ELEMENTS = 1 << 26
"""Logits in float32 at a time (256 MiB): of a large vocabulary all of them would be most of a step's memory."""


def forward_loss(model: Any, inputs: Mapping[str, Any], batch: Mapping[str, Any], fused: bool = False) -> torch.Tensor:
    """One forward of ``model`` (an engine or a network) and the sum that ``loss_sum`` gives.

    ``inputs``: what the network is given; ``batch``: has predicting and targets (``data.collate.predictions``). Only
    positions that predict a label reach the output layer: prompts and padding, often most of a batch, get no logits.
    ``fused``: see ``cross_entropy_sum``.
    """
    head = getattr(model, "module", model).get_output_embeddings()
    with only(head, batch["predicting"]):
        logits = model(**inputs, use_cache=False).logits
    return cross_entropy_sum(logits, batch["targets"], fused)


@contextmanager
def only(head: nn.Module, places: torch.Tensor) -> Iterator[None]:
    """Inside, ``head`` sees of its input (batch, length, hidden) the flattened ``places`` alone: (places, hidden).

    A hook, and not ``logits_to_keep``: that has one set of positions for all rows, or a boolean mask, whose size a GPU
    must first be asked for. The output layer is called as a module, so ZeRO-3 gathers its weight as ever.
    """

    def select(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].flatten(0, 1).index_select(0, places),)

    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over supervised tokens of -log p(token), in float32.

    logits: (batch, length, vocabulary); labels: (batch, length), -100 where nothing is to be learned. Position t
    predicts label t + 1. Only supervised rows are cast to float32: the prompt's logits are never copied. A batch
    without a supervised token gives 0 with zero gradients, so that every rank takes part in every collective.
    """
    targets = labels[:, 1:]
    supervised = targets != IGNORED
    return cross_entropy_sum(logits[:, :-1][supervised], targets[supervised])


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor, fused: bool = False) -> torch.Tensor:
    """Sum of -log softmax(logits)[target], a float32 scalar; 0 without rows.

    logits: (tokens, vocabulary) in any dtype; targets: (tokens,). Taken to float32 a chunk of rows at a time, in both
    directions, or ``fused`` by torch.compile into kernels that keep no float32 logits at all.
    """
    return _CrossEntropySum.apply(logits, targets, fused)


class _CrossEntropySum(torch.autograd.Function):
    """torch's own keeps float32 logits for the backward pass; this keeps them as they came, and one number a row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, fused: bool) -> torch.Tensor:
        ctx.fused = fused and len(logits) > 1  # a single row would be compiled by itself
        if ctx.fused:
            normalizers, picked = _compiled(_terms)(logits, targets)
        else:
            normalizers = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
            picked = torch.empty_like(normalizers)
            for rows in chunks(logits):
                normalizers[rows], picked[rows] = _terms(logits[rows], targets[rows])
        ctx.save_for_backward(logits, targets, normalizers)
        return (normalizers - picked).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets, normalizers = ctx.saved_tensors
        if ctx.fused:
            return _compiled(_gradients)(logits, targets, normalizers, grad), None, None
        result = torch.empty_like(logits)
        for rows in chunks(logits):
            result[rows] = _gradients(logits[rows], targets[rows], normalizers[rows], grad)
        return result, None, None


def _terms(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log sum exp of each row and its target's logit: two of (rows,), float32."""
    exact = logits.float()
    return exact.logsumexp(dim=1), exact.gather(1, targets[:, None])[:, 0]


def _gradients(
    logits: torch.Tensor, targets: torch.Tensor, normalizers: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """(softmax - one hot) times ``grad``, in the dtype of ``logits``."""
    shares = (logits.float() - normalizers[:, None]).exp()
    hits = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return ((shares - hits.float()) * grad).to(logits.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Slices of rows with CHUNK_ELEMENTS logits or one row."""
    size = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))


def padded_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What of a right padded batch the network is given: input_ids (batch, length) alone.

    It goes without a mask: no real position sees a pad behind it, causal or prefix-LM, and attention takes its fast
    path. Packed rows have masks and positions of their own (``glmexp.data.packing.model_inputs``).
    """
    return {"input_ids": batch["input_ids"]}


def supervised_tokens(labels: torch.Tensor) -> int:
    """How many tokens ``loss_sum`` adds up: labels of (batch, length) other than -100, the first position never
    predicted.
    """
    return int((labels[:, 1:] != IGNORED).sum())
