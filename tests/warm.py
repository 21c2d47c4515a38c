"""``python -m glmexp`` in a fork of a process that has imported the heavy packages: a start takes 0.1 s and not 4.

For tests of what a run does. What a start itself does (processes, signals, launchers, what is imported) is tested on a
real one: ``tests/launcher``, ``tests/entry/test_resume.py``, ``tests/test_cli.py``, ``tests/manual``.

``python()`` is a stand-in for ``sys.executable``, in the forks too: ranks and fresh processes that the product starts
are forks of the same clean server, each with its own arguments, variables, folder, files and session. The stand-in
stays as long as its fork does: it hands on signals, and the exit code; when it is killed the fork is. What the server
cannot be (another program, other values of variables that libraries read while they are imported) it runs as the real
Python. What forks share and real processes do not: the order of sets (PYTHONHASHSEED).
"""

from __future__ import annotations

import atexit
import functools
import json
import multiprocessing
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from tests.ranks import forked

MODULES = (
    *("glmexp", "glmexp.worker", "glmexp.entry.proof", "glmexp.entry.verify", "glmexp.entry.parity"),
    "torch.distributed.run",
)
# Read when a library is imported, or before Python begins.
AT_IMPORT = (
    *("CUDA", "DS_", "HF_", "HUGGING", "KINETO", "KMP_", "LANG", "LC_", "LD_", "MKL_", "OMP_", "PYTHONHASH"),
    *("PYTHONPROFILE", "PYTHONUTF8", "TOKENIZERS", "TORCH_CPP_", "TRANSFORMERS", "XDG_"),
)
THREADS = "OMP_NUM_THREADS"
"""Is set anew in a fork; where nobody has set it, a rank does so before it imports torch."""
_FIRST_FD = 300  # above what the server holds: files on their way to the numbers that they had

_STAND_IN = """#!{python} -IS
import json, os, signal, sys
given_words, real = sys.argv[1:], {python!r}
words = given_words[given_words[:1] == ["-u"] :]
env = dict(os.environ)
seen = {{**{defaults!r}, **{{name: env[name] for name in env if name.startswith({at_import!r})}}}}
given = dict({seen!r})
if {threads!r} in seen:
    given[{threads!r}] = seen[{threads!r}]
if len(words) < 2 or words[0] != "-m" or words[1] not in {modules!r} or seen != given:
    os.execv(real, [real, *given_words])
import array, socket
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [number for number in files if number < {first} and os.path.exists("/proc/self/fd/%d" % number)]
asked, child = [], 0
def hand_on(number, frame):
    os.kill(child, number) if child else asked.append(number)
for number in {signals!r}:
    signal.signal(number, hand_on)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
message = json.dumps([words[1:], env, os.getcwd(), files]).encode()
server.sendmsg([len(message).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
server.sendall(message)
for number in files:
    os.close(number)
answer = server.makefile("r")
child = int(answer.readline())
for number in asked:
    os.kill(child, number)
code = os.waitstatus_to_exitcode(int(answer.readline() or signal.SIGKILL))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
_HANDED_ON = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)))


@functools.cache
def python() -> str:
    """The stand-in for ``sys.executable``; the server behind it is started with the first call."""
    folder = tempfile.mkdtemp(prefix="glmexp-warm-")
    path = Path(folder, "python")
    server = forked(_serve, sys.executable, str(path))
    server.start()
    atexit.register(_stop, server, folder)
    while not path.exists():
        assert server.is_alive(), "the server of warm starts has ended"
        server.join(0.02)
    return str(path)


def _stop(server: BaseProcess, folder: str) -> None:
    server.kill()
    server.join()
    shutil.rmtree(folder, ignore_errors=True)


def _serve(real: str, path: str) -> None:
    """Fork for every stand-in that calls; tell it the fork's process id and then how that ended."""
    from tests.preload import DEFAULTS, GIVEN

    assert len(os.listdir("/proc/self/task")) == 1, "only a process with one thread may fork"
    seen = {name: value for name, value in {**DEFAULTS, **GIVEN}.items() if name.startswith(AT_IMPORT)}
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{path}.socket")
    listening.listen(64)
    text = _STAND_IN.format(
        python=real, defaults=DEFAULTS, threads=THREADS, seen=seen, at_import=AT_IMPORT, modules=MODULES,
        first=_FIRST_FD, signals=_HANDED_ON, address=f"{path}.socket",
    )  # fmt: skip
    waking, woken = os.pipe()
    for end in (waking, woken):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    with selectors.DefaultSelector() as events:
        events.register(listening, selectors.EVENT_READ)
        events.register(waking, selectors.EVENT_READ)
        tester = multiprocessing.parent_process()
        assert tester is not None
        events.register(tester.sentinel, selectors.EVENT_READ)
        Path(f"{path}.new").write_text(text, encoding="utf-8")
        Path(f"{path}.new").chmod(0o755)
        Path(f"{path}.new").rename(path)
        callers: dict[int, socket.socket] = {}
        while True:
            for key, _ in events.select():
                if key.fileobj is listening:
                    caller = listening.accept()[0]
                    callers[_fork(caller, path)] = caller
                    events.register(caller, selectors.EVENT_READ)
                elif key.fileobj == waking:
                    os.read(waking, 4096)
                elif key.fileobj == tester.sentinel:  # the tests were killed
                    return
                else:  # a stand-in says nothing more: it was killed
                    events.unregister(key.fileobj)
                    os.kill(next(pid for pid, caller in callers.items() if caller is key.fileobj), signal.SIGKILL)
            for pid, status in _ended(callers):
                caller = callers.pop(pid)
                if caller in events.get_map():
                    events.unregister(caller)
                    caller.sendall(f"{status}\n".encode())
                caller.close()


def _ended(callers: dict[int, socket.socket]) -> list[tuple[int, int]]:
    found = [os.waitpid(pid, os.WNOHANG) for pid in callers]
    return [(pid, status) for pid, status in found if pid]


def _fork(caller: socket.socket, path: str) -> int:
    """The forked process's id, told to the caller; does not return in the fork."""
    head, files, _, _ = socket.recv_fds(caller, 4, 250)
    length, text = int.from_bytes(head, "big"), b""
    while len(text) < length:
        text += caller.recv(length - len(text))
    words, environment, folder, numbers = json.loads(text)
    pid = os.fork()
    if pid == 0:
        try:
            _become(files, numbers)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            code = _run(words, path)
        except BaseException:  # noqa: BLE001 - the end of a process: shown as Python shows it
            traceback.print_exc()
            code = 1
        _end(code)
    for number in files:
        os.close(number)
    caller.sendall(f"{pid}\n".encode())
    return pid


def _become(files: list[int], numbers: list[int]) -> None:
    """A session of its own, no handler of the server's, and the caller's files under their numbers."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    moved = [os.dup2(number, _FIRST_FD + place) for place, number in enumerate(files)]
    os.closerange(3, _FIRST_FD)
    for number, wanted in zip(moved, numbers, strict=True):
        os.dup2(number, wanted)
        os.close(number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.stderr.reconfigure(line_buffering=True, errors="backslashreplace")


def _run(words: list[str], path: str) -> int:
    """``python -m MODULE WORDS`` in this process; its exit code."""
    import torch

    module, *arguments = words
    sys.argv, sys.executable = [module, *arguments], path
    sys.path[:0] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    random.seed()
    torch.set_num_threads(int(os.environ.get(THREADS, "1")))
    sys.modules.pop(module if module != "glmexp" else "glmexp.__main__", None)  # it becomes __main__
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _end(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
