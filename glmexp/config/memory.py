"""What bytes are counted with: sizes of elements, the optimizer's groups, how host memory is pinned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from glmexp.config.schema import OffloadSection

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of an element, by ``precision.dtype``."""
MASTER, MOMENTS = 4, 8
"""Bytes an element: float32 master, Adam's two moments."""
FP8_MULTIPLE = 16
"""Both sizes of a weight in fp8 are multiples of it (torch._scaled_mm)."""
BLOCK_ALIGNMENT = 256
"""Bytes to a multiple of which each weight of a block is padded while it is whole (``engine/whole_blocks.py``), as
torch's allocator does."""
EXACT_PINNING = "pinned_max_round_threshold_mb:1024,pinned_max_cached_size_mb:1024"
"""Setting of torch's allocator (in 2.13, not in 2.11): pinned buffers above 1 GiB are as large as asked for and, as
that demands, not kept."""
GROUP_ELEMENTS = 2**29
"""Most elements of an optimizer group, unless one tensor has more. DeepSpeed's step takes a float32 copy of one group's
gradients at a time: with all weights in one group that is 23 GiB for 6 B parameters, and it is 2 GiB with these. Copies
to and from the host go on beside the next group's step."""
PASSING_ELEMENTS = 2**28
"""The same where states pass through the GPU."""
GPU_PLACES = 4
"""Groups whose states have room on the GPU at a time there, where ``offload.gpu_places`` is null."""


def passes_gpu(offload: OffloadSection) -> bool:
    """Optimizer states are kept on the host and pass through the GPU for their step (``engine/passing.py``)."""
    return offload.optimizer is not None and offload.adam == "gpu"


def passing_bytes(elements: int) -> int:
    """Of a group's part on one rank, on the host as on the GPU: master and moments, each on a 128-byte boundary."""
    return (MASTER + MOMENTS) * (-(-elements // 32) * 32)


def split(sizes: Sequence[int], stage: int, passing: bool = False) -> list[list[int]]:
    """Places of tensors of these sizes, in order, in groups of at most GROUP_ELEMENTS elements or one tensor; of
    PASSING_ELEMENTS where states pass through the GPU.

    At stage 3 all are one group: DeepSpeed makes its own of ``zero.sub_group_size`` elements.
    """
    most = PASSING_ELEMENTS if passing else GROUP_ELEMENTS
    if stage == 3:
        return [[*range(len(sizes))]] if sizes else []
    groups: list[list[int]] = []
    filled = 0
    for place, size in enumerate(sizes):
        if not groups or filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(place)
        filled += size
    return groups


def pinned_by_deepspeed(variables: Mapping[str, str]) -> bool:
    """Whether DeepSpeed (0.19) locks host memory itself (``deepspeed/utils/pin_memory.py``), with an op of its own."""
    return variables.get("DS_PIN_MEMORY_BACKEND", "").lower() == "native"


def exact_pinning(variables: Mapping[str, str]) -> bool:
    """Whether torch (2.13) is told not to round large pinned buffers up, or DeepSpeed pins, which does not."""
    if pinned_by_deepspeed(variables):
        return True
    settings = (variables.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any(EXACT_PINNING.partition(":")[0] in setting for setting in settings)


def power_of_two(number: int) -> int:
    """The least power of two that is at least ``number``; 0 stays."""
    return 1 << (number - 1).bit_length() if number else 0
