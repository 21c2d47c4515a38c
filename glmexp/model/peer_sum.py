"""Sums over the ranks of tensor parallel inference: operators of their own, which torch.compile leaves whole.

A token's hidden states are 8 KB: what a sum of them costs is waiting and launches, not bytes. Where each GPU can write
to the others' memory, one kernel of our own (``peer_kernel``) sums, adds the residual and makes the norm; elsewhere the
process group sums (NCCL, gloo). ``connect`` finds out and tries it, and says which it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glmexp.model.step_ops import HAS_TRITON

MOST_ROWS = 64
"""Tokens of one call; a prompt has more of them, and those sums are work for NCCL."""
MOST_RANKS = 8
TRIAL_NS = 20_000_000_000
"""How long a rank waits on trial for the others, which may still be compiling; then NCCL sums."""


class PeerMemory:
    """Memory of every rank that all ranks write to, and the kernel that does."""

    def __init__(self, addresses: list[int], rank: int, width: int, dtype: torch.dtype) -> None:
        """``addresses``: where this process finds each rank's memory, ``size_of`` int64 that are 0 before the first
        call. ``width``: of a row of numbers of ``dtype``."""
        from glmexp.model import peer_kernel

        self.kernel, self.width, self.dtype = peer_kernel.sum_rows, width, dtype
        self.rank, self.ranks = rank, len(addresses)
        self.words = width // 4
        self.block = 1 << (self.words - 1).bit_length()
        self.warps = max(1, min(32, self.block // 32))
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self.calls = torch.zeros(MOST_ROWS, dtype=torch.int32, device=self.device)
        self.limit_ns = TRIAL_NS
        """How long a rank waits for the others where it is no trial; then its process fails."""
        self.owner: Any = None
        """Keeps the memory."""

    @staticmethod
    def size_of(width: int, ranks: int) -> int:
        """int64 of each rank: two buffers, a row's words twice as long as they are, from each rank."""
        return 2 * MOST_ROWS * ranks * (width // 4) * 2

    def takes(self, part: Tensor) -> bool:
        """Whether the kernel sums ``part`` (..., width): the same answer on all ranks."""
        rows = part.numel() // self.width
        return part.shape[-1] == self.width and part.dtype == self.dtype and 0 < rows <= MOST_ROWS and part.is_cuda

    def sum(
        self, part: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float = 0.0, trial: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``part`` (..., width) of all ranks + ``residual``, and its RMSNorm with ``weight``; without one, it twice."""
        part = part.contiguous()
        total = torch.empty_like(part)
        normed = total if weight is None else torch.empty_like(part)
        self.kernel[(part.numel() // self.width,)](
            part, part if residual is None else residual.contiguous(), part if weight is None else weight, total,
            normed, self.addresses, self.calls, epsilon, TRIAL_NS if trial else self.limit_ns, RANK=self.rank,
            RANKS=self.ranks, MOST_ROWS=MOST_ROWS, WORDS=self.words, BLOCK=self.block,
            RESIDUAL=residual is not None, NORM=weight is not None, TRIAL=trial, num_warps=self.warps,
        )  # fmt: skip
        return total, normed

    def is_right(self) -> bool:
        """A trial on random numbers: what the kernel gives is what the process group gives, rounded once. Collective;
        over with the first round that is wrong or late on any rank."""
        chance = torch.Generator(self.device).manual_seed(1 + self.rank)
        step = 2 * torch.finfo(self.dtype).eps
        # Some rows are called more often than others; at last many calls one upon the other, as in a graph.
        for rows, calls in ((1, 1), (3, 1), (MOST_ROWS, 1), (1, MOST_ROWS)):
            shape = (2, calls, rows, self.width)
            parts, residuals = torch.randn(shape, generator=chance, device=self.device, dtype=self.dtype)
            dist.broadcast(residuals, 0)
            weight = residuals[0, 0].clone()
            found = _agreed(partial(self._trial, parts, residuals, weight))
            if found is None:
                return False
            total, normed = (torch.stack(tensors) for tensors in zip(*found, strict=True))
            exact = parts.float()
            dist.all_reduce(exact)
            exact += residuals.float()
            right = torch.allclose(total.float(), exact, rtol=step, atol=step)
            norm = rms_norm(total, weight, 1e-5)
            right &= torch.allclose(normed.float(), norm.float(), rtol=step, atol=step)
            if not _all(right):
                return False
        return True

    def _trial(self, parts: Tensor, residuals: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        """``sum`` of each call's rows. The first one compiles, which may fail on one rank alone."""
        pairs = zip(parts, residuals, strict=True)
        return [self.sum(part, residual, weight, 1e-5, trial=True) for part, residual in pairs]


memory: PeerMemory | None = None
"""None: the process group sums."""
_why = ""


def connect(width: int, dtype: torch.dtype, device: torch.device, limit_s: float, wanted: bool = True) -> None:
    """Find out how sums of ``width`` numbers go over the ranks from now on. Collective.

    Each step is taken by all ranks or by none, and the kernel of the trial waits for a limited time; later one waits
    ``limit_s`` seconds for the others, as a collective of the process group does. Symmetric memory is torch's, without
    NVLink multicast.
    """
    global memory, _why
    define()
    memory, _why = None, _hindrance(width, dtype, device) if wanted else "placement.peer_sums=false"
    if not _all(not _why):
        _why = _why or "another rank cannot"
        return
    # Nothing here multicasts, and setting it up touches the switch that the machine's other GPUs share.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    import torch.distributed._symmetric_memory as symmetric

    rank, size = dist.get_rank(), PeerMemory.size_of(width, dist.get_world_size())
    own = _agreed(lambda: symmetric.empty(size, dtype=torch.int64, device=device).zero_())
    if own is None:
        return
    torch.cuda.synchronize()
    handle = _agreed(lambda: symmetric.rendezvous(own, dist.group.WORLD))  # type: ignore[arg-type]  # there is one
    if handle is None:
        return
    offset = own.data_ptr() - handle.buffer_ptrs[rank]
    found = _agreed(lambda: PeerMemory([at + offset for at in handle.buffer_ptrs], rank, width, dtype))
    if found is None or not _agreed(found.is_right):
        _why = _why or "sums through the other GPUs' memory were wrong or late in a trial"
        return
    found.owner, found.limit_ns = (own, handle), int(1e9 * limit_s)
    memory = found


def _agreed(step: Callable[[], Any]) -> Any:
    """What ``step`` gives, if it gives something true on every rank; else None, and why in ``_why``."""
    global _why
    found = None
    try:
        found = step()
    except Exception as error:  # noqa: BLE001 - whatever this machine lacks, NCCL is there
        _why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    passed = isinstance(found, Tensor) or bool(found)
    if _all(passed):
        return found
    if passed:
        _why = "another rank cannot"
    return None


def words() -> str:
    """How sums go over the ranks."""
    if memory is not None:
        return "sums by one kernel through the other GPUs' memory"
    return f"sums by {'NCCL' if torch.cuda.is_available() else 'gloo'} ({_why})"


def _hindrance(width: int, dtype: torch.dtype, device: torch.device) -> str:
    """Why the kernel does not apply, as far as that can be told without trying; empty where nothing does."""
    if device.type != "cuda":
        return "no GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{str(dtype).removeprefix('torch.')} is not 16 bit"
    if not HAS_TRITON:
        return "no Triton"
    if width % 4:
        return f"{width} numbers are not whole words"
    if not 1 < dist.get_world_size() <= MOST_RANKS:
        return f"{dist.get_world_size()} ranks"
    if torch.cuda.device_count() < dist.get_world_size():
        return "GPUs that this process does not see"
    others = [rank for rank in range(dist.get_world_size()) if rank != device.index]  # one machine: ranks are GPUs
    if not all(torch.cuda.can_device_access_peer(device.index, other) for other in others):
        return "a GPU cannot reach another's memory"
    return ""


def _all(mine: bool) -> bool:
    """Whether it is so on every rank. Collective."""
    place = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    verdict = torch.tensor(int(mine), device=place)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict)


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As ``chatglm2.RMSNorm``: float32 inside, the product with the weight before the cast."""
    exact = states.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + epsilon)
    return (weight * exact).to(states.dtype)


def define() -> None:
    """``torch.ops.glmexp.sum_over_ranks`` and ``sum_and_norm``."""
    if hasattr(torch.ops.glmexp, "sum_over_ranks"):
        return

    @torch.library.custom_op("glmexp::sum_over_ranks", mutates_args=())
    def sum_over_ranks(part: Tensor, residual: Tensor | None) -> Tensor:
        if memory is not None and memory.takes(part):
            return memory.sum(part, residual, None)[0]
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total if residual is None else total.add_(residual)

    @sum_over_ranks.register_fake
    def _(part: Tensor, residual: Tensor | None) -> Tensor:
        return torch.empty_like(part, memory_format=torch.contiguous_format)

    @torch.library.custom_op("glmexp::sum_and_norm", mutates_args=())
    def sum_and_norm(part: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        if memory is not None and memory.takes(part):
            return memory.sum(part, residual, weight, epsilon)
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        total.add_(residual)
        return total, rms_norm(total, weight, epsilon)

    @sum_and_norm.register_fake
    def _(part: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        whole: Any = torch.contiguous_format
        return torch.empty_like(part, memory_format=whole), torch.empty_like(part, memory_format=whole)
