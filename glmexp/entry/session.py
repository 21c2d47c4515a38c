"""What every entry starts with: the process group, quiet libraries, seeds, the terminal, the records."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from glmexp.config.entries import GOES_ON
from glmexp.config.errors import ConfigError, Problem
from glmexp.config.load import dump
from glmexp.config.redact import redacted
from glmexp.config.schema import RunConfig
from glmexp.engine import distributed
from glmexp.engine.build import quiet_deepspeed
from glmexp.entry.console import Screen
from glmexp.launcher import positions, rendezvous, stopping, trials
from glmexp.launcher.folder import MODEL, write_status
from glmexp.launcher.unfinished import WAIT_S, Lock
from glmexp.model import decoder
from glmexp.plan.report import Plan, terms_of
from glmexp.tracker.base import Guard, NoTracker, RunInfo, Status
from glmexp.tracker.metrics_file import MetricsFile, read_metrics
from glmexp.tracker.outcome import outcome


@dataclass
class Session:
    """One rank of one run. Records are kept on rank 0; elsewhere they go nowhere."""

    config: RunConfig
    folder: Path
    screen: Screen
    metrics: MetricsFile | None
    tracker: Guard
    began: float = field(default_factory=time.monotonic)
    plan: Plan | None = None
    """Of a training run: what was planned for it."""

    @contextmanager
    def closing_on_failure(self) -> Iterator[None]:
        """What is raised inside also ends the tracker's run, as failed."""
        try:
            yield
        except BaseException:
            self.tracker.finish("failed")
            raise

    def start_tracker(self) -> None:
        """Open the tracker's run."""
        config = self.config
        trial = trials.of_run(self.folder)
        info = RunInfo(
            name=config.run.name if trial is None else trial.name,
            folder=self.folder,
            config=redacted(dump(config)),
            group=getattr(config.tracker, "group", None),
            job_type=config.entry.name,
            tags=(config.model.name, config.method.name, f"stage{config.zero.stage}", config.precision.dtype),
        )
        self.screen.lines(self.tracker.start(info))

    def close_tracker(self, status: Status) -> list[str]:
        """End the tracker's run, with what came of it beside its name; lines for the terminal. Rank 0's."""
        assert self.metrics is not None, "only rank 0 tracks"
        file, model = self.metrics.path, self.folder / MODEL
        found = outcome(read_metrics(file)) if file.exists() else {}
        sizes = json.loads(model.read_text(encoding="utf-8")) if model.exists() else {}
        self.tracker.summary({**found, **{f"model/{name}": size for name, size in sizes.items()}, "state": status})
        return self.tracker.finish(status)

    def planned(self) -> list[str]:
        """The plan's terms, for the message of a run that is out of memory."""
        return [] if self.plan is None else terms_of(self.plan)

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl, and the tracker."""
        if self.metrics is not None:
            self.metrics.write(step, metrics)
        self.tracker.log(step, metrics)


@contextmanager
def session(config: RunConfig, run_folder: Path) -> Iterator[Session]:
    """Join the process group; leave it at the end. The run's status is ``running`` from here on."""
    import transformers

    transformers.set_seed(config.train.seed)
    if config.train.deterministic:
        distributed.be_deterministic()
    positions.at("joining the process group")
    store = rendezvous.store(config.launcher.timeout_s)
    distributed.join(config.launcher.timeout_s, store)
    quiet_deepspeed()
    ear = stopping.listener()
    if ear is not None and config.entry.name in GOES_ON:
        ear.offer(store, distributed.world_size(), grace_s=config.launcher.timeout_s)
    first, lock = distributed.rank() == 0, Lock(run_folder)
    if first:
        _alone_in(run_folder, lock)
        write_status(run_folder, "running")
    screen = Screen(active=first)
    here = Session(
        config=config,
        folder=run_folder,
        screen=screen,
        metrics=MetricsFile(run_folder / "metrics.jsonl") if first else None,
        tracker=Guard(
            config.tracker.name,
            config.tracker.build() if first else NoTracker(),
            warn=lambda line: screen.lines([line]),
        ),
    )
    try:
        with here.closing_on_failure():
            yield here
    finally:
        decoder.forget_recordings()
        distributed.leave()
        if config.launcher.name == "inprocess":
            lock.release()  # elsewhere the process is about to end, and the proof is still to be written


def _alone_in(run_folder: Path, lock: Lock) -> None:
    """Keep others from writing in this folder until the process ends; ranks of an earlier life get time to end."""
    if not lock.take(WAIT_S):
        raise ConfigError(
            Problem(str(run_folder), "another process trains in this folder", "wait for its end, or end it")
        )
