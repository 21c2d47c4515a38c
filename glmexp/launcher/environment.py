"""Environment of the ranks: threads, quiet libraries, search paths."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from glmexp.launcher.ranks import gpu_count

# What libraries print by themselves goes to the rank's log file (see worker); these they read when they are imported.
_QUIET = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "KINETO_LOG_LEVEL": "99",  # torch's profiler tells when it starts and stops
    # Threads that wait sleep: spinning ones made a tiny model 8 times slower on two cores that others use too.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def set_defaults() -> None:
    """Variables of a rank that nobody has set, however it was started. Call before torch is imported."""
    threads = threads_a_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    defaults = {**_QUIET, "OMP_NUM_THREADS": str(threads)}
    if gpu_count() == 0:
        defaults["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed warns on the terminal that it found no other
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ["PATH"] = tools_path()


def threads_a_rank(ranks: int) -> int:
    """Threads for the OpenMP loops of one of ``ranks`` ranks here: torch's kernels and AdamW on the host.

    Each rank would else take a thread a core, and they would fight for them.
    """
    return max(1, usable_cores() // ranks)


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: fewer than the machine has under taskset, Slurm or a container's quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    limit, _, period = quota.read_text(encoding="ascii").partition(" ") if quota.is_file() else ("max", "", "")
    return cores if limit == "max" else max(1, min(cores, int(limit) // int(period)))


def tools_path(environ: Mapping[str, str] = os.environ) -> str:
    """PATH with the folder of this Python at its end: ninja lies there, and torch asks for it to load an op, also where
    the environment is not activated."""
    folders = environ.get("PATH", "").split(os.pathsep)
    beside = str(Path(sys.executable).parent)
    return os.pathsep.join([*folders, *([] if beside in folders else [beside])])


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """These environment variables inside, the former ones afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
