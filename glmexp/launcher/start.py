"""From a checked configuration to ended ranks: one folder, N ranks, one exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from glmexp.config import redact
from glmexp.config.errors import EXIT_FAILURE, EXIT_STOPPED, EXIT_USER_MISTAKE
from glmexp.config.identity import identity
from glmexp.config.inherit import AUTO
from glmexp.config.launch_rules import one_process
from glmexp.config.load import dump, read, write
from glmexp.config.schema import RunConfig
from glmexp.launcher import environment, folder, handover, local, needs, rendezvous, slurm, trials, unfinished
from glmexp.launcher.ranks import Outside, slurm_task
from glmexp.launcher.stopping import POLITE

RunRank = Callable[[Path, bool], int]
"""(run folder, whether the rank shows its own failures) -> exit code: this process as a rank. See ``worker``."""

WAITS_ALOUD_S = 20.0
"""Seconds after which a rank that nobody has joined says whom it waits for."""


def start(config: RunConfig, run_rank: RunRank) -> int:
    """Make the run folder, start the ranks, watch them. Returns the exit code of the whole run.

    A new folder of a run that ended with the user's mistake is taken back, but for a sweep, which reads its status.
    """
    composed, going_on = identity(config), unfinished.find(config)
    launcher = config.launcher
    alone = one_process(config)
    as_job = launcher.name == "slurm" and not alone
    if as_job:
        slurm.check([config])
    else:
        config = needs.prepare(config)
    redact.hand_on(dump(config))
    # wandb records the arguments of the process that it runs in; they have been read.
    sys.argv[1:] = [redact.text(word) for word in sys.argv[1:]]
    if launcher.name == "local" and launcher.master_port is not None and not launcher.node_rank:
        rendezvous.listening(launcher.master_port, launcher.nnodes > 1).close()  # taken: said before a folder is made
    if launcher.node_rank:  # another machine's parent makes the folder
        return local.run(config, None)
    is_new = (
        going_on is None
        and config.train.resume in (None, AUTO)
        and not (config.run.dir and Path(config.run.dir).is_dir())
    )
    passed_over = unfinished.by_name(config) if config.train.resume == AUTO and going_on is None else None
    run_folder = folder.make(config, composed, going_on)
    if config.train.resume == AUTO:
        found = "no unfinished run of this configuration, a new one" if going_on is None else "going on with"
        print(f"train.resume=auto: {found}: {run_folder}", flush=True)
        if passed_over is not None:
            print(f"train.resume=auto: {passed_over}", flush=True)
    if as_job:
        return slurm.submit(config, run_folder)
    if launcher.name == "env":
        return _lead(config, run_folder, run_rank)
    code = _in_process(config, run_folder, run_rank) if alone else local.run(config, run_folder)
    if code == EXIT_USER_MISTAKE and is_new and launcher.nnodes == 1 and trials.of_run(run_folder) is None:
        folder.take_back(run_folder)
    return code


def _in_process(config: RunConfig, run_folder: Path, run_rank: RunRank) -> int:
    """One rank in this process, for debuggers; its rendezvous is a store of its own."""
    socket = rendezvous.listening(config.launcher.master_port, several_machines=False)
    alone = Outside(0, 1, 0, 1, "127.0.0.1", socket.getsockname()[1])
    variables = {**config.launcher.env, rendezvous.LISTENS: str(socket.detach())}
    alone.export(variables)
    with environment.variables(variables):
        return run_rank(run_folder, True)


def _lead(config: RunConfig, run_folder: Path, run_rank: RunRank) -> int:
    """Rank 0 under an outside launcher: hand the run to the others, then be a rank."""
    handover.give(run_folder, config.launcher.timeout_s)
    return run_rank(run_folder, True)


def in_job(run_folder: Path, run_rank: RunRank) -> int:
    """A task of the job that launcher=slurm handed in: rank 0 looks at the machine, which is not the one before."""
    outside = slurm_task()
    for number in POLITE:
        signal.signal(number, lambda *_: _stopped_before_it_began(run_folder, outside.rank))
    if outside.rank != 0:
        return follow(outside, run_rank)
    outside.export()
    try:
        with handover.giving_up_together():
            config = needs.prepare(read(run_folder / folder.CONFIG))
            write(config, run_folder / folder.CONFIG)
            return _lead(config, run_folder, run_rank)
    except SystemExit:
        folder.write_status(run_folder, "failed", reason="rank 0 could not begin; the job's output says why")
        raise


def _stopped_before_it_began(run_folder: Path, rank: int) -> NoReturn:
    """The end of the job's time comes while libraries are still loaded: nothing is lost, and the run can begin anew."""
    if rank == 0:
        folder.write_status(run_folder, "stopped", reason="asked to stop before the first step")
    os._exit(EXIT_STOPPED)


def _tell_waiting(outside: Outside) -> None:
    print(
        f"rank {outside.rank} of {outside.world_size} waits for rank 0 at {outside.master_addr}:{outside.master_port}, "
        f"for {handover.WAIT_S:g} s at most (RANK and WORLD_SIZE say that there is one)",
        file=sys.stderr,
        flush=True,
    )


def follow(outside: Outside, run_rank: RunRank) -> int:
    """Ranks other than 0 under an outside launcher: wait for rank 0's run, then be a rank of it."""
    outside.export()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the rank sets its own: Python's waits for a bytecode
    waiting = threading.Timer(WAITS_ALOUD_S, _tell_waiting, [outside])
    waiting.daemon = True
    waiting.start()
    try:
        run_folder = handover.take(handover.WAIT_S)
    except rendezvous.RendezvousError as error:
        print(f"rank {outside.rank} of {outside.world_size} failed: {error}", file=sys.stderr)
        return EXIT_FAILURE
    finally:
        waiting.cancel()
    return run_rank(run_folder, True)
