"""A rank is named where it keeps standing out, and again where that changes; what each logged step had is kept."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from glmexp.engine import distributed
from glmexp.engine.per_rank import PerRank, standing_out


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1.0, 1.0, 1.0, 1.0], None),
        ([1.0, 1.09, 1.0, 1.0], None),
        ([1.0, 1.0, 1.0, 1.3], (3, 0.3)),
        ([10.0, 10.0, 7.0, 10.0], (2, -0.3)),
        ([1.0, 2.0], (1, 1.0)),
        ([5.0], None),
        ([0.0, 0.0], None),
    ],
)
def test_more_than_a_tenth_from_the_mean_of_the_others_stands_out(
    values: list[float], found: tuple[int, float] | None
) -> None:
    result = standing_out([values])
    if found is None:
        assert result is None
    else:
        assert result == (found[0], pytest.approx(found[1]))


def test_what_its_lines_scatter_by_does_not_stand_out() -> None:
    assert standing_out([[1.0, 1.1], [1.0, 1.2], [1.0, 1.15]]) == (1, pytest.approx(0.15))
    assert standing_out([[1.0, 1.0], [1.0, 1.3], [1.0, 1.15]]) is None


def lines(
    monkeypatch: pytest.MonkeyPatch, others: Callable[[float], list[float]], steps: int
) -> tuple[list[str], dict[int, dict[str, list[float]]]]:
    """What is said, and kept, of ranks whose own_s is rank 0's 0.2 s and what ``others`` makes of it."""
    recorded: dict[int, dict[str, list[float]]] = {}
    said: list[str] = []
    per_rank = PerRank(recorded.__setitem__, said.append)
    monkeypatch.setattr(distributed, "all_rows", lambda row: [row, *([*row[:3], own] for own in others(row[3]))])
    for step in range(1, steps + 1):
        per_rank.add(tokens=100, step_s=0.5, own_s=0.2)
        if step % 2 == 0:
            assert per_rank.gather(step, peak_bytes=2**30) == 2**30
    return said, recorded


def test_a_slow_rank_is_named_once_and_when_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2: half as slow again, after 60 steps twice as slow, after 110 as the others. The first line is not looked
    at, since libraries set themselves up in it."""
    factors = iter([1.5] * 31 + [2] * 25 + [1] * 24)
    said, recorded = lines(monkeypatch, lambda s: [s, s * next(factors)], 160)
    assert said == [
        "step 22: rank 2 stands out by +50%: data and forward pass of a step 0.3 s, the others' mean is 0.2 s "
        "(every rank: ranks.jsonl)",
        "step 82: rank 2 stands out by +100%: data and forward pass of a step 0.4 s, the others' mean is 0.2 s "
        "(every rank: ranks.jsonl)",
        "step 142: rank 2 no longer stands out: data and forward pass of a step",
    ]
    assert sorted(recorded) == list(range(2, 161, 2))
    assert recorded[2] == {
        "peak_bytes": [2.0**30] * 3,
        "tokens": [100.0] * 3,
        "step_s": pytest.approx([0.5] * 3),
        "own_s": pytest.approx([0.2, 0.2, 0.3]),
    }


def test_two_ranks_that_disturb_one_another_get_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of two processes on one CPU, which scatter by a third."""
    draw = random.Random(0)
    assert lines(monkeypatch, lambda s: [s * 1.12 * draw.lognormvariate(0, 0.3)], 2000)[0] == []


def test_memory_of_processes_on_a_cpu_is_kept_and_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    for memory, count in ((True, 1), (False, 0)):
        said: list[str] = []
        per_rank = PerRank(say=said.append, memory=memory)
        monkeypatch.setattr(distributed, "all_rows", lambda row: [row, [row[0] * 0.8, *row[1:]]])
        for step in range(50):
            per_rank.add(tokens=100, step_s=0.5, own_s=0.2)
            per_rank.gather(step, peak_bytes=2**30)
        assert len(said) == count


def test_one_rank_alone_says_and_keeps_nothing() -> None:
    recorded: dict[int, dict[str, list[float]]] = {}
    said: list[str] = []
    per_rank = PerRank(recorded.__setitem__, said.append)
    for step in range(1, 50):
        per_rank.add(tokens=1, step_s=1.0, own_s=1.0)
        assert per_rank.gather(step, 7, {"process_bytes": 9.0}) == 7
    assert (recorded, said) == ({}, [])
