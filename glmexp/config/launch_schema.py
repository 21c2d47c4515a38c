"""The sections that say how and where ranks are started (see ``schema``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from glmexp.config.bounds import Bound, Count, Port, Seconds


@dataclass
class LauncherSection:
    """How ranks are started."""

    name: Literal["local", "inprocess", "env", "slurm"]
    """local: own processes; inprocess: this one; slurm: a job; env: an outside launcher's ranks (found by itself)."""
    nproc: Count | None
    """Ranks on each machine. Null: the number of GPUs, else 1."""
    nnodes: Count
    """Machines (nodes). With launcher=local the same command runs on each of them, each with its own node_rank."""
    node_rank: Annotated[int, Bound(low=0)] | None
    """Which of the nnodes machines this one is, from 0. Null: the only one."""
    master_addr: str | None
    """Name or address under which the other machines reach node 0. Null: a single machine needs none."""
    master_port: Port | None
    """Port on node 0 for the rendezvous. Null: a free one on a single machine, 29500 with several."""
    timeout_s: Seconds
    """Seconds that a rendezvous or a collective may wait."""
    slots: Count | None
    """In a sweep: trials that run at a time, each on GPUs (or CPU cores) of its own. Null: one after another."""
    watch_s: Seconds | None
    """Seconds without progress after which the rank that holds up the others is named. Null: never."""
    env: dict[str, str]
    """Environment variables for the ranks, such as NCCL_*; recorded in environment.json."""


@dataclass
class SlurmSection:
    """The job that launcher=slurm submits: launcher.nnodes nodes with launcher.nproc tasks on each."""

    partition: str | None
    """Partition (queue) of the job. Null: the cluster's default."""
    account: str | None
    """Account that the job is charged to. Null: the user's default."""
    qos: str | None
    """Quality of service. Null: the default."""
    time_limit: str | None
    """Longest duration, as sbatch takes it: minutes, or [days-]hours:minutes:seconds. Null: the partition's."""
    gpus_per_node: Count | None
    """GPUs on each node. Null: none; launcher.nproc is by default as many."""
    cpus_per_rank: Count | None
    """CPU cores for each rank. Null: the cluster's default."""
    memory: str | None
    """Host memory of each node, as sbatch takes it, such as 64G. Null: the cluster's default."""
    signal_s: Count | None
    """Seconds before the time limit at which every rank gets SIGUSR1. Null: no such signal."""
    extra: list[str]
    """Further arguments of sbatch, such as --constraint=h200."""
    setup: list[str]
    """Shell lines that the job runs before the ranks start, such as module load cuda."""
    wait: bool
    """Wait for the job and end with its exit code. False: return as soon as it is submitted."""
