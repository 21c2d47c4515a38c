"""Peak memory, tokens and time of each rank, gathered at every logged step; a rank that keeps standing out is named."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from glmexp.engine import distributed

FILE = "ranks.jsonl"
SPREAD = 0.10
"""A rank that lies further from the others' mean than this share of it can be named."""
MEASURED_STEPS, MEASURED_LINES = 20, 10
"""Over so many steps, and logged lines, at a time: single steps differ in their rows."""
NAMES = ("peak_bytes", "tokens", "step_s", "own_s")
"""Columns: own_s is the time a step before this rank first waits for others: its data and its forward passes."""
_WORDS = {
    "peak_bytes": ("peak memory", "GiB", 2**30),
    "tokens": ("tokens a step", "", 1),
    "own_s": ("data and forward pass of a step", "s", 1),
}
"""What is judged: the time of a whole step is everybody's."""
Found = tuple[int, float]
"""(rank, share of the others' mean by which it lies beside it)."""


@dataclass
class PerRank:
    """Adds up this rank's steps; ``gather`` is collective."""

    record: Callable[[int, dict[str, list[float]]], None] = lambda step, columns: None
    """Gets each logged step's columns, one value a rank."""
    say: Callable[[str], None] = lambda line: None
    memory: bool = True
    """Peaks of memory are judged too; not on a CPU, where rank 0's process keeps the records."""
    _steps: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * (len(NAMES) - 1))
    _lines: int = 0
    _window_steps: int = 0
    _window: list[dict[str, list[float]]] = field(default_factory=list)
    _said: dict[str, Found] = field(default_factory=dict)
    """Column to what was said of it last and still holds."""

    def add(self, tokens: int, step_s: float, own_s: float) -> None:
        """One step of this rank."""
        self._steps += 1
        self._sums = [total + one for total, one in zip(self._sums, (tokens, step_s, own_s), strict=True)]

    def gather(self, step: int, peak_bytes: int, now: Mapping[str, float] | None = None) -> float:
        """Means over the steps since the last call, from all ranks; the highest peak of memory in bytes.

        now: further columns, which are kept and not judged: what they are at this moment.
        """
        means = [total / max(1, self._steps) for total in self._sums]
        now = now or {}
        rows = distributed.all_rows([float(peak_bytes), *means, *now.values()])
        columns = {name: [row[number] for row in rows] for number, name in enumerate((*NAMES, *now))}
        if len(rows) > 1:
            self.record(step, columns)
            self._judge(step, columns)
        self._steps, self._sums = 0, [0.0] * len(means)
        return max(columns["peak_bytes"])

    def _judge(self, step: int, columns: dict[str, list[float]]) -> None:
        """A line where a rank begins to stand out, stands out by another share, or does so no longer."""
        self._lines += 1
        if self._lines == 1:  # libraries, compilers and caches set themselves up in it
            return
        self._window.append(columns)
        self._window_steps += self._steps
        if self._window_steps < MEASURED_STEPS or len(self._window) < MEASURED_LINES:
            return
        for name in _WORDS if self.memory else [name for name in _WORDS if name != "peak_bytes"]:
            line = self._changed(name, [one[name] for one in self._window])
            if line is not None:
                self.say(f"step {step}: {line}")
        self._window, self._window_steps = [], 0

    def _changed(self, name: str, rows: list[list[float]]) -> str | None:
        half = len(rows) // 2
        first, second, whole = (standing_out(part) for part in (rows[:half], rows[half:], rows))
        what, unit, size = _WORDS[name]
        before = self._said.get(name)
        if first is None and second is None and whole is None and before is not None:
            del self._said[name]
            return f"rank {before[0]} no longer stands out: {what}"
        if first is None or second is None or whole is None or not first[0] == second[0] == whole[0]:
            return None  # now this one, now that one
        rank, share = whole
        if before is not None and before[0] == rank and abs(share - before[1]) <= SPREAD:
            return None
        self._said[name] = whole
        mean, others = (value / size for value in _beside(rows, rank))
        return (
            f"rank {rank} stands out by {share:+.0%}: {what} {mean:.4g} {unit}".rstrip()
            + f", the others' mean is {others:.4g} {unit}".rstrip()
            + " (every rank: ranks.jsonl)"
        )


def standing_out(rows: Sequence[Sequence[float]]) -> Found | None:
    """The rank that lies furthest from the mean of the others, by more than ``SPREAD`` and by more than its lines
    scatter (two standard deviations). ``rows``: one a logged line, a value a rank."""
    found = None
    for rank in range(len(rows[0])):
        lines = [_share(*_beside([row], rank)) for row in rows]
        share = _share(*_beside(rows, rank))
        usual = 2 * statistics.stdev(lines) if len(lines) > 1 else 0.0
        if abs(share) > max(SPREAD, usual) and (found is None or abs(share) > abs(found[1])):
            found = (rank, share)
    return found


def _beside(rows: Sequence[Sequence[float]], rank: int) -> tuple[float, float]:
    """Means of one rank's values and of the others'."""
    others = [value for row in rows for place, value in enumerate(row) if place != rank]
    return statistics.fmean(row[rank] for row in rows), statistics.fmean(others) if others else 0.0


def _share(own: float, others: float) -> float:
    return own / others - 1 if others > 0 else 0.0
