"""Examples into tensors: right padded to train, left padded to generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from glmexp.data.store import IGNORED, Example

if TYPE_CHECKING:
    import torch


def collate(examples: Sequence[Example], pad_id: int) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask (1 is real) and labels (-100 is not learned), int64 (batch, length), right padded;
    lengths (batch,); and what ``predictions`` adds."""
    import torch

    length = max(len(example.input_ids) for example in examples)
    shape = (len(examples), length)
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    for index, example in enumerate(examples):
        count = len(example.input_ids)
        input_ids[index, :count] = torch.from_numpy(example.input_ids)
        attention_mask[index, :count] = 1
        labels[index, :count] = torch.from_numpy(example.labels)
    lengths = attention_mask.sum(dim=1)
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, "lengths": lengths}
    return batch | predictions(labels)


def predictions(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """predicting: where in the flattened (batch * length) a position predicts a label that counts; targets: those
    labels. Both int64 (supervised tokens,).

    Found here, on the CPU: the loss then asks the network for these logits alone, and need not wait for a GPU to know
    how many there are.
    """
    following = labels[:, 1:]
    rows, places = (following != IGNORED).nonzero(as_tuple=True)
    return {"predicting": rows * labels.shape[1] + places, "targets": following[rows, places]}


def collate_prompts(examples: Sequence[Example], pad_id: int) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask, position_ids (0 on pads, real tokens from 0), int64 (batch, length), left padded."""
    import torch

    length = max(len(example.prompt_ids) for example in examples)
    shape = (len(examples), length)
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    for index, example in enumerate(examples):
        start = length - len(example.prompt_ids)
        input_ids[index, start:] = torch.from_numpy(example.prompt_ids)
        attention_mask[index, start:] = 1
        position_ids[index, start:] = torch.arange(length - start)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
