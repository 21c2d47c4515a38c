"""What both models do after the last block: which positions get logits, and the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def keep_positions(states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Select positions of ``states`` (batch, length, ...).

    ``logits_to_keep``: 0 keeps all, n the last n; a tensor of indices (kept,) keeps these in every row; a boolean
    mask (batch, length) keeps its True positions and flattens to (kept, ...).
    """
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.dtype == torch.bool:
            return states[logits_to_keep]
        if logits_to_keep.ndim != 1:
            raise ValueError(f"logits_to_keep is {tuple(logits_to_keep.shape)}; indices must be (kept,)")
        return states[:, logits_to_keep]
    return states[:, -logits_to_keep:] if logits_to_keep else states


def causal_loss(
    logits: Tensor, labels: Tensor, logits_to_keep: int | Tensor = 0, num_items_in_batch: Any = None
) -> Tensor:
    """Mean cross entropy in float32 over the labels that are not -100; position i predicts label i + 1.

    ``labels``: (batch, length), of all positions; ``logits``: those that ``logits_to_keep`` kept, and the loss covers
    these. With ``num_items_in_batch`` (transformers.Trainer) the sum is divided by it instead.
    """
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    targets = keep_positions(shifted, logits_to_keep).reshape(-1).to(logits.device)
    flat = logits.reshape(-1, logits.shape[-1]).float()
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(flat, targets, ignore_index=-100)
    return nn.functional.cross_entropy(flat, targets, ignore_index=-100, reduction="sum") / num_items_in_batch
