"""One rank: reads config.yaml, runs the entry, leaves its failure behind. The only door to torch."""

from __future__ import annotations

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
from glmexp.launcher import failures, folder, stopping
from glmexp.launcher.environment import set_defaults


def run_rank(run_folder: Path, shows_failures: bool) -> int:
    """Run the configured entry as this rank. Returns its exit code.

    ``shows_failures``: no parent watches, so this rank shows its failure itself (a user's mistake, which all
    ranks find, only on rank 0).
    """
    rank = int(os.environ["RANK"])
    set_defaults()
    _logs_to_file(run_folder, rank)
    stopping.listen(run_folder, rank)
    try:
        config = read(run_folder / folder.CONFIG)
        entry: Callable[..., int] = importlib.import_module(f"glmexp.entry.{config.entry.name}").run
        code = entry(config, run_folder)
    except Exception as error:  # noqa: BLE001 - the boundary of the rank: recorded, shown, turned into an exit code
        failure = failures.of_exception(rank, error)
        failures.record(run_folder, failure)
        if shows_failures and (rank == 0 or failure.exit_code != EXIT_USER_MISTAKE):
            failures.report(run_folder, failure, int(os.environ["WORLD_SIZE"]))
        return failure.exit_code
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


def _die_with_parent() -> None:
    """Linux: a SIGTERM when the parent is gone, so that kill -9 of it leaves no rank behind."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)


if __name__ == "__main__":
    _die_with_parent()
    code = run_rank(Path(sys.argv[1]), shows_failures=False)
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: threads of NCCL, gloo and DeepSpeed can abort a rank that is already done.
    os._exit(code)
