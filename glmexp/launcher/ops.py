"""``python -m glmexp.launcher.ops OP``: compile one of DeepSpeed's ops and load it (see ``needs.compiled``).

torch guards a build folder with a file named ``lock``, and waits for ever where a killed build has left it behind. Here
one build of an op runs at a time (a lock of the kernel, which ends with its process), and a file that no living process
holds is taken away where it must be stale.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "pin_memory": "PinMemoryBuilder",
    "async_io": "AsyncIOBuilder",
    "quantizer": "QuantizerBuilder",
}
QUIET_S = 600.0
"""Seconds without a new file after which nobody builds any more, on another machine that shares the folder either."""
_BUILDING = "building"


def main(op: str) -> None:
    """Raises what the compiler or the loader raises. Standard output is for the user, the rest goes to the log."""
    shown = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    for name in ("pin_memory", op) if op == "async_io" else (op,):  # which loads the other one
        folder = Path(_get_build_directory(name, verbose=False))
        with alone(folder, lambda line: print(line, file=shown)):
            get_accelerator().create_op_builder(BUILDERS[name]).load(verbose=False)


@contextmanager
def alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, no other run builds in ``folder``, and torch's lock file of a killed build is gone.

    Raises RuntimeError with the file to delete where it may belong to a build that goes on elsewhere.
    """
    import fcntl

    with (folder / "glmexp.lock").open("a+", encoding="ascii") as own:
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run builds in {folder}: waiting for it")
            fcntl.flock(own, fcntl.LOCK_EX)
        own.seek(0)
        left_by_us = own.read() == _BUILDING
        own.truncate(0)
        remove_stale(folder, left_by_us, say)
        own.write(_BUILDING)
        own.flush()
        yield
        own.truncate(0)


def remove_stale(folder: Path, left_by_us: bool, say: Callable[[str], None], pause_s: float = 0.5) -> None:
    """Wait while a living process holds torch's lock file; remove it where it is stale.

    Stale: no process here has it open (its maker does until it is done), and either the last build of this program
    here was killed (``left_by_us``), or the folder is quiet.
    """
    lock, waits = folder / "lock", False
    while lock.exists():
        holder = holder_of(lock)
        if holder is not None:
            if not waits:
                say(f"process {holder} builds in {folder}: waiting for it")
            waits = True
            time.sleep(pause_s)
            continue
        quiet_s = time.time() - max(path.stat().st_mtime for path in (lock, *folder.glob("*.o")))
        if not left_by_us and quiet_s < QUIET_S:
            raise RuntimeError(
                f"error: {lock} says that a build goes on, and no process of this machine holds it: if none on another "
                f"machine does, delete it (after {QUIET_S / 60:.0f} quiet minutes it is deleted by itself)"
            )
        say(f"removed {lock}: a killed build has left it behind, and the next would wait for it for ever")
        lock.unlink(missing_ok=True)


def holder_of(file: Path) -> int | None:
    """A process of this machine that has ``file`` open, as far as this user may see."""
    wanted = str(file.resolve())
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(one.path) == wanted for one in os.scandir(descriptors)):
                return int(descriptors.parent.name)
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return None


if __name__ == "__main__":
    main(sys.argv[1])
