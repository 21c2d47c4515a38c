"""Who started this process, and how many ranks a machine is good for. Nothing heavy: read from the environment."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glmexp.config.errors import ConfigError, Problem

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_DERIVED_PORTS = range(15_000, 32_000)
"""Below the ports that Linux hands out by itself (32768 and up)."""


@dataclass(frozen=True)
class Outside:
    """This process is one rank of an outside launcher: torchrun, deepspeed, accelerate, srun, mpirun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this machine; 0 where the launcher does not tell."""
    master_addr: str
    master_port: int

    def export(self, environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
        """Set the variables that torch, DeepSpeed and transformers read."""
        environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }
        if self.local_world_size:
            environ["LOCAL_WORLD_SIZE"] = str(self.local_world_size)


def outside_ranks(environ: Mapping[str, str] = os.environ) -> Outside | None:
    """The rank that an outside launcher gave to this process, or None.

    torchrun, deepspeed and accelerate set five variables, and all five make a rank. Else it may be one of several
    processes of Open MPI's mpirun or of Slurm's srun: a single one of those starts ranks of its own.
    """
    if all(name in environ for name in _RANK_VARIABLES):
        return Outside(
            int(environ["RANK"]),
            int(environ["WORLD_SIZE"]),
            int(environ["LOCAL_RANK"]),
            int(environ.get("LOCAL_WORLD_SIZE") or 0),
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
        )
    return _of_mpi(environ) or _of_slurm(environ)


def _of_mpi(environ: Mapping[str, str]) -> Outside | None:
    """Open MPI (also through ``deepspeed --launcher openmpi``), MPICH and Intel MPI with their own variables."""
    found = [names for names in _MPI if names[0] in environ and names[2] in environ]
    if not found or int(environ.get(found[0][1], "1")) < 2:
        return None
    rank, size, local_rank, local_size = found[0]
    world, local = int(environ[size]), int(environ.get(local_size, "0"))
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if local == world else None)
    if address is None:
        raise ConfigError(
            Problem(
                "MASTER_ADDR",
                f"is not set, and the {world} ranks of mpirun are on several machines",
                "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..., rank 0's host (MPICH: -genv MASTER_ADDR HOST)",
            )
        )
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
    port = int(environ.get("MASTER_PORT") or _port("mpi", job))
    return Outside(int(environ[rank]), world, int(environ[local_rank]), local, address, port)


def _of_slurm(environ: Mapping[str, str]) -> Outside | None:
    """A task of a job step with several tasks. The batch script itself and an interactive shell have one."""
    several = int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environ
    return slurm_task(environ) if several else None


def slurm_task(environ: Mapping[str, str] = os.environ) -> Outside:
    """The rank that a task of a Slurm job step is."""
    world = int(environ["SLURM_STEP_NUM_TASKS"])
    alone = environ.get("SLURM_STEP_NUM_NODES") == "1"
    first = "127.0.0.1" if alone else first_host(environ["SLURM_STEP_NODELIST"])
    address = environ.get("MASTER_ADDR") or first
    port = int(environ.get("MASTER_PORT") or _port(environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"]))
    local = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return Outside(
        int(environ["SLURM_PROCID"]),
        world,
        int(environ["SLURM_LOCALID"]),
        int(local[0]) if local else 0,
        address,
        port,
    )


def first_host(hosts: str) -> str:
    """The first name of Slurm's list of hosts: ``gpu[03-07,12],login1`` is ``gpu03``."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", hosts)
    assert found is not None, f"no list of hosts: {hosts!r}"
    return found[1] + (found[2] or "") + (found[3] or "")


def _port(*words: str) -> int:
    """The same port for all ranks of a job without asking anybody; another one for another job."""
    return _DERIVED_PORTS[zlib.crc32(".".join(words).encode()) % len(_DERIVED_PORTS)]


def gpu_count(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """GPUs that a process may use: NVIDIA's device files, cut down by CUDA_VISIBLE_DEVICES. Costs no CUDA context."""
    present = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # CUDA stops reading at the first index that it does not know; -1 is the usual way to say "none".
    chosen = [part for part in visible.split(",") if part.strip() and not part.strip().startswith("-")]
    return min(present, len(chosen))


def core_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
