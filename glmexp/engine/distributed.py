"""The process group of a run, and the few sums that go over it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def device() -> torch.device:
    """This rank's device: its GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def to_device(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch on this rank's device; what is no tensor stays. Page-locked tensors are copied without a wait."""
    place = device()
    return {
        name: value.to(place, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def join(timeout_s: float, store: dist.Store) -> None:
    """Join the process group over ``store`` and hand it to DeepSpeed.

    A collective that waits longer than ``timeout_s`` fails. Objects go over gloo, tensors over NCCL where there are
    GPUs.
    """
    import deepspeed
    from deepspeed.comm import comm

    avoid_op_builds()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(device())
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
        device_id=device() if on_gpu else None,
    )
    deepspeed.init_distributed(
        dist_backend="nccl" if on_gpu else "gloo", dist_init_required=False, auto_mpi_discovery=False
    )
    # DeepSpeed makes groups of its own for gradients and parameters, and names no time limit for them: torch's
    # default, half an hour, would hold.
    limit = timedelta(seconds=timeout_s)
    comm.cdb.new_group = lambda ranks: dist.new_group(ranks, timeout=limit)


def be_deterministic() -> None:
    """The same bits from the same run: torch's deterministic kernels, errors where an operation has none.

    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  it is a property there
    torch.backends.cudnn.benchmark = False


def avoid_op_builds() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce (47 s, needs a compiler) for tensor-parallel
    inference.

    The table of compatible ops is a cached module attribute that may be edited (``deepspeed/ops/__init__.py``).
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def leave() -> None:
    """Leave the process group; nothing collective may follow."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """This process's rank; 0 outside of a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 outside of a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(values: list[float]) -> list[float]:
    """Element-wise sum in float64, on every rank."""
    return _over_ranks(values, dist.ReduceOp.SUM)


def max_over_ranks(values: list[float]) -> list[float]:
    """Element-wise maximum in float64, on every rank."""
    return _over_ranks(values, dist.ReduceOp.MAX)


def _over_ranks(values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    if world_size() == 1:
        return values
    together = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(together, op=operation)
    return together.tolist()


def all_rows(values: list[float]) -> list[list[float]]:
    """Every rank's ``values`` in float64, in rank order, on every rank."""
    if world_size() == 1:
        return [values]
    own = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(rows, own)
    return [row.tolist() for row in rows]


def gather_to_first(value: Any) -> list[Any] | None:
    """All ranks' values on rank 0, in rank order; None on the others."""
    if world_size() == 1:
        return [value]
    parts: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, parts, dst=0)
    return parts


def gather_to_all(value: Any) -> list[Any]:
    """All ranks' values on every rank, in rank order."""
    if world_size() == 1:
        return [value]
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, value)
    return parts


def from_first(value: Any) -> Any:
    """Rank 0's value on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()
