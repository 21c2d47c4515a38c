"""Who started this process, and how many ranks a machine is good for. Nothing heavy: read from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outside:
    """This process is one rank of an outside launcher (torchrun, deepspeed)."""

    rank: int
    world_size: int
    local_rank: int


def outside_ranks(environ: Mapping[str, str] = os.environ) -> Outside | None:
    """The rank that an outside launcher gave to this process, or None. All five variables make a rank."""
    if any(name not in environ for name in _RANK_VARIABLES):
        return None
    return Outside(int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"]))


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
