"""Batches made ahead: the same, in the same order, and nothing left running."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glmexp.data.batches import StepPlan
from glmexp.data.loader import Batches, ahead, threads
from glmexp.data.prepare import prepare

from .fakes import PAD, CharacterTemplate, section


def batches(folder: Path, **settings: Any) -> tuple[Batches, StepPlan]:
    path = folder / "rows.jsonl"
    rows = ({"prompt": "x" * (number * 7 % 40), "response": f"a{number}"} for number in range(1, 60))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = section(str(path), max_length=64, **settings)
    made = Batches.of(prepare(config, 0, CharacterTemplate()).train, config, 0, PAD)
    return made, made.plan(config, 2, 2, 1, 0, 0)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("settings", [{}, {"packing": True}, {"group_by_length": True}], ids=str)
def test_threads_change_nothing(tmp_path: Path, settings: dict[str, Any], workers: int) -> None:
    made, plan = batches(tmp_path, **settings)
    plain = [made.step(plan, step) for step in range(2 * plan.steps_per_epoch)]
    found = list(ahead(lambda step: made.step(plan, step), range(len(plain)), workers, 4))
    assert [step for step, _ in found] == list(range(len(plain)))
    for one, (_, other) in zip(plain, found, strict=True):
        for batch, again in zip(one, other, strict=True):
            for name, value in batch.items():
                assert torch.equal(value, again[name]) if isinstance(value, torch.Tensor) else value == again[name]


def test_every_example_is_learned_once_an_epoch_when_packed(tmp_path: Path) -> None:
    made, plan = batches(tmp_path, packing=True)
    assert made.rows < len(made.examples) / 2
    learned = sum(
        int((batch["labels"][:, 1:] != -100).sum())
        for step in range(plan.steps_per_epoch)
        for batch in made.step(plan, step)
    )
    assert learned == int(made.examples.column("supervised").sum())
    assert made.report() == [f"packed: {len(made.examples)} examples in {made.rows} rows of 64 tokens, "
                             f"{made.examples.lengths.sum() / made.rows / 64:.1%} full"]  # fmt: skip


def test_filled_up_rows_are_of_one_length_and_learn_the_same(tmp_path: Path) -> None:
    made, _ = batches(tmp_path, packing=True)
    plan = StepPlan(made.rows, 1, 2, 1, 0, 0, shuffle=True)
    filled, longest = made.of_one_length(), max(int(made.examples.lengths[row].sum()) for row in made.packed or ())
    steps = range(plan.steps_per_epoch)
    plain = [batch for step in steps for batch in made.step(plan, step)]
    full = [batch for step in steps for batch in filled.step(plan, step)]
    assert len({batch["input_ids"].shape for batch in plain}) > 1, "something to fill up"
    assert {batch["input_ids"].shape for batch in full} == {(1, longest)}
    for one, other in zip(plain, full, strict=True):
        length = one["input_ids"].shape[1]
        for name in ("input_ids", "labels", "segments", "positions", "contexts"):
            assert torch.equal(other[name][:, :length], one[name]), name
        assert torch.equal(other["targets"], one["targets"])
        assert torch.equal(other["lengths"], one["lengths"])
        assert not other["segments"][:, length:].any()
        assert (other["labels"][:, length:] == -100).all()
    assert filled.report()[0].endswith(
        f"{made.rows} rows of {longest} tokens, {made.examples.lengths.sum() / made.rows / longest:.1%} full; "
        "all are filled up to one length, for which blocks are compiled"
    )
    padded, _ = batches(tmp_path)
    assert padded.of_one_length() is padded


def test_a_failure_in_a_thread_is_raised_where_the_batch_is_used() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise ValueError("broken")
        return step

    used = []
    with pytest.raises(ValueError, match="broken"):
        used += [step for step, _ in (pair for pair in ahead(make, range(5), 1, 2))]
    assert used == []


def test_no_more_than_prefetch_steps_are_made_ahead_and_no_thread_stays() -> None:
    made: list[int] = []
    steps = ahead(lambda step: made.append(step), range(100), 1, 3)
    next(steps)
    time.sleep(0.05)
    assert len(made) <= 5
    steps.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_similar_lengths_share_a_step_and_the_short_step_stays_last() -> None:
    lengths = np.arange(1000) % 97
    plan = StepPlan(1000, 4, 2, 1, 0, 0, True, lengths)
    plain = StepPlan(1000, 4, 2, 1, 0, 0, True)
    spread = [np.ptp(lengths[plan.window(step)]) for step in range(plan.steps_per_epoch)]
    before = [np.ptp(lengths[plain.window(step)]) for step in range(plain.steps_per_epoch)]
    assert np.mean(spread) < np.mean(before) / 5
    assert sorted(row for step in range(plan.steps_per_epoch) for row in plan.window(step)) == list(range(1000))
    assert plan.order(0) != plan.order(1)
    uneven = StepPlan(1003, 4, 2, 1, 0, 0, True, np.arange(1003))
    assert [len(uneven.window(step)) for step in range(uneven.steps_per_epoch)] == [8] * 125 + [3]


def test_a_thread_is_used_where_a_rank_has_a_core_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    assert [threads(None, ranks) for ranks in (1, 2, 4)] == [1, 1, 0]
    assert threads(0, 1) == 0
