"""Token cross entropy as a sum, so that micro batches and ranks add up whatever their lengths."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

IGNORED = -100


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over supervised tokens of -log p(token), in float32.

    logits: (batch, length, vocabulary); labels: (batch, length), -100 where nothing is to be learned. Position t
    predicts
    label t + 1. Only supervised rows are cast to float32: the prompt's logits are never copied. A batch without a
    supervised
    token gives 0 with zero gradients, so that every rank takes part in every collective.
    """
    targets = labels[:, 1:]
    supervised = targets != IGNORED
    return F.cross_entropy(logits[:, :-1][supervised].float(), targets[supervised], reduction="sum")


def padded_inputs(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
