"""What a sweep goes over: the values of a grid, the space of a search, and the names of its trials."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, RangeSweep

from glmexp.config.arguments import Given
from glmexp.config.errors import Problem
from glmexp.config.facts import Facts
from glmexp.config.nearest import conf_folder
from glmexp.config.schema import RunConfig, SweepSection

DEFAULT = "grid"


@dataclass(frozen=True)
class Choice:
    """One of these values, as texts; no order among them."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Interval:
    """A number between ``low`` and ``high``, both included."""

    low: float
    high: float
    whole: bool
    log: bool = False
    """The logarithm is spread evenly, not the number."""
    step: float | None = None


Space = Choice | Interval
"""What a search may choose for one key."""


@dataclass(frozen=True)
class Swept:
    """What one command line with ``-m`` asks for."""

    settings: SweepSection
    folder: str
    folder_chosen: bool
    """By the user, not a time stamp."""
    slots: int | None
    """Trials that run at a time. None: one, and in an array of Slurm as many as there is room for."""
    values: list[dict[str, str]] = dataclasses.field(default_factory=list)
    """Of each trial of a grid: swept key to its value, as typed."""
    space: dict[str, Space] = dataclasses.field(default_factory=dict)
    """Of a search: key to what it may be."""


@dataclass(frozen=True)
class Axis:
    """One override of the command line or of hydra.sweeper.params: a fixed one, or one that trials differ in."""

    given: Given
    swept: bool

    @property
    def key(self) -> str:
        """Group or dotted key."""
        return self.given.key

    def line(self, value: str) -> str:
        """The override of one trial."""
        prefix = (self.given.override.input_line or "").partition("=")[0]
        return f"{prefix}={value}"

    def values(self) -> list[str]:
        """Every value of a grid's axis; of a fixed one the only one."""
        if self.given.sweeps:
            return list(self.given.override.sweep_string_iterator())
        return [self.given.value_text]

    def lines(self) -> list[str]:
        """Every value as an override."""
        if self.given.sweeps:
            return [self.line(value) for value in self.values()]
        return [self.given.override.input_line or self.given.text]


def axes(typed: Sequence[Given], params: Sequence[Given]) -> list[Axis]:
    """The grid's own axes, replaced by what was typed, and the fixed overrides; without those of the sweep itself."""
    by_key = {one.key: one for one in typed}
    merged = {**{one.key: one for one in params}, **by_key}
    return [Axis(one, one.sweeps or key not in by_key) for key, one in merged.items() if not of_sweep(key)]


def of_sweep(key: str) -> bool:
    """The key says how the sweep goes on, and is no part of a trial."""
    return key == "sweep" or key.startswith("sweep.")


def grid(axes: Sequence[Axis]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """(overrides, swept key to value) of each combination."""
    for lines in itertools.product(*(axis.lines() for axis in axes)):
        values = [re.sub(r"^(\d+)\.0$", r"\1", line.partition("=")[2]) for line in lines]
        swept = {axis.key: value for axis, value in zip(axes, values, strict=True) if axis.swept}
        yield list(lines), swept


def chosen(axes: Sequence[Axis], values: Mapping[str, str]) -> list[str]:
    """The overrides of the trial with these values of a search."""
    return [axis.line(values[axis.key]) if axis.key in values else axis.lines()[0] for axis in axes]


def corners(axes: Sequence[Axis], space: Mapping[str, Space]) -> Iterator[dict[str, str]]:
    """Values that try each choice and both ends of each interval once, so that what is wrong there is found early."""
    ends = {key: _ends(one) for key, one in space.items()}
    for number in range(max(map(len, ends.values()), default=0)):
        yield {key: texts[number % len(texts)] for key, texts in ends.items()}


def _ends(space: Space) -> list[str]:
    return list(space.values) if isinstance(space, Choice) else [text(space.low, space), text(space.high, space)]


def text(value: float, interval: Interval) -> str:
    """A number of an interval as it is typed: whole, or with six digits, which names of folders can bear."""
    if interval.whole:
        return str(int(value))
    return repr(min(max(float(f"{value:.6g}"), interval.low), interval.high))


def space(axes: Sequence[Axis]) -> tuple[dict[str, Space], list[Problem]]:
    """What a search may choose from, in the words of Hydra's sweeps, and what is wrong with them."""
    found: dict[str, Space] = {}
    problems: list[Problem] = []
    for axis in axes:
        if axis.given.sweeps:
            one = _space(axis)
            if isinstance(one, Problem):
                problems.append(one)
            else:
                found[axis.key] = one
    if not found and not problems:
        ways = "'method.rank=choice(4,8,16)' 'optim.lr=tag(log,interval(1e-5,1e-3))'"
        problems.append(Problem("sweep", "search has nothing to choose from", f"give a key several values: {ways}"))
    return found, problems


def _space(axis: Axis) -> Space | Problem:
    value = axis.given.override.value()
    tags = set(getattr(value, "tags", ()))
    if tags - {"log"}:
        return Problem(axis.key, f"the tag {', '.join(sorted(tags - {'log'}))} means nothing here", "known: log")
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        return _checked(axis, Interval(value.start, value.end, isinstance(value.start, int), "log" in tags))
    values = axis.values()
    if "log" in tags:
        return Problem(axis.key, "only an interval can be log", "tag(log,interval(1e-5,1e-3))")
    if isinstance(value, RangeSweep) and not value.shuffle and len(values) > 1:
        assert value.step is not None
        low, high = sorted((float(values[0]), float(values[-1])))
        return Interval(low, high, isinstance(value.start, int) and isinstance(value.step, int), step=abs(value.step))
    return Choice(tuple(values))


def _checked(axis: Axis, one: Interval) -> Space | Problem:
    if one.low >= one.high:
        return Problem(axis.key, f"{axis.given.value_text}: the first number is not below the second", "interval(1,2)")
    if one.log and one.low <= 0:
        return Problem(axis.key, f"{axis.given.value_text}: a log interval starts above 0", "interval(1e-5,1e-3)")
    return one


def endless(axes: Sequence[Axis]) -> Iterator[Problem]:
    """Axes that a grid cannot go over."""
    for axis in axes:
        if axis.given.sweeps and not axis.given.override.is_discrete_sweep():
            ways = "name the values: 1,2,4, or sweep=search"
            yield Problem(axis.key, f"{axis.given.value_text} has no end", ways)


def settings_problems(settings: SweepSection) -> Iterator[Problem]:
    """Keys of the section ``sweep`` that do not fit one another."""
    for name in ("trials", "seed"):
        value = getattr(settings, name)
        if settings.name == "grid" and value is not None:
            yield Problem(f"sweep.{name}", "without effect in a grid, which runs every combination", "sweep=search")
        if settings.name == "search" and value is None:
            yield Problem(f"sweep.{name}", "is null, and a search needs it", f"sweep.{name}=20")
    if settings.name == "search" and settings.metric is None:
        yield Problem("sweep.metric", "is null, and a search needs it", "sweep.metric=eval/loss/loss")


def metric_problem(settings: SweepSection, config: RunConfig) -> Problem | None:
    """The metric that no trial will have: of an eval hook that is not chosen, or has no rows to run on."""
    where, _, rest = (settings.metric or "").partition("/")
    hook = rest.partition("/")[0]
    if where != "eval":
        return None
    if hook not in config.eval.hooks:
        names = ",".join([*config.eval.hooks, hook])
        return Problem("sweep.metric", f"{settings.metric}: the hook {hook} is not chosen", f"eval=[{names}]")
    own_rows = getattr(config.eval.hooks[hook], "prompts_file", None) is not None
    if config.data.eval_file is None and config.data.holdout is None and not own_rows:
        return Problem(
            "sweep.metric", f"{settings.metric}: there are no held-out rows", "data.holdout=ROWS or data.eval_file=FILE"
        )
    return None


def slots(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Trials that run at a time must share the machine without a rest."""
    slots, nproc = config.launcher.slots or 1, config.launcher.nproc or 1
    what, there = ("GPU", facts.gpus) if facts.gpus else ("core", facts.cores)
    if slots == 1 or not there or config.launcher.name == "slurm":
        return
    divisors = ", ".join(str(one) for one in range(1, there + 1) if there % one == 0)
    if there % slots:
        yield Problem(
            "launcher.slots", f"{slots} slots do not divide {there} {what}s", f"launcher.slots= one of {divisors}"
        )
    elif facts.gpus and nproc > there // slots:
        yield Problem(
            "launcher.slots",
            f"{slots} slots of {nproc} ranks need {slots * nproc} GPUs, and there are {there}",
            f"launcher.slots={there // nproc}, or launcher.nproc={there // slots}",
        )


def default_settings() -> dict[str, Any]:
    """The section ``sweep`` of a run that is no sweep."""
    return dict(_default_settings())


@cache
def _default_settings() -> dict[str, Any]:
    import yaml

    return dict(yaml.safe_load((conf_folder() / "sweep" / f"{DEFAULT}.yaml").read_text(encoding="utf-8")))


def folder_name(number: int, values: Mapping[str, str]) -> str:
    """``3_method.rank-8_optim.lr-0.001``: a plain folder name, at most 100 characters."""
    words = [re.sub(r"[^\w.]+", "-", f"{key}={value}") for key, value in values.items()]
    return "_".join([str(number), *words])[:100].rstrip("-_.")


def in_sweep(config: RunConfig, folder: str, name: str) -> RunConfig:
    """The trial's folder and its tracker group; nothing else of the sweep stays in the configuration."""
    launcher = dataclasses.replace(config.launcher, slots=None)
    run = dataclasses.replace(config.run, dir=str(Path(folder) / name))
    config = dataclasses.replace(config, run=run, launcher=launcher)
    if getattr(config.tracker, "group", "") is None:
        config = dataclasses.replace(config, tracker=dataclasses.replace(config.tracker, group=Path(folder).name))
    return config
