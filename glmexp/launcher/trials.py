"""The trials of a sweep on disk: ``sweep.json``, what became of each, and the lock that keeps a second parent out."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.identity import IGNORED_KEYS, IGNORED_SECTIONS, identity
from glmexp.config.schema import RunConfig
from glmexp.launcher import failures, folder

STATE = "sweep.json"
LOCK = ".lock"
WAITING, RUNNING, STOPPED = "waiting", "running", "stopped"
FINISHED, FAILED, OUT_OF_MEMORY, NON_FINITE = "finished", "failed", "out_of_memory", "non_finite"
OUTCOMES = (FINISHED, FAILED, OUT_OF_MEMORY, NON_FINITE)
"""A trial with one of these is not run again unless ``sweep.retry`` names it."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that end a sweep in a way that it can be taken up again: Ctrl-C, and what a queue sends before it kills."""
_ORPHANS_S = 120.0
_MEMORY = re.compile(r"OutOfMemory|MemoryError|out of memory|can't allocate memory", re.IGNORECASE)
_NOT_FINITE = re.compile(r"NonFinite|loss scale already at minimum")

Metrics = dict[str, float | str]
"""Metric to its last value; those that JSON has no number for are the words nan, inf and -inf."""


@dataclass
class Trial:
    """One configuration of a sweep, and what became of it."""

    number: int
    identity: str
    values: dict[str, str]
    """Swept key to its value, as typed."""
    folder: str
    """Run folder, below the sweep's."""
    state: str = WAITING
    metrics: Metrics = field(default_factory=dict)
    reason: str = ""
    """First line of what went wrong."""
    seconds: float | None = None
    """Duration of its last start."""
    same_as: int | None = None
    """A search has chosen the configuration of this earlier trial once more: its outcome stands here too."""

    @property
    def name(self) -> str:
        """``trial 3 (method.rank=8 optim.lr=0.001)``."""
        words = " ".join(f"{key}={value}" for key, value in self.values.items())
        return f"trial {self.number} ({words})" if words else f"trial {self.number}"

    def value(self, metric: str) -> float:
        """The metric as a number; nan where the trial has none."""
        return float(self.metrics.get(metric, "nan"))


@dataclass
class SweepState:
    """All of a sweep, as ``sweep.json`` holds it."""

    root: Path
    plan: dict[str, Any]
    """How trials are chosen; a search can be taken up again only with the same."""
    line: list[str]
    """Command line of the last start."""
    trials: list[Trial] = field(default_factory=list)

    def save(self) -> None:
        """Write the file: to a temporary name first, so that no reader sees half of it."""
        folder.write_json(
            self.root / STATE,
            {"line": self.line, "plan": self.plan, "trials": [dataclasses.asdict(one) for one in self.trials]},
        )

    def folder_of(self, trial: Trial) -> Path:
        """The trial's run folder."""
        return self.root / trial.folder


def read(root: Path) -> SweepState | None:
    """The sweep that lies in ``root``; None where there is none. Raises ConfigError for a folder of something else."""
    file = root / STATE
    if not file.exists():
        runs = sorted(root.glob(f"*/{folder.CONFIG}"))
        if runs:
            raise ConfigError(
                Problem("hydra.sweep.dir", f"{root} holds runs and no {STATE}", "choose another folder, or remove it")
            )
        return None
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        trials = [Trial(**one) for one in tree["trials"]]
        return SweepState(root, tree["plan"], tree["line"], trials)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(Problem(str(file), f"is no record of a sweep: {error}", "choose another folder")) from error


def of_run(run_folder: Path) -> Trial | None:
    """The trial whose run folder this is; None of a run outside of a sweep."""
    if not (run_folder.parent / STATE).exists():
        return None
    state = read(run_folder.parent)
    assert state is not None, "it is there"
    return next((one for one in state.trials if one.folder == run_folder.name and one.same_as is None), None)


def trial_identity(config: RunConfig, values: Mapping[str, str]) -> str:
    """A trial's identity is its composed configuration; a sweep over what a run's identity leaves out, such as the
    number of ranks, tells its trials apart by the swept values as well."""
    own = [f"{key}={value}" for key, value in sorted(values.items()) if _left_out(key)]
    more = (
        [hashlib.sha256(" ".join(own).encode()).hexdigest()[:12]] if own else []
    )  # no value itself: it may be a secret
    return "-".join([identity(config), *more])


def _left_out(key: str) -> bool:
    return key.split(".")[0] in IGNORED_SECTIONS or key in IGNORED_KEYS


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Only one parent works on a sweep. Raises ConfigError with the other one's process id.

    Trials inherit the lock, so that it also holds while those of a killed parent are still ending; that is waited for.
    """
    with (root / LOCK).open("a+", encoding="utf-8") as file:
        deadline, told = time.monotonic() + _ORPHANS_S, False
        while not _taken(file):
            file.seek(0)
            owner = file.read().strip()
            if time.monotonic() > deadline or (owner and not _dead(owner)):
                raise ConfigError(
                    Problem("hydra.sweep.dir", f"{root} is in use by process {owner}", "wait for it, or end it first")
                )
            if not told:
                print(f"waiting for the trials of process {owner}, which is gone, to end", flush=True)
            told = True
            time.sleep(0.2)
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
        file.truncate(0)


def _taken(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _dead(owner: str) -> bool:
    """Whether the process that wrote ``PID on HOST`` ran here and is gone."""
    pid, _, host = owner.partition(" on ")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def wait_for_ranks(run_folder: Path) -> None:
    """Ranks of a killed parent end by themselves; nobody else may write in their folder before. Linux only."""
    deadline = time.monotonic() + _ORPHANS_S
    while pids := list(_ranks_of(run_folder)):
        if time.monotonic() > deadline:
            numbers = ", ".join(map(str, pids))
            raise ConfigError(Problem(str(run_folder), f"processes {numbers} still work in it", "end them first"))
        time.sleep(0.2)


def _ranks_of(run_folder: Path) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if b"glmexp.worker" in words and os.fsencode(run_folder) in words:
            yield int(process.name)


def has_checkpoint(run_folder: Path) -> bool:
    """Whether the run can go on: ``latest`` only ever names a whole checkpoint."""
    return (run_folder / "checkpoints" / "latest").exists()


def settle(run_folder: Path, exit_code: int) -> tuple[str, str]:
    """(state, first line of the reason) of a trial that ended with this exit code."""
    if (run_folder / folder.STATUS).exists() and folder.read_status(run_folder)["state"] == "stopped":
        return STOPPED, "stopped where it can go on"
    if exit_code == 0:
        return FINISHED, ""
    if exit_code in [code for number in STOPPING for code in (-number, 128 + number)]:
        return STOPPED, "interrupted"
    found = failures.recorded(run_folder)
    if not found:
        return FAILED, f"ended with exit code {exit_code} and left no message"
    cause = failures.first_cause(found)
    if cause.exit_code - 128 in STOPPING:  # asked to end before there was anything to save
        return STOPPED, _first_line(cause.message)
    if _NOT_FINITE.search(cause.message):
        return NON_FINITE, _first_line(cause.message)
    if _MEMORY.search(cause.message):
        return OUT_OF_MEMORY, _first_line(cause.message)
    return FAILED, _first_line(cause.message)


def settle_left_behind(run_folder: Path) -> tuple[str, str]:
    """The same of a trial whose parent was killed: its own ``status.json`` says how far it came."""
    wait_for_ranks(run_folder)
    if not (run_folder / folder.STATUS).exists():
        return STOPPED, "its parent was ended"
    status = folder.read_status(run_folder)
    if status["state"] == "finished":
        return FINISHED, ""
    if status["state"] == "failed" and status.get("exit_code", 128) < 128:
        return settle(run_folder, status["exit_code"])
    return STOPPED, "its parent was ended"


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    report = len(lines) > 1 and lines[0].endswith(("error:", "errors:"))  # a user's mistake: the head says only that
    return lines[1 if report else 0][:300] if lines else ""


def last_metrics(run_folder: Path) -> Metrics:
    """The last value of each metric in ``metrics.jsonl``; a last line that is cut off is left out."""
    file = run_folder / "metrics.jsonl"
    found: Metrics = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").split("\n")[:-1]:
            found |= json.loads(line)
    found.pop("step", None)
    return found
