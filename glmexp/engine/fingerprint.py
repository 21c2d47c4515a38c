"""A 64-bit sum over a tensor's bits that is the same whole or in ZeRO partitions.

sum_i bits(x_i) * w_i modulo 2^64 with a weight for each position: partitions add their parts up, so nothing has to be
gathered to know that a frozen weight is bit-equal or that a file holds what a rank trained. It finds accidents (a
renamed, moved, zeroed, rounded or foreign tensor), it is no cryptographic hash.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements at a time: what stays in the cache of a CPU, few kernels on a GPU. The sum does not depend on it."""
# Odd 64-bit constant of the golden ratio, as a signed number: products wrap around modulo 2^64.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def of_tensor(tensor: torch.Tensor, offset: int = 0) -> int:
    """Fingerprint of a tensor whose first element has position ``offset`` in the whole parameter."""
    flat = tensor.detach().reshape(-1).contiguous().view(_BITS[tensor.element_size()])
    total = 0
    size = _CHUNK.get(flat.device.type, _CHUNK["cuda"])
    for start in range(0, flat.numel(), size):
        bits = flat[start : start + size].to(torch.int64)
        first = offset + start
        weights = torch.arange(first, first + bits.numel(), device=bits.device, dtype=torch.int64)
        # (i * golden) xor-shifted: neighbouring positions get unrelated weights, and none is 0.
        weights = weights * _GOLDEN
        weights = (weights ^ (weights >> 29)) | 1
        total += int(((bits + 1) * weights).sum())
    return _wrapped(total)


def of_parameters(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, int]:
    """Fingerprint of each parameter. Collective: under ZeRO-3 each rank adds its partition.

    A partition is read from ``ds_tensor``, which the optimizer updates; padding behind the last element is left out.
    """
    names, sums, partitioned = [], [], False
    for name, parameter in parameters:
        names.append(name)
        if hasattr(parameter, "ds_tensor"):
            partitioned = True
            sums.append(_of_partition(parameter))
        else:
            sums.append(of_tensor(parameter))
    if partitioned and dist.is_initialized() and dist.get_world_size() > 1:
        total = torch.tensor(sums, dtype=torch.int64)
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        sums = total.tolist()
    return dict(zip(names, sums, strict=True))


def _of_partition(parameter: Any) -> int:
    # offload.params=nvme: the partition is in a file, and what stands in its place is no part of it.
    on_disk = parameter.ds_tensor.status.name == "NOT_AVAILABLE"
    if on_disk:
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    part = parameter.ds_tensor
    start = part.numel() * (dist.get_rank() if dist.is_initialized() else 0)
    length = max(0, min(part.numel(), parameter.ds_numel - start))
    total = of_tensor(part.reshape(-1)[:length], offset=start) if length else 0
    if on_disk:
        parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])
    return total


def _wrapped(value: int) -> int:
    """``value`` modulo 2^64 as a signed 64-bit number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
