"""A measured command with all of its processes: started, stopped and continued, ended.

Stopping is SIGSTOP to every descendant, ranks and workers with sessions of their own included. Work that a stopped
process has given to its GPU is finished, and then the GPU is free: memory stays taken, nothing runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

MARK = "GLMEXP_BENCH_SIDE"
LAST_LINES = 25


class Family:
    """A process and its descendants. Its output goes to ``log``."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        self._mark = uuid.uuid4().hex
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                list(command),
                cwd=folder,
                env={**os.environ, **env, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._root = psutil.Process(self._popen.pid)

    @property
    def exit_code(self) -> int | None:
        """None while the command is there."""
        return self._popen.poll()

    def stop(self) -> None:
        """SIGSTOP to all; again until no one has been born in the meantime."""
        stopped: set[int] = set()
        while True:
            born = [one for one in self.members() if one.pid not in stopped]
            if not born:
                return
            self._send(born, signal.SIGSTOP)
            stopped |= {one.pid for one in born}

    def go_on(self) -> None:
        """SIGCONT to all, children first: a parent that waits for them finds them awake."""
        self._send(self.members()[::-1], signal.SIGCONT)

    def end(self, limit_s: float = 20.0) -> None:
        """SIGKILL to all, also to those whose parent is gone. Raises RuntimeError if someone survives that."""
        deadline = time.monotonic() + limit_s
        # A whole family dies slowly where its GPU memory is given back; the mark finds who has lost its parent.
        while alive := [one for one in {*self.members(), *self._marked()} if _runs(one)]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"still there after SIGKILL: {[one.pid for one in alive]}")
            self._send(alive, signal.SIGKILL)
            self._popen.poll()
            time.sleep(0.05)

    def last_lines(self) -> str:
        """The end of what it printed."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])

    def members(self) -> list[psutil.Process]:
        """The command's process first, then its descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._root, *self._root.children(recursive=True)]
        return []

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    @staticmethod
    def _send(processes: Sequence[psutil.Process], number: int) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
