"""What a rank does when it is asked to end.

SIGTERM and SIGUSR1 ask politely (a preempted machine, the end of a time slot): all ranks agree, save after the step
that they are in, and end with EXIT_STOPPED. SIGTERM is also what the launcher sends to the survivors of a dead rank,
and the kernel to the ranks of a dead parent: nobody may save then, since a save needs all. So a rank acts only when
every rank has seen a request within ``AGREE_S`` seconds, which a dead one has not. SIGINT ends at once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, Literal, NoReturn

from glmexp.config.errors import EXIT_STOPPED
from glmexp.launcher import failures, folder

POLITE = (signal.SIGTERM, signal.SIGUSR1)
AGREE_S = 10.0
SAME_REQUEST_S = 3.0
"""A scheduler signals the launcher and the ranks, and the launcher hands it on: within this time it is one request."""
_POLL_S = 0.1
Phase = Literal["start", "loop", "end", "stopped"]


class Listener:
    """One rank's ear. A thread listens, since the main thread may wait inside of a collective."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        self.phase: Phase = "start"
        """start: nothing to save yet; loop: steps are taken; end: the run finishes; stopped: all is on the disk."""
        self.agreed = False
        """All ranks were asked to stop."""
        self.ends_on_interrupt = True
        """False: SIGINT has another meaning now, such as the end of an answer."""
        self._run_folder, self._rank = run_folder, rank
        self._store: Any = None
        self._ranks, self._grace_s = 1, AGREE_S
        self._parent = os.getppid()
        self._receiver, self._sender = socket.socketpair()

    def listen(self) -> None:
        """From now on. Python runs signal handlers between bytecodes of the main thread only; the byte that the
        interpreter writes to the wake-up descriptor comes at once, so a thread reads it."""
        self._sender.setblocking(False)
        self._receiver.settimeout(_POLL_S)
        signal.set_wakeup_fd(self._sender.fileno())
        for number in (*POLITE, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def offer(self, store: Any, ranks: int, grace_s: float) -> None:
        """The ranks have found each other: a polite request can be agreed on over ``store`` (torch.distributed's, with
        a connection of its own for the thread), and is given ``grace_s`` seconds."""
        self._store, self._ranks, self._grace_s = store.clone(), ranks, grace_s

    def _watch(self) -> None:
        number = None
        while number is None:
            number = self._next()
        asked = time.monotonic()
        if number == signal.SIGINT or self._store is None or os.getppid() != self._parent:
            self._end(number)
        if self.phase != "stopped" and not self._agree(self._store, asked):
            self._end(number)
        self.agreed = True
        if self.phase == "start":
            if self._rank == 0:
                folder.write_status(self._run_folder, "stopped", reason="asked to stop before the first step")
            os._exit(EXIT_STOPPED)
        while time.monotonic() - asked < self._grace_s:
            again = self._next()
            if again is not None and self.phase == "stopped":
                os._exit(EXIT_STOPPED)
            if again == signal.SIGINT or (again is not None and time.monotonic() - asked > SAME_REQUEST_S):
                self._end(again)
        self._end(number)

    def _next(self) -> int | None:
        """The next signal of ours; None where none comes for a moment."""
        try:
            number = self._receiver.recv(1)[0]
        except TimeoutError:
            return None
        heard = (*POLITE, signal.SIGINT) if self.ends_on_interrupt else POLITE
        return number if number in heard else None

    def _agree(self, store: Any, asked: float) -> bool:
        """Whether every rank has been asked, within AGREE_S."""
        keys = [f"glmexp/stop/{rank}" for rank in range(self._ranks)]
        try:
            store.set(keys[self._rank], "asked")
            while time.monotonic() - asked < AGREE_S:
                if store.check(keys):
                    return True
                if self._next() == signal.SIGINT:
                    return False
        except RuntimeError:  # torch's DistError: the store's host is gone, and with it a rank or the parent
            return False
        return False

    def _end(self, number: int) -> NoReturn:
        """At once, with the reason left behind."""
        failure = failures.of_signal(self._rank, number)
        failures.record(self._run_folder, failure)
        if self._rank == 0 and folder.read_status(self._run_folder)["state"] in ("starting", "running"):
            folder.write_status(
                self._run_folder, "failed", rank=self._rank, exit_code=128 + number, reason=failure.message
            )
        os._exit(128 + number)


_listener: Listener | None = None


def listen(run_folder: Path, rank: int) -> None:
    """Make this process's listener."""
    global _listener
    _listener = Listener(run_folder, rank)
    _listener.listen()


def listener() -> Listener | None:
    """This process's listener; None where none was made (a test, a script)."""
    return _listener
