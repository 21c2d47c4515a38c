"""What a sweep came to: one row a trial, with what differs between trials, the metrics, the state and the folder."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path

from glmexp.config.inherit import SWEEP_TABLE
from glmexp.config.schema import SweepSection
from glmexp.launcher.trials import FINISHED, SweepState, Trial

FIRST_CHOICES = ("eval/loss/loss", "train/loss")
"""What trials are compared by where sweep.metric is null."""
_METRICS_SHOWN = 4
_ALSO_IN_TABLE = ("train/loss", "perf/tokens_per_s", "mem/peak_bytes")


def compared_by(settings: SweepSection, trials: Sequence[Trial]) -> str | None:
    """The metric that decides; None where no trial has one."""
    if settings.metric is not None:
        return settings.metric
    return next((name for name in FIRST_CHOICES if any(name in trial.metrics for trial in trials)), None)


def ranked(settings: SweepSection, trials: Sequence[Trial]) -> list[Trial]:
    """Best first; those without the metric behind, by number."""
    metric = compared_by(settings, trials)
    sign = -1 if settings.direction == "maximize" else 1

    def key(trial: Trial) -> tuple[bool, float, int]:
        value = trial.value(metric) if metric is not None and trial.state == FINISHED else math.nan
        return math.isnan(value), 0.0 if math.isnan(value) else sign * value, trial.number

    return sorted(trials, key=key)


def differing(trials: Sequence[Trial]) -> list[str]:
    """Swept keys that have more than one value, in order."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial.values))
    return [key for key in keys if len({trial.values.get(key) for trial in trials}) > 1]


def metric_names(settings: SweepSection, trials: Sequence[Trial]) -> list[str]:
    """The one that decides, then the other results, as far as any trial has them."""
    first = compared_by(settings, trials)
    there = dict.fromkeys(name for trial in trials for name in trial.metrics)
    others = [name for name in there if name.startswith("eval/")] + [name for name in _ALSO_IN_TABLE if name in there]
    return list(dict.fromkeys([*([first] if first is not None else []), *others]))


def write_csv(state: SweepState, settings: SweepSection) -> Path:
    """``sweep.csv``: every trial, best first, with all digits."""
    keys, metrics = differing(state.trials), metric_names(settings, state.trials)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["trial", *keys, *metrics, "state", "seconds", "folder", "reason"])
    for trial in ranked(settings, state.trials):
        values = [trial.values.get(key, "") for key in keys]
        numbers = [trial.metrics.get(name, "") for name in metrics]
        seconds = "" if trial.seconds is None else round(trial.seconds, 1)
        rows.writerow([trial.number, *values, *numbers, trial.state, seconds, trial.folder, trial.reason])
    file = state.root / SWEEP_TABLE
    temporary = file.with_name(f".{SWEEP_TABLE}.{os.getpid()}")
    temporary.write_text(text.getvalue(), encoding="utf-8")
    temporary.replace(file)
    return file


def table(state: SweepState, settings: SweepSection) -> list[str]:
    """The same for the terminal, with the first few metrics."""
    keys = differing(state.trials)
    metrics = metric_names(settings, state.trials)[:_METRICS_SHOWN]
    rows = [["trial", *keys, *metrics, "state", "folder"]]
    for trial in ranked(settings, state.trials):
        values = [trial.values.get(key, "") for key in keys]
        numbers = [_shown(trial, name) for name in metrics]
        same = f" (as trial {trial.same_as})" if trial.same_as is not None else ""
        rows.append([str(trial.number), *values, *numbers, trial.state.replace("_", " ") + same, trial.folder])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _shown(trial: Trial, name: str) -> str:
    return f"{trial.value(name):.6g}" if name in trial.metrics else ""
