"""A rank that stands out is named once, by the mean over twenty steps; what each logged step had is kept."""

from __future__ import annotations

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
    result = standing_out(values)
    if found is None:
        assert result is None
    else:
        assert result == (found[0], pytest.approx(found[1]))


def test_a_slow_rank_is_named_once_after_twenty_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's numbers as they are; ranks 1 and 2 as they are, and half as slow again in data and forward."""
    monkeypatch.setattr(distributed, "all_rows", lambda row: [row, row, [*row[:3], row[3] * 1.5]], raising=True)
    recorded: dict[int, dict[str, list[float]]] = {}
    said: list[str] = []
    per_rank = PerRank(recorded.__setitem__, said.append)
    for step in range(1, 61):
        per_rank.add(tokens=100, step_s=0.5, own_s=0.2)
        if step % 5 == 0:
            assert per_rank.gather(step, peak_bytes=2**30) == 2**30
        if step == 15:
            assert said == []
    assert said == [
        "step 20: rank 2 stands out by +50%: data and forward pass of a step 0.3 s, the others' mean is 0.2 s "
        "(every rank: ranks.jsonl)"
    ]
    assert sorted(recorded) == list(range(5, 61, 5))
    assert recorded[5] == {
        "peak_bytes": [2.0**30] * 3,
        "tokens": [100.0] * 3,
        "step_s": pytest.approx([0.5] * 3),
        "own_s": pytest.approx([0.2, 0.2, 0.3]),
    }


def test_one_rank_alone_says_and_keeps_nothing() -> None:
    recorded: dict[int, dict[str, list[float]]] = {}
    said: list[str] = []
    per_rank = PerRank(recorded.__setitem__, said.append)
    for step in range(1, 50):
        per_rank.add(tokens=1, step_s=1.0, own_s=1.0)
        assert per_rank.gather(step, 7, {"process_bytes": 9.0}) == 7
    assert (recorded, said) == ({}, [])
