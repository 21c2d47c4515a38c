from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmexp.data.batches import StepPlan, eval_batches, pick

from .fakes import example


def plan(rows: int, micro: int = 1, accum: int = 1, ranks: int = 1, rank: int = 0, **values: object) -> StepPlan:
    return StepPlan(rows, micro, accum, ranks, rank, **{"seed": 3, "shuffle": True, **values})  # type: ignore[arg-type]


def rows_of(batches: list[list[int | None]]) -> list[int]:
    return [row for batch in batches for row in batch if row is not None]


sizes = st.integers(1, 5)


@settings(max_examples=80, deadline=None)
@given(rows=st.integers(1, 40), micro=sizes, accum=sizes, ranks=sizes, shuffle=st.booleans())
def test_every_epoch_passes_each_row_once_over_all_ranks(
    rows: int, micro: int, accum: int, ranks: int, shuffle: bool
) -> None:
    plans = [plan(rows, micro, accum, ranks, rank, shuffle=shuffle) for rank in range(ranks)]
    steps = plans[0].steps_per_epoch
    for epoch in range(2):
        seen: list[int] = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            batches = [one.micro_batches(step) for one in plans]
            assert all([len(batch) for batch in mine] == [micro] * accum for mine in batches)
            together = [row for mine in batches for row in rows_of(mine)]
            assert sorted(together) == sorted(plans[0].window(step))
            counts = [len(rows_of(mine)) for mine in batches]
            assert max(counts) - min(counts) <= 1, "a short step is shared out evenly"
            seen += together
        assert sorted(seen) == list(range(rows))


def test_a_step_sees_the_same_rows_however_the_batch_is_made_up() -> None:
    shapes = [(6, 1, 1), (3, 2, 1), (2, 3, 1), (1, 6, 1), (1, 3, 2), (3, 1, 2), (1, 1, 6)]
    for step in range(5):
        seen = set()
        for micro, accum, ranks in shapes:
            mine = [rows_of(plan(14, micro, accum, ranks, rank).micro_batches(step)) for rank in range(ranks)]
            seen.add(tuple(sorted(row for rows in mine for row in rows)))
        assert len(seen) == 1


def test_order_changes_with_epoch_and_seed_and_can_be_asked_for_at_any_step() -> None:
    one = plan(30, 2)
    assert one.order(0) != one.order(1)
    assert plan(30, 2, seed=4).order(0) != one.order(0)
    assert plan(30, 2, shuffle=False).order(1) == list(range(30))
    walked = [one.micro_batches(step) for step in range(40)]
    assert plan(30, 2).micro_batches(37) == walked[37]


def test_the_order_of_a_seed_stays_the_same_over_versions() -> None:
    """Runs are repeated by their seed alone: a change here changes what every seed means."""
    assert plan(8, seed=42).order(0) == [1, 7, 2, 3, 5, 6, 4, 0]


def test_steps_of_a_run() -> None:
    one = plan(10, 2, 2)
    assert one.steps_per_epoch == 3
    assert one.total_steps(2, None) == 6
    assert one.total_steps(0.5, None) == 2
    assert one.total_steps(0.01, None) == 1
    assert one.total_steps(3, 60) == 60
    assert plan(30).total_steps(0.1, None) == 3
    assert [round(one.epoch(step), 2) for step in range(5)] == [0, 0.4, 0.8, 1, 1.4]


def test_report_says_how_short_the_last_step_is() -> None:
    assert plan(5, 2, 1, 2).report() == (
        "5 rows, 2 steps an epoch; the last step of an epoch has 1 of 4 rows; no row is repeated or left out"
    )
    assert plan(4, 2, 1, 2).report() == "4 rows, 1 step an epoch; no row is repeated or left out"
    assert plan(1, 4, 8).report() == (
        "1 row, 1 step an epoch; the last step of an epoch has 1 of 32 rows; no row is repeated or left out"
    )


@settings(max_examples=80, deadline=None)
@given(rows=st.integers(0, 40), ranks=sizes, size=sizes)
def test_evaluation_counts_each_row_once_in_equally_many_equal_batches(rows: int, ranks: int, size: int) -> None:
    batches = [eval_batches(rows, rank, ranks, size) for rank in range(ranks)]
    assert sorted(row for mine in batches for row in rows_of(mine)) == list(range(rows))
    shapes = [[len(batch) for batch in mine] for mine in batches]
    assert all(one == other for one, other in pairwise(shapes))
    assert all(0 < length <= size for length in shapes[0])


@pytest.mark.parametrize("places", [[1, None, 0], [None, None]])
def test_blank_places_have_nothing_to_learn(places: list[int | None]) -> None:
    examples = [example("a", "b"), example("long" * 9, "c")]
    picked = pick(examples, places)
    assert [one.supervised_tokens for one in picked] == [2 * (place is not None) for place in places]
    assert max(len(one.input_ids) for one, place in zip(picked, places, strict=True) if place is None) == 5
