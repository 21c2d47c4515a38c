"""One rank: reads config.yaml, runs the entry, leaves its failure behind. The only door to torch."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from glmexp.config import redact
from glmexp.config.errors import EXIT_USER_MISTAKE
from glmexp.config.load import read
from glmexp.config.schema import RunConfig
from glmexp.config.streams import show_everything
from glmexp.launcher import failures, folder, handover, local, positions, start, stopping
from glmexp.launcher.environment import set_defaults

JOB = "--job"
"""Argument before the run's folder: this process is a task of a Slurm job."""


def run_rank(run_folder: Path, shows_failures: bool) -> int:
    """Run the configured entry as this rank. Returns its exit code.

    ``shows_failures``: no parent watches, so this rank shows its failure itself (a user's mistake, which all
    ranks find, only on rank 0).
    """
    rank = int(os.environ["RANK"])
    set_defaults()
    _logs_to_file(run_folder, rank)
    stopping.listen(run_folder, rank)
    _stack_on_signal(run_folder, rank)
    try:
        config = read(run_folder / folder.CONFIG)
        if config.launcher.name in ("env", "slurm"):  # else the parent has, on each machine as its command line says
            os.environ.update(config.launcher.env)
        positions.begin(run_folder, rank, _watch(config, run_folder) if shows_failures and rank == 0 else None)
        entry: Callable[..., int] = importlib.import_module(f"glmexp.entry.{config.entry.name}").run
        code = entry(config, run_folder)
    except Exception as error:  # noqa: BLE001 - the boundary of the rank: recorded, shown, turned into an exit code
        failure = failures.of_exception(rank, error)
        positions.end()
        failures.record(run_folder, failure)
        if shows_failures and (rank == 0 or failure.exit_code != EXIT_USER_MISTAKE):
            failures.report(run_folder, failure, int(os.environ["WORLD_SIZE"]))
        return failure.exit_code
    positions.end()
    return code


def _logs_to_file(run_folder: Path, rank: int) -> None:
    """What libraries log or warn goes to ``logs/rank<N>.log``: the terminal is for the run itself."""
    (run_folder / "logs").mkdir(exist_ok=True)
    handler = logging.FileHandler(run_folder / "logs" / f"rank{rank}.log", encoding="utf-8")
    handler.setFormatter(redact.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    # DeepSpeed calls functions that torch 2.13 deprecates, once a step: they would drown the log.
    warnings.filterwarnings("ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor).*")


def _stack_on_signal(run_folder: Path, rank: int) -> None:
    """The signal that asks for this rank's Python stack is answered in C, also while the main thread hangs."""
    stack = (run_folder / "logs" / f"rank{rank}.stack").open("w", encoding="utf-8")
    faulthandler.register(failures.STACK_SIGNAL, file=stack, all_threads=True)


def _watch(config: RunConfig, run_folder: Path) -> Callable[[], None]:
    """Under an outside launcher rank 0 looks after the others; else the parent does."""
    ranks, silent_s = int(os.environ["WORLD_SIZE"]), config.launcher.watch_s
    return positions.Watch(run_folder, ranks, silent_s, lambda line: print(line, file=sys.stderr, flush=True)).look


def _die_with_parent() -> None:
    """Linux: a SIGTERM when the parent is gone, so that kill -9 of it leaves no rank behind."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _of_parent(words: list[str]) -> int:
    """A rank that a parent of this project started: in the given folder, or in the one that rank 0 names."""
    if words[0] == JOB:
        return start.in_job(Path(words[1]), run_rank)
    if words[0] != local.FOLLOW:
        run_folder = Path(words[0])
        if os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
            handover.give(run_folder, read(run_folder / folder.CONFIG).launcher.timeout_s)
        return run_rank(run_folder, shows_failures=False)
    run_folder = handover.take(handover.WAIT_S)
    note = Path(os.environ[local.NOTE])
    temporary = note.with_name(f"{note.name}.{os.getpid()}")
    temporary.write_text(str(run_folder), encoding="utf-8")
    temporary.replace(note)
    return run_rank(run_folder, shows_failures=False)


if __name__ == "__main__":
    _die_with_parent()
    show_everything()
    try:
        code = _of_parent(sys.argv[1:])
    except SystemExit as ended:
        code = int(ended.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: threads of NCCL, gloo and DeepSpeed can abort a rank that is already done.
    os._exit(code)
