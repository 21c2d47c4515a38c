"""What a configuration needs of this machine beside Python: tools to compile DeepSpeed's ops, libaio, memory, disk.

Checked in the parent before the run folder is made, with nothing heavy imported; the ops are compiled there once, so
that no rank compiles while others wait for it.
"""

from __future__ import annotations

import ctypes.util
import dataclasses
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from glmexp.config import folders
from glmexp.config.entries import SERVES, TRAINS
from glmexp.config.errors import ConfigError, Problem
from glmexp.config.memory import BYTES, passes_gpu, pinned_by_deepspeed
from glmexp.config.schema import RunConfig
from glmexp.launcher.environment import threads_a_rank, tools_path
from glmexp.launcher.ranks import core_count, gpu_count
from glmexp.plan import report, shapes
from glmexp.plan.states import states_of

CPU_ADAM, PIN_MEMORY, ASYNC_IO, QUANTIZER = "cpu_adam", "pin_memory", "async_io", "quantizer"
_WAYS_OUT = "offload.adam=torch (torch's AdamW on the host, slower), or offload=none"
CPU_RANK_BYTES = 0.32 * 2**30
"""Memory that a rank on the CPU has to itself beside its tensors: Python, torch, DeepSpeed (private bytes of a tiny
run's rank; libraries are shared)."""


@dataclasses.dataclass(frozen=True)
class Host:
    """This machine, as far as it is asked about."""

    gpus: int
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    memory_bytes: int | None = None
    """Memory that a run may take; None: unknown here."""
    cores: int = dataclasses.field(default_factory=core_count)

    @staticmethod
    def here() -> Host:
        """The machine of this process."""
        return Host(gpu_count(), os.environ, available_memory_bytes())

    def tool(self, *names: str) -> str | None:
        """The first of these programs that is on PATH, or beside this Python (an environment that is not activated)."""
        path = tools_path(self.environ)
        return next((found for name in names if (found := shutil.which(name, path=path)) is not None), None)

    def compilers(self) -> Iterator[Problem]:
        """What is missing to compile an op of DeepSpeed in C++."""
        named = self.environ.get("CXX")
        if self.tool(*([named] if named else ["c++", "g++"])) is None:
            name = f"{named}, as CXX says," if named else "a C++ compiler (c++ or g++)"
            yield Problem("PATH", f"{name} is not on PATH", "install one (Debian: apt-get install g++)")
        if self.tool("ninja") is None:
            yield Problem("PATH", "ninja is not on PATH", "pip install ninja")

    def cuda_toolkit(self) -> Iterator[Problem]:
        """What is missing to compile an op of DeepSpeed for the GPU."""
        home = self.environ.get("CUDA_HOME") or self.environ.get("CUDA_PATH")
        nvcc = Path(home, "bin/nvcc") if home else Path(self.tool("nvcc") or "/usr/local/cuda/bin/nvcc")
        if not nvcc.is_file():
            yield Problem("CUDA_HOME", "the CUDA toolkit (nvcc) is neither there nor on PATH", "install it")
            return
        told = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False).stdout
        found = re.search(r"release (\d+)\.(\d+)", told)
        wanted = _torch_cuda()
        if found is not None and wanted is not None and found[1] != wanted.split(".")[0]:
            yield Problem(
                "CUDA_HOME",
                f"the CUDA toolkit is {found[1]}.{found[2]}, and torch was made with CUDA {wanted}",
                f"install the toolkit of CUDA {wanted}",
            )

    def libaio(self) -> Iterator[Problem]:
        """What is missing to compile DeepSpeed's reads and writes of a disk."""
        flags = self.environ.get("LDFLAGS", "").split()
        folders = [flag[2:] for flag in flags if flag.startswith("-L")]
        folders += self.environ.get("LIBRARY_PATH", "").split(os.pathsep)
        found = any(any(Path(folder).glob("libaio.so*")) for folder in folders if folder)
        library = found or ctypes.util.find_library("aio") is not None
        include = ["/usr/include", "/usr/local/include", *self.environ.get("CPATH", "").split(os.pathsep)]
        include += [flag[2:] for flag in self.environ.get("CFLAGS", "").split() if flag.startswith("-I")]
        header = any(Path(folder, "libaio.h").is_file() for folder in include if folder)
        if not library or not header:
            missing = "libaio.h" if library else "libaio"
            yield Problem("libaio", f"{missing} is not there", "Debian: apt-get install libaio-dev")


def prepare(config: RunConfig) -> RunConfig:
    """Check what ``config`` needs here, compile the ops it uses, and decide which AdamW steps on the host.

    Returns the configuration with ``offload.adam`` decided. Raises ConfigError with what is missing and the ways out.
    """
    host = Host.here()
    problems = [*crowded(config, host)]
    if config.entry.name in TRAINS:
        problems += missing(config, host)
    if problems:
        raise ConfigError(*problems)
    for line in crowding(config, host):
        print(f"warning: {line}", file=sys.stderr)
    if config.entry.name not in TRAINS:
        return config
    config, said = with_adam(config, host)
    for op in ops(config):
        failure = compiled(op)
        if failure is None:
            continue
        if op == CPU_ADAM and config.offload.adam == "deepspeed" and said:
            config = _with(config, "torch")
            said = f"torch's AdamW steps on the host: DeepSpeed's {op} op could not be compiled: {failure}"
            continue
        raise ConfigError(Problem(f"DeepSpeed's {op} op", f"could not be compiled: {failure}", _way_out(op)))
    for line in (said, few_threads(config, os.environ)):
        if line:
            print(f"warning: offload.optimizer: {line}", file=sys.stderr)
    return config


def _ranks_here(config: RunConfig, environ: Mapping[str, str]) -> int:
    return config.launcher.nproc or int(environ.get("LOCAL_WORLD_SIZE") or "1")


def crowded(config: RunConfig, host: Host) -> Iterator[Problem]:
    """More ranks on the CPU than its memory holds, by the least that each takes: itself, weights and what trains them.

    Activations and gradients come on top and are not counted, so what is refused could never run.
    """
    here, free = _ranks_here(config, host.environ), host.memory_bytes
    if host.gpus or here == 1 or free is None:
        return
    one = round(CPU_RANK_BYTES + _kept(config, here * config.launcher.nnodes))
    if here * one > free:
        most = free // one
        yield Problem(
            "launcher.nproc",
            f"{here} ranks on the CPU take at least {report.size(here * one)} of host memory ({report.size(one)} "
            f"each), and {report.size(free)} are free",
            f"launcher.nproc={min(most, host.cores)}" if most else "a smaller model, or a machine with more memory",
        )


def _kept(config: RunConfig, ranks: int) -> int:
    """Bytes of weights, masters and moments of one rank; 0 where they are not known beforehand."""
    serves = config.entry.name in SERVES
    if not serves and not (config.entry.name in TRAINS and shapes.knows(config)):
        return 0
    section = folders.answering(config) if serves else config.model
    if folders.sizes_of(section) is None:
        return 0
    if serves:
        return shapes.elements_of(section) * BYTES[config.precision.dtype]
    return states_of(config, shapes.model_of(config), ranks).kept


def crowding(config: RunConfig, host: Host) -> Iterator[str]:
    """What to say where ranks on the CPU are more than its cores."""
    here = _ranks_here(config, host.environ)
    if host.gpus == 0 and here > host.cores:
        cores = f"{host.cores} core{'s' if host.cores > 1 else ''}"
        yield (
            f"launcher.nproc: {here} ranks on {cores} and no GPU: they take turns, and all wait for the slowest in "
            f"every step. Way out: launcher.nproc={host.cores}"
        )


def few_threads(config: RunConfig, environ: Mapping[str, str]) -> str:
    """What to say where AdamW steps on the host with fewer threads than a rank could have; else nothing.

    Where nobody sets OMP_NUM_THREADS, ranks get cores // ranks (see ``environment``), but torchrun sets it to 1.
    """
    given = config.launcher.env.get("OMP_NUM_THREADS", environ.get("OMP_NUM_THREADS", ""))
    threads = threads_a_rank(_ranks_here(config, environ))
    if config.offload.optimizer is None or passes_gpu(config.offload) or not given.isdigit() or int(given) >= threads:
        return ""
    by_torchrun = " (torchrun sets it where nobody has)" if config.launcher.name == "env" else ""
    return (
        f"AdamW steps on the host with {given} of {threads} threads that a rank could have: OMP_NUM_THREADS={given}"
        f"{by_torchrun}. Way out: OMP_NUM_THREADS={threads} before the command"
    )


def with_adam(config: RunConfig, host: Host) -> tuple[RunConfig, str]:
    """``offload.adam`` decided where it was left open, and what to say about it (nothing where the user chose)."""
    if config.offload.optimizer is None or config.offload.adam is not None:
        return config, ""
    lacking = [*host.compilers()]
    if lacking:
        names = " and ".join(f"{problem.message} ({problem.fix})" for problem in lacking)
        return _with(config, "torch"), (
            f"torch's AdamW steps on the host in place of DeepSpeedCPUAdam, which has to be compiled: {names}. "
            "Ways out: install that; offload.adam=torch takes this one without a warning; offload=none"
        )
    if host.gpus == 0:
        return _with(config, "torch"), (
            "torch's AdamW steps on the host: without a GPU DeepSpeedCPUAdam is not worth minutes of compiling "
            "(offload.adam=deepspeed asks for it)"
        )
    said = "DeepSpeedCPUAdam steps on the host (offload.adam=torch for torch's AdamW)"
    if config.zero.stage < 3:
        said += "; offload.adam=gpu is faster and takes less host memory, where the GPU has room for the gradients"
    return _with(config, "deepspeed"), said


def _with(config: RunConfig, adam: str) -> RunConfig:
    offload = dataclasses.replace(config.offload, adam=adam)  # type: ignore[arg-type]
    return dataclasses.replace(config, offload=offload)


def ops(config: RunConfig) -> list[str]:
    """DeepSpeed's ops that this configuration compiles on first use."""
    found = []
    if config.offload.adam == "deepspeed":
        found.append(CPU_ADAM)
    if "nvme" in (config.offload.optimizer, config.offload.params):
        found.append(ASYNC_IO)
    if config.offload.pin_memory and pinned_by_deepspeed(config.launcher.env) and not passes_gpu(config.offload):
        found.append(PIN_MEMORY)
    if config.zero.zero_quantized_weights or config.zero.zero_quantized_gradients:
        found.append(QUANTIZER)
    return found


def missing(config: RunConfig, host: Host) -> Iterator[Problem]:
    """Everything that this configuration needs and the machine has not, with the ways out."""
    needed = ops(config)
    for op in needed:
        lacking = [*host.compilers()]
        if op == ASYNC_IO:
            lacking += host.libaio()
        if op == QUANTIZER or (op == ASYNC_IO and host.gpus):
            lacking += host.cuda_toolkit()
        for problem in lacking:
            yield Problem(
                _KEYS[op],
                f"needs DeepSpeed's {op} op, which is compiled here, and {problem.message}",
                f"{problem.fix}; else {_way_out(op)}",
            )
    if "cpu" in (config.offload.optimizer, config.offload.params) or config.offload.nvme_path is not None:
        yield from _room(config, host)


_KEYS = {
    CPU_ADAM: "offload.adam",
    PIN_MEMORY: "launcher.env.DS_PIN_MEMORY_BACKEND",
    ASYNC_IO: "offload.nvme_path",
    QUANTIZER: "zero.zero_quantized_weights",
}


def _way_out(op: str) -> str:
    return {
        CPU_ADAM: _WAYS_OUT,
        PIN_MEMORY: "leave out DS_PIN_MEMORY_BACKEND: torch pins",
        ASYNC_IO: "offload=all keeps in host memory what would go to nvme",
        QUANTIZER: "leave out zero.zero_quantized_weights and zero.zero_quantized_gradients",
    }[op]


def _room(config: RunConfig, host: Host) -> Iterator[Problem]:
    """Host memory and disk, for what an offload keeps there of this host's ranks."""
    launcher = config.launcher
    here = _ranks_here(config, host.environ)
    ranks = here * launcher.nnodes if launcher.nproc is not None else int(host.environ["WORLD_SIZE"])
    model = shapes.model_of(config)
    states = states_of(config, model, ranks)
    needed, free = report.on_host(states, here), host.memory_bytes
    # Without a GPU the whole run is in host memory: no offload to be counted.
    if host.gpus and states.host and free is not None and needed > free:
        yield Problem(
            "offload",
            f"needs about {report.size(needed)} of host memory, and {report.size(free)} are free",
            report.host_ways_out(config),
        )
    if config.offload.nvme_path is not None:
        yield from _disk(config.offload.nvme_path, here * states.disk)
        yield from _buffer(config, model, ranks)


def _disk(folder: str, needed: int) -> Iterator[Problem]:
    place = Path(folder)
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield Problem("offload.nvme_path", f"{existing} is no folder that can be written to", "another folder")
        return
    free = shutil.disk_usage(existing).free
    if needed > free:
        yield Problem(
            "offload.nvme_path",
            f"needs about {report.size(needed)} on the disk of {existing}, and {report.size(free)} are free",
            "another disk, or offload=all",
        )


def _buffer(config: RunConfig, model: shapes.Model, ranks: int) -> Iterator[Problem]:
    """DeepSpeed stops with an assertion in the first forward pass where a parameter's partition outgrows its buffer."""
    size = config.offload.nvme_buffer_size
    largest = max(model.parameters, key=lambda one: one.elements)
    part = math.ceil(largest.elements / ranks)
    if size is not None and part > size:
        yield Problem(
            "offload.nvme_buffer_size",
            f"{size:,} elements, and a rank's part of {largest.name} has {part:,} "
            f"({' x '.join(f'{one:,}' for one in largest.shape)} on {ranks} rank{'s' if ranks > 1 else ''})",
            f"offload.nvme_buffer_size={part}",
        )


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that may be taken: what Linux has available, less where a control group allows less. None: no Linux.

    Both count what files have in memory as free: it is given up when something else needs the place.
    """
    try:
        rows = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:"))
    for group, limit, used, cached in (
        ("sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file")),
        (
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            ("total_active_file", "total_inactive_file"),
        ),
    ):
        folder = root / group
        if not (folder / limit).is_file() or not (folder / limit).read_text().strip().isdigit():
            continue
        allowed, taken = (int((folder / name).read_text()) for name in (limit, used))
        counts = dict(row.split() for row in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        available = min(available, allowed - taken + sum(int(counts[name]) for name in cached))
    return available


def _torch_cuda() -> str | None:
    """CUDA's version that torch was made with, read from its files; None: torch for the CPU."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda(?::[^=]*)? = '([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None


@cache
def compiled(op: str) -> str | None:
    """Compile and load one op in a process of its own; None, or the first error. Seconds where it is compiled already.

    torch keeps what it compiles under TORCH_EXTENSIONS_DIR, and the ranks load it from there.
    """
    environ = {**os.environ, "PATH": tools_path()}
    if gpu_count() == 0:
        environ["DS_ACCELERATOR"] = "cpu"
    print(f"DeepSpeed's {op} op: compiled on first use (minutes), then kept", file=sys.stderr, flush=True)
    words = [sys.executable, "-m", "glmexp.launcher.ops", op]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=log, text=True) as building:
            assert building.stdout is not None
            for line in building.stdout:
                print(f"DeepSpeed's {op} op: {line.strip()}", file=sys.stderr, flush=True)
        log.seek(0)
        lines = log.read().splitlines()
    if building.returncode == 0:
        return None
    errors = [line for line in lines if re.search(r"error|Error", line)]
    return (errors or lines or [f"exit code {building.returncode}"])[0].strip()
