from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from glmexp.config.registry import names, option
from glmexp.tracker.base import Guard, NoTracker, RunInfo, Status


class Broken(NoTracker):
    """Raises in one method and notes what is called."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.method:
            raise RuntimeError("no quota")

    def start(self, info: RunInfo) -> list[str]:
        self._call("start")
        return ["started"]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log")

    def table(self, name: str, step: int, rows: object) -> None:
        self._call("table")

    def summary(self, values: object) -> None:
        self._call("summary")

    def artifact(self, folder: Path) -> None:
        self._call("artifact")

    def finish(self, status: Status) -> list[str]:
        self._call("finish")
        return [status]


def through_a_run(tracker: Broken) -> tuple[Guard, list[str], list[str]]:
    warnings: list[str] = []
    guard = Guard("broken", tracker, warnings.append)
    lines = guard.start(RunInfo("run", Path(), {}, None))
    for step in (1, 2):
        guard.log(step, {"train/loss": 1.0})
    guard.table("answers", 2, [{"prompt": "a"}])
    guard.summary({"best": 1})
    guard.artifact(Path("artifact"))
    return guard, lines + guard.finish("finished"), warnings


@pytest.mark.parametrize("method", ["start", "log", "table", "summary", "artifact", "finish"])
def test_a_tracker_that_fails_is_reported_once_and_switched_off(method: str) -> None:
    tracker = Broken(method)
    guard, lines, warnings = through_a_run(tracker)
    assert guard.failure == f"{method}: RuntimeError: no quota"
    assert warnings == [
        f"tracker broken failed ({method}: RuntimeError: no quota) and is switched off; training goes on"
    ]
    before = {"start": [], "log": ["start"], "table": ["start", "log", "log"]}
    if method in before:
        assert tracker.calls == [*before[method], method, "finish"], "what was tracked so far is kept"
        assert lines[-1] == "finished"


def test_failing_again_at_the_end_adds_no_second_warning() -> None:
    class Dead(Broken):
        def _call(self, name: str) -> None:
            raise RuntimeError(name)

    guard, lines, warnings = through_a_run(Dead("all"))
    assert lines == []
    assert len(warnings) == 1
    assert guard.failure == "start: RuntimeError: start"


def test_a_tracker_that_works_is_passed_through() -> None:
    guard, lines, warnings = through_a_run(Broken("nothing"))
    assert (guard.failure, lines, warnings) == (None, ["started", "finished"], [])


def test_an_interrupt_is_no_failure_of_the_tracker() -> None:
    class Interrupted(NoTracker):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guard("interrupted", Interrupted(), print).log(1, {})


def test_every_tracker_is_an_option_that_builds_one() -> None:
    assert names("tracker") == ["none", "tensorboard", "wandb"]
    tracker = option("tracker", "none")(name="none").build()
    assert tracker.start(RunInfo("run", Path(), {}, None)) + tracker.finish("finished") == []
