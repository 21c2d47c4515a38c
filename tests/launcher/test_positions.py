"""Who holds up the others is told from the ranks' positions: by count, not by clocks, once and not every second."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from glmexp.launcher import positions
from glmexp.launcher.folder import write_json
from glmexp.launcher.positions import FOLDER, Position, Watch, table


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(positions.time, "monotonic", made.monotonic)
    return made


def _write(folder: Path, *places: Position) -> None:
    for one in places:
        write_json(folder / FOLDER / f"rank{one.rank}.json", asdict(one))


def _watched(folder: Path, clock: Clock, places: list[Position], seconds: int, watch: Watch) -> None:
    for _ in range(seconds):
        clock.now += 1
        for one in places:
            one.beat += 1
        _write(folder, *places)
        watch.look()


def test_the_rank_that_is_behind_is_named_with_those_that_wait(tmp_path: Path, clock: Clock) -> None:
    said: list[str] = []
    watch = Watch(tmp_path, 4, 30, said.append)
    places = [Position(rank, 70, 17, "optimizer") for rank in range(4)]
    places[3] = Position(3, 69, 17, "backward")
    _watched(tmp_path, clock, places, 30, watch)
    assert said == []
    _watched(tmp_path, clock, places, 10, watch)
    assert said == ["rank 3 has been in step 17, backward for 31 s; ranks 0 to 2 wait in step 17, optimizer"]
    _watched(tmp_path, clock, places, 60, watch)
    assert [line[:45] for line in said[1:]] == ["rank 3 has been in step 17, backward for 62 s"], "after twice the time"
    places[3] = Position(3, 71, 18, "data")
    said.clear()
    _watched(tmp_path, clock, places, 2, watch)
    places[:3] = [Position(rank, 72, 18, "data") for rank in range(3)]
    _watched(tmp_path, clock, places, 20, watch)
    assert said == []


def test_a_rank_without_a_sign_is_named_and_one_that_has_ended_is_not(tmp_path: Path, clock: Clock) -> None:
    said: list[str] = []
    watch = Watch(tmp_path, 2, 30, said.append)
    alive, stopped = Position(0, 5, 2, "data"), Position(1, 5, 2, "data")
    _watched(tmp_path, clock, [alive, stopped], 3, watch)
    _watched(tmp_path, clock, [alive], 12, watch)
    assert said == [
        "rank 1 has given no sign for 11 s, last in step 2, data: it is stopped, swapped out, or its machine is gone"
    ]
    stopped.ended = True
    said.clear()
    _watched(tmp_path, clock, [alive, stopped], 1, watch)
    _watched(tmp_path, clock, [alive], 25, watch)
    assert said == []


def test_ranks_that_stand_still_together_are_said_much_later(tmp_path: Path, clock: Clock) -> None:
    said: list[str] = []
    watch = Watch(tmp_path, 2, 30, said.append)
    places = [Position(rank, 5, 2, "backward") for rank in range(2)]
    _watched(tmp_path, clock, places, 120, watch)
    assert said == []
    _watched(tmp_path, clock, places, 5, watch)
    assert said == ["all ranks have been in step 2, backward for 121 s"]


def test_off_says_nothing(tmp_path: Path, clock: Clock) -> None:
    said: list[str] = []
    watch = Watch(tmp_path, 2, None, said.append)
    _watched(tmp_path, clock, [Position(0, 9), Position(1, 1)], 500, watch)
    assert said == []


def test_the_report_marks_who_is_behind_and_who_cannot_be_seen(tmp_path: Path) -> None:
    assert table(tmp_path, 2) == []
    _write(tmp_path, Position(0, 9, 4, "backward", 20.2), Position(1, 8, 4, "forward", 22.9))
    assert table(tmp_path, 3) == [
        "where each rank was last:",
        "  rank 0  step 4, backward, for 20 s",
        "  rank 1  step 4, forward, for 23 s  <- behind the others",
        "  rank 2  not seen from this machine",
    ]
