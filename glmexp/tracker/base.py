"""What a tracker is, and the guard that keeps training going when one fails.

The settings of a tracker are a dataclass under ``@register("tracker", NAME)`` with ``build() -> Tracker``. Only rank 0
tracks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told of a run."""

    name: str
    folder: Path
    """The run folder. A tracker keeps its id there, so that a resumed run goes on under it."""
    config: dict[str, Any]
    """The composed configuration, nested."""
    group: str | None
    """The sweep that the run belongs to."""
    job_type: str = "train"
    """The entry: training runs and evaluations are told apart by it."""
    tags: tuple[str, ...] = ()
    """What the run is in a few words: model, method, stage, number format."""


class Tracker(Protocol):
    """Where metrics are shown. Methods may raise: the guard is around them."""

    def start(self, info: RunInfo) -> list[str]:
        """Open the run; lines for the terminal."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics after optimizer step ``step``; steps do not fall."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows with the same keys, such as generated answers."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Values of the run as a whole."""

    def artifact(self, folder: Path) -> None:
        """What was trained, once it is proven; kept where the user asked for that."""

    def finish(self, status: Status) -> list[str]:
        """Close the run; lines for the terminal: where to read it."""


class NoTracker:
    """Shows nothing: tracker=none, and every rank but the first."""

    def start(self, info: RunInfo) -> list[str]:
        return []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def artifact(self, folder: Path) -> None:
        """Nothing."""

    def finish(self, status: Status) -> list[str]:
        return []


class Guard:
    """A tracker that cannot stop the training: its first failure is reported and ends the tracking."""

    def __init__(self, name: str, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self.name = name
        self.failure: str | None = None
        """Why tracking ended early; for the run's status."""
        self._tracker = tracker
        self._warn = warn

    def start(self, info: RunInfo) -> list[str]:
        """Open the run; lines for the terminal."""
        return self._try("start", lambda: self._tracker.start(info)) or []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics after optimizer step ``step``."""
        self._try("log", lambda: self._tracker.log(step, metrics))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows with the same keys."""
        self._try("table", lambda: self._tracker.table(name, step, rows))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Values of the run as a whole."""
        self._try("summary", lambda: self._tracker.summary(values))

    def artifact(self, folder: Path) -> None:
        """What was trained, once it is proven."""
        self._try("artifact", lambda: self._tracker.artifact(folder))

    def finish(self, status: Status) -> list[str]:
        """Close the run; lines for the terminal. Also after a failure: what was tracked before it is kept."""
        earlier, self.failure = self.failure, None
        lines = self._try("finish", lambda: self._tracker.finish(status), quiet=earlier is not None)
        self.failure = earlier or self.failure
        return lines or []

    def _try(self, action: str, call: Callable[[], Any], quiet: bool = False) -> Any:
        if self.failure is not None:
            return None
        try:
            return call()
        except Exception as error:  # noqa: BLE001  a tracker is somebody else's service: whatever it raises, train on
            self.failure = f"{action}: {type(error).__name__}: {error}"
            if not quiet:
                self._warn(f"tracker {self.name} failed ({self.failure}) and is switched off; training goes on")
            return None
