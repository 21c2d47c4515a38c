"""Ranks as processes of this machine: start, watch, end together. One rank's death ends all; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from glmexp.config.entries import GOES_ON
from glmexp.config.errors import EXIT_FAILURE, EXIT_STOPPED
from glmexp.config.quoting import typed
from glmexp.config.schema import RunConfig
from glmexp.launcher import failures, folder, positions, rendezvous
from glmexp.launcher.positions import BEAT_S, Watch
from glmexp.launcher.stopping import POLITE, SAME_REQUEST_S

FOLLOW = "--follow"
"""Argument of a rank's process in place of its folder: ask rank 0, which is on another machine."""
NOTE = "GLMEXP_FOLDER_NOTE"
"""Variable of a rank that follows: the file in which it tells its parent the run's folder."""
GRACE_S = 6.0
"""After a rank's death the others get so long to fail by themselves: their errors say more than ours."""
_POLL_S = 0.1


class Ranks:
    """The ranks of one run on this machine. ``poll`` until it returns an exit code; several may run side by side.

    run_folder: None on machines other than node 0, whose ranks ask rank 0. environ: further variables of the ranks,
    such as CUDA_VISIBLE_DEVICES.
    Raises ConfigError where launcher.master_port is taken.
    """

    def __init__(self, config: RunConfig, run_folder: Path | None, environ: Mapping[str, str] | None = None) -> None:
        launcher = config.launcher
        assert launcher.nproc is not None, "composing decides the number of ranks"
        self._config, self._folder = config, run_folder
        self._first = launcher.nproc * (launcher.node_rank or 0)
        self.world_size = launcher.nproc * launcher.nnodes
        self._note = Path(tempfile.mkdtemp(prefix="glmexp-")) / "folder" if run_folder is None else None
        self._ended_here: set[int] = set()
        self._asked: int | None = None
        self._asked_s = 0.0
        self._first_death_s: float | None = None
        self._looked_s = 0.0
        self._watch: Watch | None = None
        self._places: list[str] | None = None
        self._processes = self._start(launcher.nproc, environ or {})

    def _start(self, count: int, environ: Mapping[str, str]) -> list[subprocess.Popen[bytes]]:
        launcher = self._config.launcher
        several = launcher.nnodes > 1
        port = launcher.master_port or (rendezvous.DEFAULT_PORT if several else None)
        listening = None
        if self._first == 0:
            listening = rendezvous.listening(port, several)
            port = listening.getsockname()[1]
        common = {
            **os.environ,
            **_loopback(several),
            **environ,
            **launcher.env,
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": (launcher.master_addr or "127.0.0.1") if several else "127.0.0.1",
            "MASTER_PORT": str(port),
            **({NOTE: str(self._note)} if self._note is not None else {}),
        }
        where = FOLLOW if self._folder is None else str(self._folder)
        processes = []
        for local_rank in range(count):
            rank = self._first + local_rank
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            inherited = () if listening is None or rank != 0 else (listening.fileno(),)
            if inherited:
                own[rendezvous.LISTENS] = str(inherited[0])
            words = [sys.executable, "-m", "glmexp.worker", where]
            # A session of its own: Ctrl-C reaches the parent alone, which decides what the ranks are told.
            processes.append(subprocess.Popen(words, env={**common, **own}, pass_fds=inherited, start_new_session=True))
        if listening is not None:
            listening.close()
        return processes

    @property
    def run_folder(self) -> Path | None:
        """The run's folder; on other nodes as soon as a rank has told it."""
        if self._folder is None and self._note is not None and self._note.exists():
            self._folder = Path(self._note.read_text(encoding="utf-8"))
        return self._folder

    def signal(self, number: int) -> None:
        """Hand a signal to the ranks: SIGTERM and SIGUSR1 let them save, SIGINT and SIGHUP end them; so does a second
        one of any kind, at once."""
        now = time.monotonic()
        if self._asked is not None:
            # A scheduler signals everybody, and whoever hands it on does so once more: one request within that time.
            if number not in POLITE or now - self._asked_s > SAME_REQUEST_S:
                self.kill()
            return
        self._asked, self._asked_s = number, now
        if number in POLITE:
            saves = self._config.entry.name in GOES_ON
            how = "saving after this step (a second signal ends at once)" if saves else "ending"
            print(f"asked to stop: {how}", flush=True)
        number = signal.SIGINT if number == signal.SIGHUP else number
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def poll(self) -> int | None:
        """The exit code of the run on this machine once all its ranks have ended, else None. Call often."""
        codes = [process.poll() for process in self._processes]
        now = time.monotonic()
        if any(code not in (None, 0) for code in codes) and self._first_death_s is None:
            self._first_death_s = now
        waited = now - self._first_death_s if self._first_death_s is not None else 0.0
        if waited > (GRACE_S if self._asked is None else self._config.launcher.timeout_s):
            self.kill()
        self._look(now)
        if None in codes:
            return None
        return self._ended([code for code in codes if code is not None])

    def _look(self, now: float) -> None:
        """Name a rank that holds up the others; the parent of node 0 does, for all machines that share the folder."""
        if self._first != 0 or self._folder is None or now - self._looked_s < BEAT_S:
            return
        self._looked_s = now
        if self._watch is None:
            silent_s = self._config.launcher.watch_s
            self._watch = Watch(self._folder, self.world_size, silent_s, lambda line: print(line, file=sys.stderr))
        self._watch.look()

    def kill(self) -> None:
        """End the ranks that are left, each after it has written its Python stack into its log folder."""
        left = [number for number, process in enumerate(self._processes) if process.poll() is None]
        if self.run_folder is not None and self._places is None:
            self._places = positions.table(self.run_folder, self.world_size)
        for number in left:
            self._processes[number].send_signal(failures.STACK_SIGNAL)
            self._processes[number].send_signal(signal.SIGCONT)  # a stopped one answers only then
        if left:
            time.sleep(0.3)
        for number in left:
            self._ended_here.add(self._first + number)
            self._processes[number].kill()
            self._processes[number].wait()

    def _ended(self, codes: list[int]) -> int:
        run_folder = self.run_folder
        by_rank = {self._first + number: code for number, code in enumerate(codes) if code != 0}
        if self._note is not None:
            self._note.unlink(missing_ok=True)
            self._note.parent.rmdir()
        if not by_rank:
            return 0
        if run_folder is None:
            print(f"ranks ended before rank 0 named the run: exit codes {by_rank}", file=sys.stderr)
            return EXIT_FAILURE
        # A machine that does not share the folder has no status.
        state = folder.read_status(run_folder)["state"] if (run_folder / folder.STATUS).exists() else ""
        if state == "stopped":
            print(f"stopped: {typed('train.resume', run_folder)} goes on, or the same line with train.resume=auto")
            return EXIT_STOPPED
        if self._asked is not None:
            if state in ("starting", "running"):
                failures.report(run_folder, failures.of_signal(self._first, self._asked), self.world_size)
            return 128 + self._asked
        killed = {rank: code for rank, code in by_rank.items() if rank not in self._ended_here}
        return failures.conclude(run_folder, self.world_size, killed, self._places)


def run(config: RunConfig, run_folder: Path | None) -> int:
    """Start the ranks of this machine and stay until they have ended. Returns the exit code."""
    return stay(Ranks(config, run_folder))


def stay(ranks: Ranks, limit_s: float | None = None) -> int:
    """Stay until these ranks have ended, which they have to within ``limit_s`` seconds. Returns the exit code."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    with _handed_on(ranks):
        while (code := ranks.poll()) is None:
            time.sleep(_POLL_S)
            if deadline is not None and time.monotonic() > deadline:
                ranks.kill()
    return code


@contextmanager
def _handed_on(ranks: Ranks) -> Iterator[None]:
    """Signals of this process go to the ranks as long as they run."""
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return

    def hand_on(number: int, frame: FrameType | None) -> None:
        ranks.signal(number)

    before = {number: signal.signal(number, hand_on) for number in (*POLITE, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _loopback(several: bool) -> dict[str, str]:
    """On one machine gloo talks over the loopback, whatever the machine's name resolves to."""
    if several or "GLOO_SOCKET_IFNAME" in os.environ or not Path("/sys/class/net/lo").exists():
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo"}
