"""From a checked configuration to ended ranks: one folder, N ranks, one exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from glmexp.config import redact
from glmexp.config.errors import EXIT_FAILURE, EXIT_STOPPED, EXIT_USER_MISTAKE
from glmexp.config.identity import identity
from glmexp.config.inherit import AUTO
from glmexp.config.load import dump
from glmexp.config.schema import RunConfig
from glmexp.launcher import failures, folder, needs, unfinished
from glmexp.launcher.ranks import Outside, outside_ranks
from glmexp.launcher.stopping import POLITE, SAME_REQUEST_S

RUN_FOLDER_KEY = "glmexp/run_folder"

ALONE = ("inspect", "export")
"""Entries that one process does: nothing is trained."""

RunRank = Callable[[Path, bool], int]
"""(run folder, whether the rank shows its own failures) -> exit code: this process as a rank. See ``worker``."""


def start(config: RunConfig, run_rank: RunRank) -> int:
    """Make the run folder, start the ranks, watch them. Returns the exit code of the whole run."""
    composed, going_on = identity(config), unfinished.find(config)
    config = needs.prepare(config)
    redact.hand_on(dump(config))
    # wandb records the arguments of the process that it runs in; they have been read.
    sys.argv[1:] = [redact.text(word) for word in sys.argv[1:]]
    run_folder = folder.make(config, composed, going_on)
    if config.train.resume == AUTO:
        found = "no unfinished run of this configuration, a new one" if going_on is None else "going on with"
        print(f"train.resume=auto: {found}: {run_folder}", flush=True)
    if config.launcher.name == "env":
        return _lead(config, run_folder, run_rank)
    if config.launcher.name == "inprocess" or config.entry.name in ALONE:
        return _in_process(config, run_folder, run_rank)
    return _local(config, run_folder)


def _local(config: RunConfig, run_folder: Path) -> int:
    """Ranks as processes of this machine under torch's elastic agent: a free port, one rank's death ends all."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from glmexp.launcher.environment import rank_environment

    # The ranks' own failures are shown below; the agent's lines about them would come first and say less.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    ranks = config.launcher.nproc
    assert ranks is not None, "composing decides the number of ranks"
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=run_folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        # The polite ones are handed on to the ranks, which save; the agent would end them.
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
    )
    with rank_environment(config), _handing_on_signals():
        try:
            elastic_launch(launch, sys.executable)("-m", "glmexp.worker", str(run_folder))
        except ChildFailedError as error:
            if folder.read_status(run_folder)["state"] == "stopped":
                print(f"stopped: train.resume={run_folder} goes on, or the same line with train.resume=auto")
                return EXIT_STOPPED
            return _failed(run_folder, ranks, {rank: one.exitcode for rank, one in error.failures.items()})
        except SignalException as interrupt:
            number = int(interrupt.sigval)
            failures.report(run_folder, failures.of_signal(0, number), ranks)
            return 128 + number
    return 0


@contextmanager
def _handing_on_signals() -> Iterator[None]:
    """SIGTERM and SIGUSR1 go to the ranks, which agree, save and end; a second one ends all at once."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    asked: list[float] = []

    def hand_on(number: int, _: object) -> None:
        ranks = _own_ranks()
        now = time.monotonic()
        if not ranks or (asked and now - asked[0] > SAME_REQUEST_S):
            raise SignalException(f"signal {number}", sigval=signal.Signals(number))
        if not asked:
            asked.append(now)
            print("asked to stop: saving after this step (a second signal ends at once)", flush=True)
            for pid in ranks:
                os.kill(pid, number)

    before = {number: signal.signal(number, hand_on) for number in POLITE}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _own_ranks() -> list[int]:
    """Processes of the ranks that this one has started (Linux)."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text(encoding="ascii").split():
            try:
                if b"glmexp.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
    return found


def _failed(run_folder: Path, ranks: int, exit_codes: dict[int, int]) -> int:
    """Show the first cause among what the ranks recorded and what the agent saw; the run's exit code."""
    found = failures.recorded(run_folder)
    known = {failure.rank for failure in found}
    found += [failures.of_signal(rank, -code) for rank, code in exit_codes.items() if code < 0 and rank not in known]
    if not found:
        found = [
            failures.Failure(rank, EXIT_FAILURE, f"ended with exit code {code} and left no message", "", 0.0)
            for rank, code in exit_codes.items()
        ]
    cause = failures.first_cause(found)
    failures.report(run_folder, cause, ranks)
    return EXIT_USER_MISTAKE if cause.exit_code == EXIT_USER_MISTAKE else EXIT_FAILURE


def _in_process(config: RunConfig, run_folder: Path, run_rank: RunRank) -> int:
    """One rank in this process, for debuggers; its rendezvous is a store of its own."""
    from glmexp.launcher.environment import one_rank_environment

    with one_rank_environment(config):
        return run_rank(run_folder, True)


def _lead(config: RunConfig, run_folder: Path, run_rank: RunRank) -> int:
    """Rank 0 under an outside launcher: hand the folder to the others, then be a rank."""
    from glmexp.launcher.environment import rendezvous_store

    rendezvous_store(config.launcher.timeout_s).set(RUN_FOLDER_KEY, str(run_folder))
    return run_rank(run_folder, True)


def follow(outside: Outside, run_rank: RunRank) -> int:
    """Ranks other than 0 under an outside launcher: wait for rank 0's folder, then be a rank."""
    from glmexp.launcher.environment import rendezvous_store

    assert outside == outside_ranks(), "follow() is for the process that the launcher started"
    run_folder = rendezvous_store(timeout_s=600).get(RUN_FOLDER_KEY).decode()
    return run_rank(Path(run_folder), True)
