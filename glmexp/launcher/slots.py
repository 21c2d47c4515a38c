"""Parts of the machine that trials of a sweep run on at the same time, and the process that one trial runs in."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from glmexp.config.errors import UserError
from glmexp.launcher import failures
from glmexp.launcher.ranks import gpu_count
from glmexp.launcher.trials import STOPPING

LOG = "trial.log"


@dataclass(frozen=True)
class Slot:
    """Devices of one trial."""

    number: int
    gpus: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them. Empty on a machine without."""
    cores: tuple[int, ...] = ()
    """CPU cores; empty: all of them."""

    @property
    def words(self) -> str:
        """``GPUs 0,1`` or ``cores 0``; nothing where a trial has the whole machine."""
        what, which = ("GPU", self.gpus) if self.gpus else ("core", self.cores)
        return f"{what}{'s' if len(which) > 1 else ''} {','.join(map(str, which))}" if which else ""

    def occupy(self, ranks: int) -> None:
        """Bind this process, and all that it will start, to the slot."""
        if self.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        if self.cores:
            os.sched_setaffinity(0, self.cores)
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(self.cores) // ranks)))


def divide(slots: int, environ: Mapping[str, str] = os.environ) -> list[Slot]:
    """``slots`` equal parts of the machine's GPUs, or of its cores where it has none; one slot is the whole machine."""
    if slots == 1:
        return [Slot(0)]
    gpus = gpu_count(environ)
    if gpus:
        named = environ.get("CUDA_VISIBLE_DEVICES")
        devices = [str(one) for one in range(gpus)] if named is None else [one.strip() for one in named.split(",")]
        each = gpus // slots
        return [Slot(one, gpus=tuple(devices[one * each : (one + 1) * each])) for one in range(slots)]
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // slots
    assert each > 0, "composing refuses slots that do not divide the machine"
    return [Slot(one, cores=tuple(cores[one * each : (one + 1) * each])) for one in range(slots)]


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals that end a sweep wait: between a fork and its first lines they would find the parent's handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def start_process(work: Callable[[], int], slot: Slot, ranks: int, run_folder: Path, log: bool) -> BaseProcess:
    """Run ``work`` in a process of its own, which ends when this one does.

    A fork: this process has imported nothing heavy and has one thread. ``log``: what it prints goes to
    ``logs/trial.log`` of its run folder.
    """
    process = get_context("fork").Process(target=_child, args=(work, slot, ranks, run_folder, log, os.getpid()))
    process.start()
    return process


def _child(work: Callable[[], int], slot: Slot, ranks: int, run_folder: Path, log: bool, parent: int) -> None:
    os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which passes it on once
    for number in STOPPING:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # see signals_held
    _die_with(parent)
    if log:
        _print_to(run_folder / "logs" / LOG)
    slot.occupy(ranks)
    try:
        code = work()
    except Exception as error:  # noqa: BLE001 - the boundary of the process: recorded, shown, turned into an exit code
        failure = failures.of_exception(0, error)
        failures.record(run_folder, failure)
        print(failure.message if isinstance(error, UserError) else failure.trace, file=sys.stderr)
        code = failure.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    # As in a rank: threads of libraries can abort an interpreter that is already done.
    os._exit(code)


def _print_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    # Whatever stood for the two in this process may write elsewhere.
    sys.stdout, sys.stderr = (os.fdopen(one, "w", buffering=1, encoding="utf-8", closefd=False) for one in (1, 2))


def _die_with(parent: int) -> None:
    """Linux: a SIGTERM when the parent is gone, so that kill -9 of it leaves no trial behind."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)
