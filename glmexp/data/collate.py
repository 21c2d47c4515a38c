"""Examples into tensors: right padded to train, left padded to generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from glmexp.data.store import IGNORED, Example

if TYPE_CHECKING:
    import torch


def padded(examples: Sequence[Example], pad_id: int) -> dict[str, np.ndarray]:
    """input_ids, attention_mask (1 is real) and labels (-100 is not learned), int64 (batch, length), right padded;
    lengths (batch,)."""
    lengths = np.array([len(example.input_ids) for example in examples], dtype=np.int64)
    shape = (len(examples), int(lengths.max()))
    input_ids, labels = np.full(shape, pad_id, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
    for index, example in enumerate(examples):
        input_ids[index, : lengths[index]] = example.input_ids
        labels[index, : lengths[index]] = example.labels
    attention_mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, "lengths": lengths}


def collate(examples: Sequence[Example], pad_id: int) -> dict[str, torch.Tensor]:
    """``padded`` as tensors, and what ``predictions`` adds."""
    import torch

    batch = {name: torch.from_numpy(array) for name, array in padded(examples, pad_id).items()}
    return batch | predictions(batch["labels"])


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
