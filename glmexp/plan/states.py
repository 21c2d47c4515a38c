"""Bytes of weights, gradients, masters, moments and buckets that one rank holds: the arithmetic of DeepSpeed 0.19.8.

Every number is that of a tensor that the engine makes (``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py``,
``fp16/unfused_optimizer.py``); tests count those tensors. The scalars that count Adam's steps are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from glmexp.config.derived import GRAD_ACCUM
from glmexp.config.ds_config import gathers_blocks
from glmexp.config.memory import (
    BLOCK_ALIGNMENT,
    BYTES,
    FP8_MULTIPLE,
    GPU_PLACES,
    MASTER,
    MOMENTS,
    exact_pinning,
    passes_gpu,
    passing_bytes,
    power_of_two,
)
from glmexp.config.schema import RunConfig
from glmexp.plan.shapes import HEADS, REST, Model, Parameter

REDUCE_BUCKET, MAX_LIVE, SUB_GROUP, PERSISTENT = 500_000_000, 1_000_000_000, 1_000_000_000, 100_000
"""DeepSpeed's own choices, in elements, where an option is null (``deepspeed/runtime/zero/config.py``)."""
FALLBACK_BUCKET = 500_000_000
"""Elements that stage 0 flattens for one all-reduce (``engine.buffered_allreduce_fallback``)."""
_ALIGNMENT = 2
"""Stages 1 and 2 pad each group to a multiple of this and the ranks (``nccl_start_alignment_factor``)."""


@dataclass(frozen=True)
class States:
    """Bytes of one rank, on its GPU and in host memory. Gradients: as they stand before the optimizer's step."""

    weights: int = 0
    gradients: int = 0
    accumulated: int = 0
    """Gradients of the micro batches before, in the passes after the first of a step."""
    adds_in_place: bool = False
    """What a micro batch adds goes into them (``engine/accumulation.py``); else it stands beside them."""
    masters: int = 0
    moments: int = 0
    passing: int = 0
    """Places on the GPU that masters and moments from the host pass through (``engine/passing.py``)."""
    buckets: int = 0
    """Kept, or there during each backward pass: where gradients are collected to be reduced."""
    bucket_is_kept: bool = False
    """Stage 3 keeps its bucket from the start to the end."""
    gathered: int = 0
    """Stage 3: whole parameters at a time beside their partitions."""
    block: int = 0
    """Of them, where blocks are gathered as one piece: the largest block's."""
    initial: int = 0
    """All that stands at a time while the engine is made."""
    update: int = 0
    """Copies of gradients while the optimizer steps, beside weights, gradients, masters and moments."""
    largest_gradient: int = 0
    """Bytes of the largest trained tensor's gradient, which stands alone before it is put where it belongs."""
    waiting: int = 0
    """Of an output layer's gradient that fits into no bucket: it is added to that of the micro batches before when the
    last block's first gradient comes."""
    on_their_way: int = 0
    """Copies of that gradient on its way to the host, or to the ranks that own it."""
    early: bool = True
    """Gradients have their place from the first ones on; else (they are fewer than a bucket) at the end."""
    host: dict[str, int] = field(default_factory=dict)
    """What an offload keeps in host memory, by name."""
    pinned_rounding: int = 0
    """What torch adds: pinned buffers are rounded up to powers of two, and kept when they are not needed any more."""
    disk: int = 0
    """What an offload keeps on a disk."""

    @property
    def kept(self) -> int:
        """On the GPU between two steps."""
        return self.weights + self.masters + self.moments + self.passing + (self.buckets if self.bucket_is_kept else 0)

    @property
    def host_bytes(self) -> int:
        """In host memory, all of it."""
        return sum(self.host.values()) + self.pinned_rounding


def states_of(config: RunConfig, model: Model, ranks: int, rank: int | None = None) -> States:
    """The states of ``rank`` out of ``ranks``; None: of the one that holds most. At stages 1 and 2 the
    gradient of a tensor that lies in the partitions of two ranks stands whole with both."""
    stage = config.zero.stage
    if stage == 0:
        return _stage0(config, model, ranks)
    return _stage3(config, model, ranks) if stage == 3 else _stages_1_and_2(config, model, ranks, rank)


def low_matrices(config: RunConfig, model: Model) -> list[Parameter]:
    """Frozen matrices of the blocks that are in fp8 (``precision.base``)."""
    if config.precision.base != "fp8":
        return []
    low = [one for one in model.frozen if one.is_matrix and one.layer != REST]
    return [one for one in low if not any(size % FP8_MULTIPLE for size in one.shape)]


def frozen_bytes(config: RunConfig, model: Model) -> int:
    """Bytes of the frozen weights, whole: fp8 with a scale a row, and turned round once more for the backward pass."""
    low = low_matrices(config, model)
    copies = 1 if config.precision.base_transposed is False else 2
    high = sum(one.elements for one in model.frozen) - sum(one.elements for one in low)
    return BYTES[config.precision.dtype] * high + sum(copies * one.elements + 4 * one.shape[0] for one in low)


def _elements(parameters: Sequence[Parameter]) -> int:
    return sum(one.elements for one in parameters)


def _largest(parameters: Sequence[Parameter]) -> int:
    return max((one.elements for one in parameters), default=0)


def _stage0(config: RunConfig, model: Model, ranks: int) -> States:
    element, trained = BYTES[config.precision.dtype], model.trained_elements
    low = element == 2
    # In 16 bit each parameter has a float32 copy, and gradients are copied to float32 for the step.
    reduced = min(trained, max(FALLBACK_BUCKET, _largest(model.trained)))
    return States(
        weights=frozen_bytes(config, model) + element * trained,
        gradients=element * trained,
        masters=MASTER * trained if low else 0,
        moments=MOMENTS * trained,
        update=max(4 * trained if low else 0, element * reduced if ranks > 1 else 0),
        # The wrapper's step with zero gradients allocates the moments.
        initial=element * model.elements + (MASTER + MOMENTS + 4 + element) * trained * low,
        largest_gradient=element * _largest(model.trained),
    )


def _stages_1_and_2(config: RunConfig, model: Model, ranks: int, rank: int | None) -> States:
    element, zero = BYTES[config.precision.dtype], config.zero
    groups = [_Flat(group, ranks) for group in model.groups(zero.stage, passes_gpu(config.offload))]
    parts = [group.part for group in groups]
    by_rank = [
        [one for group in groups for one in group.of(each)] for each in (range(ranks) if rank is None else [rank])
    ]
    mine = max(by_rank, key=_elements)
    own = _elements(mine)
    accumulates = (config.train.grad_accum or GRAD_ACCUM) > 1
    weights = frozen_bytes(config, model) + element * sum(group.padded for group in groups)
    passing = passes_gpu(config.offload)
    offloaded = config.offload.optimizer is not None and not passing
    bucket = element * (zero.reduce_bucket_size or REDUCE_BUCKET)
    contiguous = zero.contiguous_gradients is not False or offloaded
    largest = element * _largest(model.trained)
    # Stage 1 reduces once a step: until then each gradient is whole.
    more = element * (own if zero.stage == 2 else model.trained_elements) if accumulates and not offloaded else 0
    heads = [one for one in model.trained if one.layer == REST and one.module in HEADS]
    in_place = contiguous and zero.stage == 2
    alone = in_place and more and _largest(heads) > (zero.reduce_bucket_size or REDUCE_BUCKET)
    common = {
        "accumulated": more,
        "adds_in_place": in_place,
        "waiting": element * _largest(heads) if alone else 0,
        "weights": weights,
        "buckets": bucket * (2 if zero.overlap_comm else 1) if contiguous else 0,
        "largest_gradient": largest,
        "early": model.trained_elements > (zero.reduce_bucket_size or REDUCE_BUCKET),
    }
    if not offloaded:
        places = min(config.offload.gpu_places or GPU_PLACES, len(parts))
        room = places * max(map(passing_bytes, parts), default=0)
        # The group's gradients are flattened, then taken to float32.
        return States(
            **common,  # type: ignore[arg-type]
            gradients=element * own,
            masters=0 if passing else MASTER * sum(parts),
            moments=0 if passing else MOMENTS * sum(parts),
            passing=room if passing else 0,
            host={"masters and moments": sum(map(passing_bytes, parts))} if passing else {},
            update=max(((element + 4 if element == 2 else 4) * part for part in parts), default=0),
            # Float32 gradients of everything stand there for a moment, but for states that pass through.
            initial=weights + MASTER * sum(parts) + 2 * element * (max(parts, default=0) if passing else sum(parts)),
        )
    buffers = [size * part for part in parts for size in (MASTER, 4, element)] + [largest]
    host = {
        "masters": MASTER * sum(parts),
        "gradients": 4 * sum(parts),
        "moments": MOMENTS * sum(parts),
        "weights on their way": element * sum(parts) + largest,
    }
    if accumulates and zero.stage == 2:
        host["gradients so far"] = element * own
        buffers += [element * one.elements for one in mine]
    return States(
        **common,  # type: ignore[arg-type]
        gradients=largest,  # a buffer on the GPU through which gradients of several micro batches are added
        on_their_way=2 * largest + 4 * _largest(model.trained),
        initial=weights + largest,
        host=host,
        pinned_rounding=_rounding(config, buffers),
    )


def _stage3(config: RunConfig, model: Model, ranks: int) -> States:
    element, zero, offload = BYTES[config.precision.dtype], config.zero, config.offload
    part = {one.name: -(-one.elements // ranks) for one in model.parameters}
    trained = sum(part[one.name] for one in model.trained)
    frozen = sum(part[one.name] for one in model.frozen)
    # One rank's whole parameters are views of their partitions where those are on the GPU, and copies where they are on
    # the host (``partition_parameters.py``, NoGatherHandle); several ranks gather them, with the padding.
    # Trained ones are copies on one rank too, where blocks are gathered as one piece.
    blocks, fetches = gathers_blocks(config), ranks > 1 or offload.params is not None
    whole = _persistent(config, model) if blocks or fetches else []
    persistent = element * sum(ranks * part[one.name] for one in whole if fetches or one.trained)
    subgroups = [*_subgroups(config, model, part)]
    largest = element * _largest(model.trained)
    contiguous = zero.contiguous_gradients is not False
    bucket = element * (zero.reduce_bucket_size or REDUCE_BUCKET) if contiguous else 0
    names = {one.name for one in whole}
    fetched = [one for one in model.parameters if one.name not in names and (not blocks or one.layer == REST)]
    live = min(sum(one.elements for one in fetched), zero.stage3_max_live_parameters or MAX_LIVE)
    gathered = element * max(live, _largest(fetched)) * fetches
    block = _block(model, names, part, ranks, element) if blocks else 0
    gathered += 2 * block  # one computes, and the one after it is on its way
    on_gpu = offload.params is None
    weights = (element * (trained + frozen) if on_gpu else 0) + persistent
    host: dict[str, int] = {}
    buffers: list[int] = []
    left = 0
    if not on_gpu and offload.params == "cpu":
        host["weights"] = element * (trained + frozen)
        buffers += [element * part[one.name] for one in model.frozen]
        buffers += [element * sum(part[one.name] for one in group) for group in model.groups(3)]
        if offload.pin_memory:
            # Trained weights move into one buffer; the pinned memory that they leave stays with torch.
            left += sum(power_of_two(element * part[one.name]) for one in model.trained)
    disk = element * (trained + frozen) if offload.params == "nvme" else 0
    shared = {
        "weights": weights,
        "buckets": bucket,
        "bucket_is_kept": True,
        "gathered": gathered,
        "block": block,
        "largest_gradient": largest,
    }
    if offload.optimizer is None:
        return States(
            **shared,  # type: ignore[arg-type]
            gradients=element * trained,
            masters=MASTER * trained,
            moments=MOMENTS * trained,
            update=(element + 4 if element == 2 else 4) * max(subgroups, default=0),
            initial=weights + MASTER * trained + max(4 * max(subgroups, default=0), bucket + element * trained + block),
            host=host,
            pinned_rounding=_rounding(config, buffers) + left,
            disk=disk,
        )
    host["gradients"] = (4 + element) * trained
    buffers += [4 * size for size in subgroups] + [element * trained]
    if offload.optimizer == "cpu":
        host |= {"masters": MASTER * trained, "moments": MOMENTS * trained}
    else:
        disk += (MASTER + MOMENTS) * trained
    return States(
        **shared,  # type: ignore[arg-type]
        gradients=0,
        initial=weights + bucket + (largest if on_gpu else 2 * element * _largest(model.parameters)),
        on_their_way=3 * largest,
        host=host,
        pinned_rounding=_rounding(config, buffers) + left,
        disk=disk,
    )


def _block(model: Model, kept: set[str], part: dict[str, int], ranks: int, element: int) -> int:
    """Bytes of the largest block's memory while it is gathered (``engine/whole_blocks.py``)."""
    sizes = [0] * model.network.layers
    for one in model.parameters:
        if one.layer != REST and one.name not in kept:
            sizes[one.layer] += -(-element * ranks * part[one.name] // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
    return max(sizes)


def _persistent(config: RunConfig, model: Model) -> list[Parameter]:
    """Parameters that stay whole: ``DeepSpeedZeRoOffload.mark_persistent_parameters``."""
    zero = config.zero
    each = PERSISTENT if zero.stage3_param_persistence_threshold is None else zero.stage3_param_persistence_threshold
    most = sys.maxsize if zero.stage3_model_persistence_threshold is None else zero.stage3_model_persistence_threshold
    found, total = [], 0
    for one in model.parameters:
        if one.elements + total <= most and one.elements <= each:
            found.append(one)
            total += one.elements
    return found


def _subgroups(config: RunConfig, model: Model, part: dict[str, int]) -> Iterator[int]:
    """Elements that the optimizer updates at a time (``stage3.py``, ``_create_fp16_sub_groups``)."""
    limit = config.zero.sub_group_size or SUB_GROUP
    for group in model.groups(3):
        total = sum(part[one.name] for one in group)
        if limit >= total:
            yield total
            continue
        size = 0
        for number, one in enumerate(group, start=1):
            size += part[one.name]
            if size >= limit or number == len(group):
                yield size
                size = 0


def _rounding(config: RunConfig, buffers: Sequence[int]) -> int:
    if not config.offload.pin_memory or exact_pinning(config.launcher.env):
        return 0
    return sum(power_of_two(size) - size for size in buffers)


class _Flat:
    """A group of parameters in one flat buffer, cut into equal parts (stages 1 and 2)."""

    def __init__(self, parameters: Sequence[Parameter], ranks: int) -> None:
        self.parameters, self.ranks = parameters, ranks
        step = _ALIGNMENT * ranks
        self.padded = -(-sum(one.elements for one in parameters) // step) * step
        self.part = self.padded // ranks

    def of(self, rank: int) -> list[Parameter]:
        """Parameters of which a part lies with ``rank``."""
        first, last = rank * self.part, (rank + 1) * self.part
        found, start = [], 0
        for one in self.parameters:
            if start < last and start + one.elements > first:
                found.append(one)
            start += one.elements
        return found
