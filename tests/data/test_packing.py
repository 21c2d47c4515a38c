"""Packed, padded and one by one give the same loss and gradients: no example sees another."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glmexp.data.collate import collate
from glmexp.data.packing import collate_packed, model_inputs, packs, visible
from glmexp.data.store import Example
from glmexp.engine.loop import size_over_ranks
from glmexp.engine.loss import loss_sum
from tests.model.samples import FAMILIES, GMASK, examples, network

# design: fp32 on the CPU, losses 1e-5, gradients ||a - b|| / ||b|| 1e-5.
LOSS, GRADIENT = 1e-5, 1e-5


def loss_and_gradient(model: Any, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = loss_sum(model(**inputs, use_cache=False).logits, labels)
    loss.backward()
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(parts).clone()


def padded(rows: list[Example]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    batch = collate(rows, 3)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}, batch["labels"]


KINDS = ("sdpa", "eager", "varlen")
REFUSED = ("chatglm", "varlen")
PREFIX = {"pre_seq_len": 3}
SIZES = [(3, 2), (6, 1), (1, 5), (2, 2), (9, 4), (4, 1), (0, 0), (0, 0)]  # the last two are of one token, but in v1
ROWS = [[4, 0, 6, 1], [2], [3, 5, 7]]


@pytest.mark.parametrize(
    ("family", "changes", "attention"),
    [
        pytest.param(family, changes, attention, id=f"{family}{'_prefix' if changes else ''}-{attention}")
        for family, changes in [*((family, {}) for family in FAMILIES), *((f, PREFIX) for f in ("chatglm", "chatglm3"))]
        for attention in KINDS
        if (family, attention) != REFUSED
    ],
)
def test_packed_padded_and_one_by_one_are_the_same(family: str, changes: dict[str, int], attention: str) -> None:
    model = network(family, attention, **changes)
    rows = examples(family, SIZES)
    batch = collate_packed([[rows[index] for index in row] for row in ROWS], pad_id=3, budget=48)
    inputs = model_inputs(batch, family, GMASK, attention)  # type: ignore[arg-type]
    packed = loss_and_gradient(model, inputs, batch["labels"])
    together = loss_and_gradient(model, *padded(rows))
    single = [loss_and_gradient(model, *padded([row])) for row in rows]
    alone = sum(loss for loss, _ in single), torch.stack([gradient for _, gradient in single]).sum(0)
    count = int((batch["labels"][:, 1:] != -100).sum())
    assert count == sum(row.supervised_tokens for row in rows)
    longer = collate_packed([[rows[index] for index in row] for row in ROWS], pad_id=3, budget=64, length=64)
    filled = loss_and_gradient(model, model_inputs(longer, family, GMASK, attention), longer["labels"])  # type: ignore[arg-type]
    size, filled_size = size_over_ranks([batch], None), size_over_ranks([longer], None)
    assert filled_size == replace(size, places=3 * 64)
    for other in (packed, filled, together):
        assert abs(other[0] - alone[0]) / count <= LOSS
        assert float((other[1] - alone[1]).norm() / alone[1].norm()) <= GRADIENT


@pytest.mark.parametrize(("family", "attention"), [pair for pair in product(FAMILIES, KINDS) if pair != REFUSED])
def test_what_stands_beside_an_example_does_not_change_its_logits(family: str, attention: str) -> None:
    """The other examples are replaced; logits of the second one must be bit for bit those of before."""
    model = network(family, attention)
    one, other = examples(family, SIZES[:3]), examples(family, SIZES[:3], seed=1)
    start, end = len(one[0].input_ids), len(one[0].input_ids) + len(one[1].input_ids)
    logits = []
    for row in ([*one], [other[0], one[1], other[2]]):
        batch = collate_packed([row], pad_id=3, budget=40)
        with torch.no_grad():
            logits.append(model(**model_inputs(batch, family, GMASK, attention), use_cache=False).logits[0, start:end])  # type: ignore[arg-type]
    assert torch.equal(*logits)


def test_the_mask_opens_the_context_of_the_same_example_only() -> None:
    segments = torch.tensor([[1, 1, 1, 2, 2, 0]])
    contexts = torch.tensor([[1, 1, 0, 1, 0, 0]])
    rows = visible(segments, contexts)[0, 0].int().tolist()
    assert rows == [
        [1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_chatglm_positions_are_those_of_each_example_alone() -> None:
    from glmexp.model.positions import derive_positions

    model = network("chatglm", "sdpa")
    rows = examples("chatglm", SIZES[:3])
    batch = collate_packed([rows], pad_id=3, budget=40)
    found = model_inputs(batch, "chatglm", GMASK, "sdpa")["position_ids"][0]
    alone = [derive_positions(torch.from_numpy(row.input_ids).long()[None], None, model.config)[0] for row in rows]
    assert torch.equal(found[:, : sum(len(row.input_ids) for row in rows)], torch.cat(alone, dim=1))


def test_the_first_token_of_a_packed_example_is_never_learned() -> None:
    row = examples("chatglm3", [(2, 2)])[0]
    everything = Example(row.input_ids, row.input_ids.copy(), 0, 1)
    batch = collate_packed([[everything, everything]], 3, 20)
    assert (batch["labels"][0] == -100).nonzero().flatten().tolist() == [0, 5]


def test_segments_cover_every_position_and_padding_is_no_longer_than_an_example() -> None:
    rows = examples("chatglm3", [(2, 1), (0, 0), (1, 1)])  # 4, 1 and 3 tokens
    batch = collate_packed([rows, rows[1:2]], pad_id=3, budget=48)
    assert batch["cu_seq_lens"].tolist() == [0, 4, 5, 8, 9, 13, 16]
    assert batch["cu_seq_lens"].dtype == torch.int32
    assert batch["max_length"] == 4


def test_filled_up_rows_cost_a_bounded_number_of_segments() -> None:
    """A row of one token in 640: padding in parts of a 32nd, not in one segment a token."""
    row = examples("chatglm3", [(0, 0)])
    batch = collate_packed([row], pad_id=3, budget=640, length=640)
    assert batch["cu_seq_lens"].tolist() == [0, *range(1, 640, 20), 640]
    assert batch["max_length"] == 20
    assert batch["lengths"].tolist() == [1]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 32), max_size=60), seed=st.integers(0, 3))
def test_each_example_is_in_one_row_and_no_row_is_over_full(lengths: list[int], seed: int) -> None:
    rows = packs(np.array(lengths, dtype=np.int64), 32, seed)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 32 for row in rows)
    # First fit, longest first: at most 11/9 of the best plus one (Johnson 1973); the best is at least the sum.
    assert len(rows) <= max(1, 2 * sum(lengths) / 32 + 1)


def test_rows_of_short_examples_are_nearly_full() -> None:
    chance = random.Random(0)
    lengths = np.array([chance.randint(10, 200) for _ in range(5000)])
    assert lengths.sum() / (len(packs(lengths, 512, 0)) * 512) > 0.98
