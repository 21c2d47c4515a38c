"""``train.resume=auto``: which run is it that goes on? And who is writing in a run folder now?"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.identity import identifying, identity
from glmexp.config.inherit import AUTO, CHECKPOINTS, changed
from glmexp.config.load import dump, read, shown
from glmexp.config.quoting import typed
from glmexp.config.schema import RunConfig
from glmexp.launcher import folder

LOCK = ".lock"
WAIT_S = 30.0
"""For the folder that is to be written in."""
ORPHANS_S = 5.0
"""For one that may be somebody else's: ranks whose parent was killed end within it."""
LATEST = "latest"
BATCH = "train.batch_size"
"""A run that is named keeps its own, whatever the number of ranks."""
SHOWN = 5


def find(config: RunConfig) -> Path | None:
    """The folder of the unfinished run that ``config`` describes; None: a new run. Raises ConfigError.

    With ``run.dir`` it is that folder or none; what lies there must be this run and unfinished.
    """
    if config.train.resume != AUTO:
        return None
    if config.run.dir is not None:
        own = Path(config.run.dir).absolute()
        if not (own / folder.CONFIG).exists():
            return None
        _check(own, config)
        return own
    wanted = identity(config)
    for run in _runs(config):
        if identity_of(run) == wanted and folder.read_status(run)["state"] != "finished" and _free(run, ORPHANS_S):
            return run
    return None


def by_name(config: RunConfig) -> str | None:
    """What ``auto`` passes over as another run, and its folder's name would take up (another number of ranks, ZeRO
    stage, ...): the newest one, in words."""
    if config.run.dir is not None:
        return None
    now = dump(config)
    for run in _runs(config):
        if not (run / CHECKPOINTS / LATEST).exists() or folder.read_status(run)["state"] == "finished":
            continue
        try:
            there = read(run / folder.CONFIG)
        except ConfigError:  # another version's: nobody has named it, so nobody needs to hear of it
            continue
        other = changed(dump(there), now)
        if all(one.startswith(f"{BATCH}:") for one in other) and _free(run, 0):
            words = "; ".join(_differences(there, config))
            return f"{run} is unfinished and differs ({words}): {typed('train.resume', run)} goes on with it"
    return None


def _runs(config: RunConfig) -> list[Path]:
    """Run folders of this name, the newest first."""
    parent = Path("outputs").absolute() / config.run.name
    return sorted((path.parent for path in parent.glob(f"*/{folder.CONFIG}")), key=_last_start, reverse=True)


def _differences(there: RunConfig, config: RunConfig) -> list[str]:
    """``optim.lr: 0.001 now, 0.0003 there``, of the first keys that make two runs of them."""
    before, now = identifying(there), identifying(config)
    other = [key for key in {**now, **before} if now.get(key) != before.get(key)]
    return [f"{key}: {shown(now.get(key))} now, {shown(before.get(key))} there" for key in other[:SHOWN]]


def identity_of(run: Path) -> str | None:
    """The identity that a run was started with; None for a folder of an older version."""
    environment = run / folder.ENVIRONMENT
    return json.loads(environment.read_text(encoding="utf-8")).get("identity") if environment.exists() else None


def _last_start(run: Path) -> float:
    environment = run / folder.ENVIRONMENT
    return environment.stat().st_mtime if environment.exists() else 0.0


def _check(run: Path, config: RunConfig) -> None:
    if identity_of(run) != identity(config):
        words = _differences(read(run / folder.CONFIG), config)
        raise ConfigError(
            Problem(
                "run.dir",
                f"{run} holds another run ({'; '.join(words) or 'its identity differs'})",
                f"another folder, or {typed('train.resume', run)} to go on with it as it is",
            )
        )
    if folder.read_status(run)["state"] == "finished":
        raise ConfigError(
            Problem(
                "train.resume",
                f"auto: the run in {run} is finished",
                f"{typed('train.resume', run)} train.max_steps=N to go on longer, or another folder",
            )
        )


def _free(run: Path, wait_s: float) -> bool:
    """Nobody writes in this folder; ranks whose parent was killed get a moment to end."""
    lock = Lock(run)
    free = lock.take(wait_s)
    lock.release()
    return free


class Lock:
    """Held by the rank that writes in a run folder, for as long as its process lives, however that ends."""

    def __init__(self, run: Path) -> None:
        self._path = run / LOCK
        self._number: int | None = None

    def take(self, wait_s: float) -> bool:
        """Whether it was got within ``wait_s`` seconds."""
        number = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        end = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    os.close(number)
                    return False
                time.sleep(0.1)
            else:
                self._number = number
                return True

    def release(self) -> None:
        """Let others have it."""
        if self._number is not None:
            os.close(self._number)
            self._number = None
