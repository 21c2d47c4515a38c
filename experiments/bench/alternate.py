"""Speeds of several training commands, measured in turns on one machine.

    python experiments/bench/alternate.py SIDES.json --case NAME [--windows 5] [--out results/FILE.jsonl]

SIDES.json: [{"name": ..., "command": [...], "metrics": FILE, "steps": 8, "alone": false, "env": {}, "ranks": 1}, ...].
Each side is a command that appends one JSON line per optimizer step to its ``metrics`` file, with ``perf/step_s`` and
``perf/tokens_per_s`` (of real tokens), as glmexp's metrics.jsonl has them.

Sides of one rank start together; each is brought past its warm-up and stopped there (SIGSTOP, all of its processes), so
that all wait in memory. Then they take turns: one is continued, its first step is dropped (it was stopped within it),
``steps`` further ones are a window, and it is stopped again. The order is turned round from round to round. A window's
speed is its tokens divided by its seconds; the seconds are those that the side itself measured, and
``clock_tokens_per_s`` divides by the time between the lines that arrived here, for comparison.

A side that is ``alone`` has the machine for itself: it is started anew for its windows and ended behind them, and such
sides take turns by restart. Ratios are to the first side, round by round; their interval is a bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shlex
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import keep, setting
from running import POLL_S, ROOT, Running, Side, SideFailed

RESAMPLES = 4000
ERROR = re.compile(r"(\[rank\d+\]: ?)?[\w.]+(Error|Exception|Interrupt)\b")
REASON_CHARACTERS = 600


@dataclass(frozen=True)
class Plan:
    """How to measure, and how long to wait for what."""

    windows: int = 5
    warm_up: int = 5
    """Steps that are run and not counted, once after each start."""
    windows_a_start: int = 2
    """Of a side that is alone."""
    start_limit_s: float = 240.0
    """From the start to the end of the warm-up."""
    window_limit_s: float = 120.0
    total_limit_s: float = 560.0
    """Rounds that would begin later are left out."""


@dataclass(frozen=True)
class Window:
    """What was counted in one turn of a side."""

    tokens: float
    seconds: float
    clock_s: float
    steps: int
    peak_bytes: float
    phases_s: dict[str, float]

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def counted(lines: Sequence[tuple[float, dict[str, float]]]) -> Window:
    """The window of all lines but the first."""
    steps = [line for _, line in lines[1:]]
    phases = ("data", "forward", "backward", "optimizer", "records")
    return Window(
        tokens=sum(line["perf/tokens_per_s"] * line["perf/step_s"] for line in steps),
        seconds=sum(line["perf/step_s"] for line in steps),
        clock_s=lines[-1][0] - lines[0][0],
        steps=len(steps),
        peak_bytes=max(line.get("mem/peak_bytes", 0.0) for line in steps),
        phases_s={
            name: sum(line[f"perf/{name}_s"] for line in steps) for name in phases if f"perf/{name}_s" in steps[0]
        },
    )


def measure(case: str, sides: Sequence[Side], plan: Plan, work: Path) -> list[dict[str, Any]]:
    """One row a side. A side that fails has its reason in place of numbers; the others are measured all the same."""
    work.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, _interrupted)
    measurement = Measurement(plan, work)
    try:
        measurement.in_turns([side for side in sides if not side.alone])
        measurement.by_restart([side for side in sides if side.alone])
    finally:
        signal.signal(signal.SIGTERM, before)
    about = {"case": case, **setting(ROOT), "wall_s": round(time.monotonic() - measurement.began, 1)}
    first = measurement.windows[sides[0].name]
    rows = []
    for side in sides:
        row = {"kind": "side", "side": side.name, "command": _told(side.command, work.parent)}
        row |= _numbers(measurement.windows[side.name], first) | measurement.notes[side.name]
        if side.name in measurement.faults:
            row["fault"] = _without_folders(measurement.faults[side.name], work.parent)
        rows.append(row | about)
    return rows


def _interrupted(number: int, frame: object) -> None:
    """An outer time limit must leave no process behind: SystemExit runs what stands in ``finally``, once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


class Measurement:
    """Windows, faults and notes by side and round."""

    def __init__(self, plan: Plan, work: Path) -> None:
        self.plan, self.work = plan, work
        self.began = time.monotonic()
        self.windows: dict[str, dict[int, Window]] = defaultdict(dict)
        self.faults: dict[str, str] = {}
        self.notes: dict[str, dict[str, Any]] = defaultdict(dict)

    def in_turns(self, sides: Sequence[Side]) -> None:
        """All in memory together; one runs at a time."""
        running: list[Running] = []
        with contextlib.ExitStack() as ends:  # ends each, also when ending another one fails
            # One with several ranks is stopped where no GPU has work (Running.stop): nothing else may run then.
            together = [sides] if all(side.ranks == 1 for side in sides) else [[side] for side in sides]
            for starting in together:
                started = [Running(side, self.work / f"{side.name}.log") for side in starting]
                for one in started:
                    ends.callback(one.family.end)
                self._warm_up(started)
                running += [one for one in started if one.side.name not in self.faults]
            for number in range(self.plan.windows):
                for one in list(running) if number % 2 == 0 else running[::-1]:
                    if not self._late(number) and not self._window(one, number, paused=True):
                        running.remove(one)
                    self.notes[one.side.name]["stops_with_busy_gpu"] = one.unrested

    def by_restart(self, sides: Sequence[Side]) -> None:
        """Each alone on the machine, started anew for every few windows."""
        starts = range(0, self.plan.windows, self.plan.windows_a_start)
        taken: dict[str, int] = defaultdict(int)
        for turn, first in enumerate(starts):
            for side in sides if turn % 2 == 0 else sides[::-1]:
                if side.name in self.faults or self._late(first):
                    continue
                one = Running(side, self.work / f"{side.name}-{first}.log")
                try:
                    numbers = range(first, min(self.plan.windows, first + self.plan.windows_a_start))
                    if self._warmed(one):
                        all(self._window(one, number, paused=False) for number in numbers)
                finally:
                    one.family.end()
                taken[side.name] = max(taken[side.name], one.host_bytes)
                self.notes[side.name]["host_peak_gib"] = round(taken[side.name] / 2**30, 1)

    def _late(self, number: int) -> bool:
        late = time.monotonic() - self.began > self.plan.total_limit_s
        if late:
            _say(f"no time left for round {number}")
        return late

    def _warm_up(self, running: Sequence[Running]) -> None:
        """Each past its warm-up, and then stopped while the others go on."""
        waiting = [(one, self._warming(one)) for one in running]
        while waiting:
            waiting = [(one, steps) for one, steps in waiting if not self._done(one, steps, len(running))]
            time.sleep(POLL_S)

    def _warmed(self, one: Running) -> bool:
        """Whether it came past its warm-up, alone; else it is ended."""
        warming = self._warming(one)
        while not self._done(one, warming, 0):
            time.sleep(POLL_S)
        return one.side.name not in self.faults

    def _warming(self, one: Running) -> Iterator[None]:
        seen: list[tuple[float, dict[str, float]]] = []
        yield from one.coming(seen, self.plan.warm_up, self.plan.start_limit_s, "its start and warm-up")
        first, warm = (round(at - one.started, 1) for at, _ in (seen[0], seen[self.plan.warm_up - 1]))
        self.notes[one.side.name] = {"first_step_after_s": first, "warm_after_s": warm}
        _say(f"{one.side.name}: first step after {first} s, warm after {warm} s")

    def _done(self, one: Running, warming: Iterator[None], together: int) -> bool:
        """Whether its warm-up is over, well or not. ``together``: so many started at once, and it is stopped."""
        try:
            next(warming)
        except StopIteration:
            if together:
                self.notes[one.side.name]["started_together"] = together
                one.stop()
            return True
        except SideFailed as fault:
            return not self._failed(one, fault)
        return False

    def _window(self, one: Running, number: int, paused: bool) -> bool:
        """Whether it went well; else the side is ended."""
        try:
            if paused:
                one.family.go_on()
            lines = one.steps(1 + one.side.steps, self.plan.window_limit_s, "a window")
            if paused:
                one.stop()
        except SideFailed as fault:
            return self._failed(one, fault)
        window = self.windows[one.side.name][number] = counted(lines)
        _say(
            f"round {number}: {one.side.name} {window.speed:.0f} tokens/s, {window.seconds / window.steps:.3f} s a step"
        )
        return True

    def _failed(self, one: Running, fault: SideFailed) -> bool:
        _say(f"LEFT OUT: {fault}")
        self.faults[one.side.name] = reason(str(fault))
        one.family.end()
        return False


def reason(fault: str) -> str:
    """What happened, and of the log's end behind it the line that says why: the last error, else the last line."""
    what, *log = filter(None, map(str.strip, fault.splitlines()))
    errors = [line for line in log if ERROR.match(line)]
    return " ".join([what, *(errors or log)[-1:]])[:REASON_CHARACTERS]


def _numbers(windows: dict[int, Window], first: dict[int, Window]) -> dict[str, Any]:
    if not windows:
        return {"windows": 0}
    all_windows = list(windows.values())
    speeds = [one.speed for one in all_windows]
    rounds = sorted(windows.keys() & first.keys())
    phases = {
        name: round(statistics.median(one.phases_s[name] / one.steps for one in all_windows), 4)
        for name in all_windows[0].phases_s
    }
    return {
        "windows": len(speeds),
        "tokens_per_s": round(statistics.median(speeds)),
        "tokens_per_s_least": round(min(speeds)),
        "tokens_per_s_most": round(max(speeds)),
        "tokens_per_s_windows": [round(speed) for speed in speeds],
        "clock_tokens_per_s": round(statistics.median(one.tokens / one.clock_s for one in all_windows)),
        "step_s": round(statistics.median(one.seconds / one.steps for one in all_windows), 4),
        "phases_s": phases,
        "tokens_a_step": round(sum(one.tokens for one in all_windows) / sum(one.steps for one in all_windows)),
        "peak_gib": round(max(one.peak_bytes for one in all_windows) / 2**30, 1),
        **ratio([windows[number].speed for number in rounds], [first[number].speed for number in rounds]),
    }


def ratio(speeds: Sequence[float], first: Sequence[float]) -> dict[str, float]:
    """Median of ``speeds`` over that of ``first``, and where it lies in 95 % of samples of the rounds."""
    if not speeds:
        return {}
    chance = random.Random(0)
    found = []
    for _ in range(RESAMPLES):
        rounds = chance.choices(range(len(speeds)), k=len(speeds))
        found.append(statistics.median(speeds[i] for i in rounds) / statistics.median(first[i] for i in rounds))
    found.sort()
    return {
        "ratio": round(statistics.median(speeds) / statistics.median(first), 4),
        "ratio_low": round(found[int(0.025 * RESAMPLES)], 4),
        "ratio_high": round(found[int(0.975 * RESAMPLES) - 1], 4),
    }


def _told(command: Sequence[str], work: Path) -> str:
    """The command without this machine's folders."""
    return _without_folders(shlex.join(["python", *command[1:]]), work)


def _without_folders(text: str, work: Path) -> str:
    return text.replace(str(work.resolve()), "WORK").replace(str(work), "WORK").replace(f"{ROOT}/", "")


def _say(text: str) -> None:
    print(text, flush=True)


def write(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    """Append the rows to a file, and show a table."""
    keep(out, rows)
    print(
        "| side | tokens/s | least to most | to the first | step s | peak GiB |\n| --- | --- | --- | --- | --- | --- |"
    )
    for row in rows:
        if "tokens_per_s" not in row:
            print(f"| {row['side']} | not measured: {row.get('fault', 'no time left')} | | | | |")
            continue
        interval = f"{row['ratio']} ({row['ratio_low']} to {row['ratio_high']})" if "ratio" in row else ""
        spread = f"{row['tokens_per_s_least']} to {row['tokens_per_s_most']}"
        print(
            f"| {row['side']} | {row['tokens_per_s']} | {spread} | {interval} | {row['step_s']} | {row['peak_gib']} |"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every table can be asked for."""
    parser.add_argument("--windows", type=int, default=Plan.windows)
    parser.add_argument("--warm-up", type=int, default=Plan.warm_up, help="steps after each start")
    parser.add_argument("--windows-a-start", type=int, default=Plan.windows_a_start, help="of sides that are alone")
    parser.add_argument("--start-limit-s", type=float, default=Plan.start_limit_s)
    parser.add_argument("--window-limit-s", type=float, default=Plan.window_limit_s)
    parser.add_argument("--total-limit-s", type=float, default=Plan.total_limit_s)
    parser.add_argument("--out", type=Path, help="rows are appended here")


def plan_of(asked: argparse.Namespace) -> Plan:
    return Plan(**{name: getattr(asked, name) for name in Plan.__dataclass_fields__})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", type=Path)
    parser.add_argument("--case", required=True)
    add_arguments(parser)
    asked = parser.parse_args()
    given = json.loads(asked.sides.read_text(encoding="utf-8"))
    sides = [Side(**{**one, "metrics": Path(one["metrics"])}) for one in given]
    write(measure(asked.case, sides, plan_of(asked), asked.sides.parent / "logs"), asked.out)


if __name__ == "__main__":
    main()
