from __future__ import annotations

import torch

from glmexp.data.collate import collate, collate_prompts

from .fakes import ASSISTANT, END, PAD, USER, example

A, B, C, D = (4 + ord(character) for character in "abcd")


def test_training_batches_are_padded_on_the_right() -> None:
    batch = collate([example("a", "b"), example("cc", "d").blank()], PAD)
    assert {name: tensor.dtype for name, tensor in batch.items()} == dict.fromkeys(batch, torch.int64)
    assert batch["input_ids"].tolist() == [[USER, A, ASSISTANT, B, END, PAD], [USER, C, C, ASSISTANT, D, END]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, -100, -100, B, END, -100], [-100] * 6]


def test_prompts_are_padded_on_the_left_and_positions_count_real_tokens() -> None:
    batch = collate_prompts([example("a", "b"), example("cc", "d")], PAD)
    assert {name: tensor.dtype for name, tensor in batch.items()} == dict.fromkeys(batch, torch.int64)
    assert batch["input_ids"].tolist() == [[PAD, USER, A, ASSISTANT], [USER, C, C, ASSISTANT]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]


def test_a_padding_id_that_is_the_end_token_hides_no_end() -> None:
    """Masks and labels come from lengths, never from comparing ids."""
    rows = [example("a", "b" * size) for size in (1, 2, 4, 8)]
    batch = collate(rows, END)
    assert int((batch["labels"] == END).sum()) == len(rows)
    assert int(batch["attention_mask"].sum()) == sum(len(row.input_ids) for row in rows)
    assert batch["lengths"].tolist() == [len(row.input_ids) for row in rows]
