"""What every entry starts with: the process group, quiet libraries, seeds, the terminal, the records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from glmexp.config.load import dump
from glmexp.config.schema import RunConfig
from glmexp.engine import distributed
from glmexp.engine.build import quiet_deepspeed
from glmexp.entry.console import Screen
from glmexp.launcher.environment import rendezvous_store
from glmexp.launcher.folder import write_status
from glmexp.tracker.base import Guard, RunInfo
from glmexp.tracker.metrics_file import MetricsFile


@dataclass
class Session:
    """One rank of one run. Records are kept on rank 0; elsewhere they go nowhere."""

    config: RunConfig
    folder: Path
    screen: Screen
    metrics: MetricsFile | None
    tracker: Guard

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl, and the tracker."""
        if self.metrics is not None:
            self.metrics.write(step, metrics)
        self.tracker.log(step, metrics)


@contextmanager
def session(config: RunConfig, run_folder: Path, resumed_from: int | None = None) -> Iterator[Session]:
    """Join the process group; leave it at the end. Status is ``running`` inside and ``finished`` after."""
    import transformers

    transformers.set_seed(config.train.seed)
    distributed.join(config.launcher.timeout_s, rendezvous_store(config.launcher.timeout_s))
    quiet_deepspeed()
    first = distributed.rank() == 0
    if first:
        write_status(run_folder, "running")
    try:
        yield Session(
            config=config,
            folder=run_folder,
            screen=Screen(active=first),
            metrics=MetricsFile(run_folder / "metrics.jsonl") if first else None,
            tracker=Guard(config.tracker if first else None),
        )
    finally:
        distributed.leave()


def run_info(config: RunConfig, run_folder: Path) -> RunInfo:
    """What a tracker shows of the run."""
    return RunInfo(name=config.run.name, folder=run_folder, config=dump(config))
