"""Rules about how ranks are started: one machine, several, a Slurm job (see ``rules``)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from glmexp.config.errors import Problem
from glmexp.config.facts import Facts
from glmexp.config.schema import RunConfig

TIME_LIMIT = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")
"""What sbatch --time takes: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
NODE_KEYS = ("node_rank", "master_addr", "master_port")

ALONE = ("inspect", "export")
"""Entries that one process does: nothing is trained."""


def talks(config: RunConfig) -> bool:
    """entry=generate at the terminal, or with the lines of a pipe."""
    return config.entry.name == "generate" and config.generate.prompts_file is None


def one_process(config: RunConfig) -> bool:
    """The process of the command line does it all, so that a chat has its terminal."""
    return config.launcher.name == "inprocess" or config.entry.name in ALONE or talks(config)


def ranks(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """How many ranks one machine can have."""
    launcher = config.launcher
    if launcher.name == "inprocess" and launcher.nproc not in (None, 1):
        yield Problem("launcher.nproc", f"launcher=inprocess is one rank, not {launcher.nproc}", "launcher=local")
    here = launcher.name in ("local", "slurm") and config.entry.name != "plan"  # which plans for other machines too
    if here and launcher.nproc is not None and 0 < facts.gpus < launcher.nproc:
        yield Problem(
            "launcher.nproc",
            f"{launcher.nproc} ranks on {facts.gpus} GPU{'s' if facts.gpus > 1 else ''}: each rank needs its own",
            f"launcher.nproc={facts.gpus}, or "
            + ("slurm.gpus_per_node" if launcher.name == "slurm" else "CUDA_VISIBLE_DEVICES= for a run on the CPU"),
        )


def nodes(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Several machines, started by hand on each of them."""
    launcher = config.launcher
    if launcher.name == "inprocess" and launcher.nnodes > 1:
        yield Problem(
            "launcher.nnodes", f"launcher=inprocess is one rank, not {launcher.nnodes} nodes", "launcher=local"
        )
        return
    if launcher.name != "local":
        for name in (key for key in NODE_KEYS if f"launcher.{key}" in facts.explicit):
            yield Problem(f"launcher.{name}", f"without effect with launcher={launcher.name}", "launcher=local")
        return
    if launcher.nnodes == 1:
        if launcher.node_rank not in (None, 0):
            yield Problem("launcher.node_rank", f"{launcher.node_rank} of launcher.nnodes=1", "launcher.nnodes=2")
        if launcher.master_addr is not None:
            yield Problem("launcher.master_addr", "without effect on a single machine", "launcher.nnodes=2")
        return
    if config.entry.name == "plan":  # it starts no rank: which machine this one is does not matter
        return
    if launcher.node_rank is None or launcher.node_rank >= launcher.nnodes:
        what = "is null" if launcher.node_rank is None else f"{launcher.node_rank} is too high"
        last = launcher.nnodes - 1
        yield Problem(
            "launcher.node_rank", f"{what}, with launcher.nnodes={launcher.nnodes}", f"a number from 0 to {last}"
        )
    if launcher.master_addr is None:
        yield Problem(
            "launcher.master_addr",
            f"is null, with launcher.nnodes={launcher.nnodes}",
            "the name or address of node 0, the same on every node (`hostname -I` there tells it)",
        )


def slurm(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """The job that launcher=slurm submits."""
    job, launcher = config.slurm, config.launcher
    if launcher.name != "slurm":
        for key in sorted(key for key in facts.explicit if key.startswith("slurm.") and launcher.name != "env"):
            yield Problem(key, f"without effect with launcher={launcher.name}", "launcher=slurm")
        return
    if job.time_limit is not None and not TIME_LIMIT.fullmatch(job.time_limit):
        yield Problem(
            "slurm.time_limit",
            f"{job.time_limit!r} is no duration",
            "minutes, hours:minutes:seconds or days-hours:minutes:seconds: slurm.time_limit='2:00:00'",
        )
    if job.signal_s is not None and job.time_limit is None:
        yield Problem("slurm.signal_s", "without slurm.time_limit no end is known", "slurm.time_limit=60")
