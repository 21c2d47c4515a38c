"""A run's own folder below ``offload.nvme_path``: DeepSpeed clears the one that it is given, whoever else is in it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from glmexp.config.errors import ConfigError, Problem
from glmexp.launcher.unfinished import WAIT_S, Lock

_PREFIX = "glmexp-"
_GUARD_S = 120.0
_held: dict[Path, Lock] = {}
"""Of this process."""


def place(nvme_path: str, run_folder: Path) -> Path:
    """The folder of the run: the same on all ranks, and when the run goes on."""
    digest = hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()[:12]
    return Path(nvme_path) / f"{_PREFIX}{digest}"


def take(folder: Path) -> None:
    """Make the folder and hold it; take away those that nobody holds any more.

    One process of a host does this for all its ranks. Raises ConfigError where another process trains in it.
    """
    if folder in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    guard = Lock(folder.parent)  # so that nobody looks between a folder and its lock
    if not guard.take(_GUARD_S):
        raise ConfigError(Problem("offload.nvme_path", f"{folder.parent} is being cleared by another run", "try again"))
    try:
        folder.mkdir(exist_ok=True)
        lock = Lock(folder)
        if not lock.take(WAIT_S):
            raise ConfigError(
                Problem("offload.nvme_path", f"another process trains with {folder}", "wait for its end, or end it")
            )
        _held[folder] = lock
        for other in folder.parent.glob(f"{_PREFIX}*"):
            if other not in _held and _is_left(other):
                shutil.rmtree(other)
    finally:
        guard.release()


def leave() -> None:
    """Take away what this process holds: a run that goes on reads its checkpoint, not this."""
    while _held:
        folder, lock = _held.popitem()
        # What a rank that ends later still writes stays for the next run to take away.
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _is_left(folder: Path) -> bool:
    lock = Lock(folder)
    free = lock.take(0)
    lock.release()
    return free
