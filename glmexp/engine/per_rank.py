"""Peak memory, tokens and time of each rank, gathered at every logged step; a rank that stands out is named once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from glmexp.engine import distributed

FILE = "ranks.jsonl"
SPREAD = 0.10
"""A rank that lies further from the others' mean than this share of it is named."""
MEASURED_STEPS = 20
"""Before so many steps a spread says more about warming up than about a rank."""
NAMES = ("peak_bytes", "tokens", "step_s", "own_s")
"""Columns: own_s is the time a step before this rank first waits for others: its data and its forward passes."""
_WORDS = {
    "peak_bytes": ("peak memory", "GiB", 2**30),
    "tokens": ("tokens a step", "", 1),
    "step_s": ("time of a step", "s", 1),
    "own_s": ("data and forward pass of a step", "s", 1),
}


@dataclass
class PerRank:
    """Adds up this rank's steps; ``gather`` is collective."""

    record: Callable[[int, dict[str, list[float]]], None] = lambda step, columns: None
    """Gets each logged step's columns, one value a rank."""
    say: Callable[[str], None] = lambda line: None
    _steps: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * (len(NAMES) - 1))
    _window_steps: int = 0
    _window: dict[str, list[float]] = field(default_factory=dict)
    _said: set[tuple[str, int]] = field(default_factory=set)

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
        """Over ``MEASURED_STEPS`` steps or more at a time: single steps differ in their rows."""
        for name in NAMES[1:]:
            before = self._window.get(name, [0.0] * len(columns[name]))
            self._window[name] = [a + b * self._steps for a, b in zip(before, columns[name], strict=True)]
        self._window_steps += self._steps
        if self._window_steps < MEASURED_STEPS:
            return
        means = {name: [total / self._window_steps for total in totals] for name, totals in self._window.items()}
        for line in self._spreads(step, {NAMES[0]: columns[NAMES[0]], **means}):
            self.say(line)
        self._window, self._window_steps = {}, 0

    def _spreads(self, step: int, columns: dict[str, list[float]]) -> list[str]:
        lines = []
        for name, values in columns.items():
            found = standing_out(values)
            if found is None or (name, found[0]) in self._said:
                continue
            rank, share = found
            self._said.add((name, rank))
            what, unit, size = _WORDS[name]
            others = sum(values[:rank] + values[rank + 1 :]) / (len(values) - 1)
            lines.append(
                f"step {step}: rank {rank} stands out by {share:+.0%}: {what} {values[rank] / size:.4g} {unit}".rstrip()
                + f", the others' mean is {others / size:.4g} {unit}".rstrip()
                + " (every rank: ranks.jsonl)"
            )
        return lines


def standing_out(values: list[float]) -> tuple[int, float] | None:
    """(rank, share) of the rank that lies furthest from the mean of the others, where it is more than ``SPREAD``."""
    found = None
    for rank, value in enumerate(values):
        others = [*values[:rank], *values[rank + 1 :]]
        mean = sum(others) / len(others) if others else 0.0
        share = value / mean - 1 if mean > 0 else 0.0
        if abs(share) > SPREAD and (found is None or abs(share) > abs(found[1])):
            found = (rank, share)
    return found
