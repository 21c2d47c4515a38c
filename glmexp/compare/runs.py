"""A run folder, or a sweep's, as one value a run: configuration, environment, state, metrics, what came out."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from glmexp.config.errors import ConfigError, Problem, UserError
from glmexp.config.load import flatten
from glmexp.launcher import failures, folder, trials
from glmexp.launcher.unfinished import LOCK
from glmexp.tracker.metrics_file import read_metrics
from glmexp.tracker.outcome import outcome

METRICS = "metrics.jsonl"
COMPARED = ("train", "trainer", "evaluate")
"""Entries whose runs have something to compare; others lie beside them in the same folder."""
RUNNING, UNFINISHED = "running", "unfinished"
_ENDED = ("finished", "stopped", "failed")
_DEPTH = 2
"""Folders below a named one in which runs are looked for: ``outputs`` holds ``<name>/<time>``."""
Metrics = dict[int, dict[str, float]]


@dataclass(frozen=True)
class Run:
    """All that is known of one run. Nothing is computed anew: it was all written down."""

    name: str
    """``ranks#0``: trial 0 of the sweep in ``ranks``; else the last two parts of its folder."""
    place: Path
    """Where it lies, as named by the caller."""
    folder: Path | None
    """The same; None of a trial that was never started."""
    state: str
    """finished, stopped, failed, out_of_memory, non_finite, running, unfinished (nobody works on it), waiting."""
    reason: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    """Dotted key to value."""
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    swept: tuple[str, ...] = ()
    """Keys that its sweep goes over."""
    named: bool = True
    """The caller has named it or its sweep; else it was found in a folder above."""

    @property
    def left_out_as(self) -> str | None:
        """What it is counted as where only runs with results are asked for; None of those. Whatever is named is one,
        and so is a trial that failed: that is what came of its values."""
        entry = self.config.get("entry.name", "train")
        if self.named:
            return None
        if entry not in COMPARED:
            return str(entry)
        failed_start = self.state == trials.FAILED and not self.metrics and not self.swept
        return "failed before the first step" if failed_start else None


def read_all(paths: Sequence[Path]) -> list[Run]:
    """The runs of these folders, in order, each once. Raises UserError with all broken folders at once."""
    found: list[Run] = []
    problems: list[Problem] = []
    seen: set[Path] = set()

    def keep(read: Callable[[], Run]) -> None:
        try:
            found.append(read())
        except UserError as error:
            problems.extend(error.problems)

    for path in paths:
        try:
            folders = _found_in(path, _DEPTH)
        except UserError as error:
            problems.extend(error.problems)
            continue
        if not folders:
            fix = f"name a run folder (it holds {folder.CONFIG}), a sweep's ({trials.STATE}), or one above them"
            problems.append(Problem(str(path), "holds no run" if path.is_dir() else "is no folder", fix))
        for place, trial, swept in folders:
            key = place.resolve()
            if key not in seen:
                seen.add(key)
                named = place == path or (path / trials.STATE).exists()
                keep(partial(_read, place, trial, swept, named))
    if problems:
        raise ConfigError(*problems)
    return found


Found = tuple[Path, trials.Trial | None, tuple[str, ...]]


def _found_in(path: Path, depth: int) -> list[Found]:
    """(run folder, its trial, swept keys) of a run, a sweep, or of what lies below."""
    if (path / trials.STATE).exists():
        state = trials.read(path)
        assert state is not None
        swept = tuple(dict.fromkeys(key for trial in state.trials for key in trial.values))
        # A search that chose a configuration once more has no second run of it.
        return [(path / trial.folder, trial, swept) for trial in state.trials if trial.same_as is None]
    if (path / folder.CONFIG).exists():
        return [(path, None, ())]
    if depth == 0 or not path.is_dir():
        return []
    below = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    return [one for child in below for one in _found_in(child, depth - 1)]


def _read(place: Path, trial: trials.Trial | None, swept: tuple[str, ...], named: bool) -> Run:
    absolute = place.absolute()
    name = "/".join(absolute.parts[-2:]) if trial is None else f"{absolute.parent.name}#{trial.number}"
    if trial is not None and not (place / folder.CONFIG).exists():
        return Run(name, place, None, trial.state, trial.reason, _typed(trial.values), swept=swept, named=named)
    config, environment = _config(place), _json(place / folder.ENVIRONMENT)
    metrics = read_metrics(place / METRICS) if (place / METRICS).exists() else {}
    status = _json(place / folder.STATUS)
    with whole(place / folder.STATUS):
        state, reason = _state(place, status)
        ended = datetime.fromisoformat(status["time"]) if status["state"] in _ENDED else None
    if trial is not None and trial.state in trials.OUTCOMES:
        state, reason = trial.state, trial.reason
    results = outcome(metrics)
    with whole(place / folder.ENVIRONMENT):
        if ended is not None and "started" in environment:
            # From the last start to the end.
            results["time/wall_s"] = (ended - datetime.fromisoformat(environment["started"])).total_seconds()
    with whole(place / folder.MODEL):
        model = _json(place / folder.MODEL) if (place / folder.MODEL).exists() else {}  # older runs have none
        if "trainable_parameters" in model:
            results["model/trainable_parameters"] = float(model["trainable_parameters"])
    return Run(name, place, place, state, reason, config, environment, metrics, results, swept, named)


def _typed(values: dict[str, str]) -> dict[str, Any]:
    import yaml

    return {key: yaml.safe_load(value) for key, value in values.items()}


def _config(place: Path) -> dict[str, Any]:
    """As it was written: a run of an older version may lack keys that this one has."""
    import yaml

    file = place / folder.CONFIG
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times faster, and not in every build
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), loader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise _broken(file, f"cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise _broken(file, "is no configuration")
    return flatten(tree)


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _broken(file, "is not there") from error
    except (OSError, ValueError) as error:
        raise _broken(file, f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise _broken(file, "is not what a run writes")
    return value


@contextmanager
def whole(file: Path) -> Iterator[None]:
    """Around what takes values out of ``file``: what is not there, or is another thing, is the file's fault."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _broken(file, f"is not what a run writes: {type(error).__name__}: {error}") from error


def _broken(file: Path, found: str) -> ConfigError:
    return ConfigError(Problem(str(file), found, "restore the file, or leave this folder out"))


def _state(place: Path, status: dict[str, Any]) -> tuple[str, str]:
    """(state, reason) as the run itself left them."""
    if not isinstance(status.get("state"), str):
        raise _broken(place / folder.STATUS, "names no state")
    state = status["state"]
    if state in ("starting", "running"):
        if _worked_on(place):
            return RUNNING, ""
        return UNFINISHED, "its processes are gone; train.resume goes on with it where it has a checkpoint"
    if state == "failed":
        code = status.get("exit_code", 1)
        return trials.settle(place, code) if failures.recorded(place) else (state, f"ended with exit code {code}")
    return state, str(status.get("reason", ""))


def _worked_on(place: Path) -> bool:
    """Whether some process holds the lock of a run folder. A shared lock for a moment: nothing is changed."""
    try:
        with (place / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
