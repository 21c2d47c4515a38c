"""What came of a run, one number each, from its metrics.jsonl: beside its name in a tracker, and in comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

LOSS = "eval/loss/loss"
Metrics = Mapping[int, Mapping[str, float]]
"""Step to its metrics, in order."""


def outcome(metrics: Metrics) -> dict[str, float]:
    """The last value of every ``eval/`` metric and of ``train/loss``; the best held-out loss and its step; the median
    speed, the peak of memory, the time of all steps.
    """
    last: dict[str, float] = {}
    for values in metrics.values():
        last |= values
    found: dict[str, float] = {}
    if LOSS in last:
        found[LOSS] = last[LOSS]
        losses = {step: values[LOSS] for step, values in metrics.items() if LOSS in values}
        finite = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
        if finite:
            step = min(finite, key=lambda one: (finite[one], one))
            found |= {"best/loss": finite[step], "best/step": float(step)}
    found |= {name: value for name, value in last.items() if name.startswith("eval/") and name != LOSS}
    if "train/loss" in last:
        found["train/loss"] = last["train/loss"]
    for name in ("perf/tokens_per_s", "perf/mfu"):
        # The first step compiles and allocates; the median is what a long run would have.
        speeds = [values[name] for values in metrics.values() if name in values]
        if speeds:
            found[name] = statistics.median(speeds[1:] or speeds)
    peaks = [values["mem/peak_bytes"] for values in metrics.values() if "mem/peak_bytes" in values]
    if peaks:
        found["mem/peak_bytes"] = max(peaks)
    seconds = trained_s(metrics)
    if seconds:
        found["time/train_s"] = list(seconds.values())[-1]
    if metrics:
        found["train/steps"] = float(max(metrics))
    return found


def trained_s(metrics: Metrics) -> dict[int, float]:
    """Logged step -> seconds of training steps up to it. With ``train.log_steps`` above 1, the steps between two lines
    count as the second one; evaluation and saving do not count.
    """
    return _cumulated(metrics, lambda values: values["perf/step_s"])


def trained_tokens(metrics: Metrics) -> dict[int, float]:
    """The same in tokens of all ranks, padding not counted."""
    return _cumulated(metrics, lambda values: values["perf/step_s"] * values["perf/tokens_per_s"])


def _cumulated(metrics: Metrics, of_step: Callable[[Mapping[str, float]], float]) -> dict[int, float]:
    total, before = 0.0, 0
    sums: dict[int, float] = {}
    for step, values in metrics.items():
        if "perf/step_s" in values and "perf/tokens_per_s" in values:
            total += of_step(values) * (step - before)
            before = step
            sums[step] = total
    return sums
