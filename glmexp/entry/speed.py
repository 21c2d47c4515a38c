"""How a run measures its speed: what counts as useful work, against which peak, and the time line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from glmexp.config.families import FAMILIES
from glmexp.engine import flops, perf
from glmexp.engine.build import DTYPES
from glmexp.engine.perf import Stopwatch
from glmexp.engine.profile import FOLDER, TimeLine
from glmexp.entry.session import Session
from glmexp.launcher.folder import ENVIRONMENT, write_json
from glmexp.tracker.metrics_file import MetricsFile


def work(here: Session, model: Any) -> flops.Work | None:
    """Useful operations of the model as it is trained; None for networks that nobody knows here."""
    family = here.config.model.family
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    opens_before = network.config.bos_token_id if family == "chatglm" else None
    return flops.count(model, FAMILIES[family].layers, opens_before)


def measured(here: Session, model: Any) -> perf.Speed | None:
    """Work and peak, said on the terminal and kept in environment.json. None on a CPU, where MFU has no meaning."""
    peak, counted = perf.peak_of(DTYPES[here.config.precision.dtype]), work(here, model)
    if peak is None or counted is None:
        return None
    if here.screen.active:
        environment = json.loads((here.folder / ENVIRONMENT).read_text(encoding="utf-8"))
        write_json(here.folder / ENVIRONMENT, environment | {"peak_flops": peak.flops, "peak_source": peak.source})
    dtype, low = here.config.precision.dtype, here.config.precision.base
    above = f"; that is {dtype}'s, products in {low} may go beyond it" if low else ""
    here.screen.lines([f"perf/mfu is a share of {peak.flops / 1e12:,.1f} TFLOP/s a GPU, {peak.source}{above}"])
    return perf.Speed(counted, peak)


def stopwatch(here: Session) -> Stopwatch:
    """What times the phases of a step; with ``train.profile`` it keeps them. Every rank needs the same kind."""
    if not here.config.train.profile:
        return Stopwatch()
    if not here.screen.active:
        return TimeLine(None)
    (here.folder / FOLDER).mkdir(exist_ok=True)
    return TimeLine(here.folder, MetricsFile(here.folder / FOLDER / "steps.jsonl").write)


@contextmanager
def closing(watch: Stopwatch, here: Session) -> Iterator[None]:
    """Around the loop: at its end the time line is written and told, where there is one."""
    if not isinstance(watch, TimeLine):
        yield
        return
    try:
        yield
    except BaseException:
        watch.abandon()
        raise
    here.screen.lines(watch.close())
