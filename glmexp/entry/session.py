"""What every entry starts with: the process group, quiet libraries, seeds, the terminal, the records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from glmexp.config.load import dump
from glmexp.config.redact import redacted
from glmexp.config.schema import RunConfig
from glmexp.engine import distributed
from glmexp.engine.build import quiet_deepspeed
from glmexp.entry.console import Screen
from glmexp.launcher.environment import rendezvous_store
from glmexp.launcher.folder import write_status
from glmexp.tracker.base import Guard, NoTracker, RunInfo
from glmexp.tracker.metrics_file import MetricsFile


@dataclass
class Session:
    """One rank of one run. Records are kept on rank 0; elsewhere they go nowhere."""

    config: RunConfig
    folder: Path
    screen: Screen
    metrics: MetricsFile | None
    tracker: Guard

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
        group = getattr(config.tracker, "group", None)
        info = RunInfo(name=config.run.name, folder=self.folder, config=redacted(dump(config)), group=group)
        self.screen.lines(self.tracker.start(info))

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
    distributed.join(config.launcher.timeout_s, rendezvous_store(config.launcher.timeout_s))
    quiet_deepspeed()
    first = distributed.rank() == 0
    if first:
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
        distributed.leave()
