"""Rules about what DeepSpeed is given: precision, offload and ZeRO's keys (see ``rules``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from glmexp.config.ds_config import gathers_blocks, other_ways
from glmexp.config.entries import PLANS
from glmexp.config.errors import Problem
from glmexp.config.facts import Facts
from glmexp.config.memory import passes_gpu
from glmexp.config.schema import RunConfig

ZERO_STAGES: dict[str, tuple[int, ...]] = {
    "reduce_bucket_size": (1, 2, 3),
    "allgather_bucket_size": (1, 2),
    "overlap_comm": (1, 2, 3),
    "reduce_scatter": (1, 2, 3),
    "contiguous_gradients": (1, 2, 3),
    "round_robin_gradients": (1, 2),
    "use_multi_rank_bucket_allreduce": (1, 2),
    "stage3_prefetch_bucket_size": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_model_persistence_threshold": (3,),
    "stage3_max_live_parameters": (3,),
    "stage3_max_reuse_distance": (3,),
    "sub_group_size": (3,),
    "stage3_module_granularity_threshold": (3,),
    "stage3_use_all_reduce_for_fetch_params": (3,),
    "stage3_allgather_sequential": (3,),
    "memory_efficient_linear": (3,),
    "leaf_modules": (3,),
    "whole_blocks": (3,),
    "zero_hpz_partition_size": (3,),
    "zero_quantized_weights": (3,),
    "zero_quantized_gradients": (3,),
}
"""Key of the zero section to the stages in which DeepSpeed reads it."""
FETCHING = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
"""Keys of the zero section by which DeepSpeed decides when a weight is fetched and released."""
QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")
SCALE_KEYS = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
DYNAMIC_SCALE_KEYS = SCALE_KEYS[1:]
NVME_KEYS: dict[str, tuple[str, ...]] = {
    "nvme_path": ("optimizer", "params"),
    "nvme_buffer_size": ("params",),
    "nvme_buffer_count": ("params",),
    "nvme_max_in_cpu": ("params",),
    "nvme_pipeline_read": ("optimizer",),
    "nvme_pipeline_write": ("optimizer",),
    "aio_block_bytes": ("optimizer", "params"),
    "aio_queue_depth": ("optimizer", "params"),
    "aio_threads": ("optimizer", "params"),
    "aio_single_submit": ("optimizer", "params"),
    "aio_overlap_events": ("optimizer", "params"),
}
"""Key of the offload section to what has to be offloaded to nvme for it to be read."""


def fp16(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """fp16 needs a GPU; only fp16 has a loss scale; a fixed one has no dynamic keys."""
    precision = config.precision
    if precision.dtype == "fp16" and facts.gpus == 0 and config.entry.name not in ("export", "plan", "doctor"):
        yield Problem(
            "precision.dtype",
            "fp16 needs a GPU and this machine has none: DeepSpeed's CPU accelerator refuses fp16",
            "precision=bf16 or precision=fp32",
        )
    if precision.dtype != "bf16" and precision.check_grad_overflow is not None:
        yield Problem(
            "precision.check_grad_overflow",
            f"without effect: the dtype is {precision.dtype}, and only bf16 has the choice",
            "precision.check_grad_overflow=null",
        )
    if precision.dtype != "fp16":
        useless = [f"precision.{key}" for key in SCALE_KEYS if getattr(precision, key) is not None]
        if useless:
            yield Problem(
                useless[0] if len(useless) == 1 else "precision",
                f"{', '.join(useless)}: only fp16 has a loss scale, and the dtype is {precision.dtype}",
                "leave out, or choose precision=fp16",
            )
    elif precision.loss_scale:
        useless = [key for key in (f"precision.{key}" for key in DYNAMIC_SCALE_KEYS) if key in facts.explicit]
        if useless:
            yield Problem(
                useless[0],
                f"{', '.join(useless)} without effect: precision.loss_scale={precision.loss_scale:g} is a fixed scale",
                "precision.loss_scale=0 is the dynamic one",
            )


def fp8(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """A base in fp8 is frozen, whole on each rank and beside bf16; what is written in 16 bit needs it in 16 bit."""
    precision = config.precision
    if precision.base is None:
        if precision.base_transposed is not None:
            yield Problem(
                "precision.base_transposed",
                "without effect: the base is not in fp8",
                "precision.base=fp8, or leave it out",
            )
        return
    if config.entry.name not in (*PLANS, "doctor"):
        if "precision.base" in facts.explicit:
            yield Problem(
                "precision.base",
                f"without effect under entry={config.entry.name}: an artifact brings the format that it was trained on",
                "leave it out",
            )
        return
    if precision.dtype != "bf16":
        yield Problem(
            "precision.base",
            f"fp8 products are written in bf16, and the dtype is {precision.dtype}",
            "precision=bf16, or precision.base=null",
        )
    if config.method.name == "full":
        yield Problem(
            "precision.base", "fp8 without effect: method=full freezes nothing", "method=lora, or leave it out"
        )
    if config.zero.stage == 3:
        yield Problem(
            "precision.base",
            "fp8 weights are not partitioned: ZeRO stage 3 splits the base in bf16 while it is loaded",
            "zero=stage2, or precision.base=null",
        )
    if config.gather.name == "full16":
        yield Problem(
            "gather.name",
            "full16 writes the base from memory, where it is in fp8",
            "gather=trainable, and entry=export merges with the base as it was",
        )


def offload(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """The stage that an offload needs, and keys that need an offload."""
    section, stage = config.offload, config.zero.stage
    if section.params is not None and stage < 3:
        yield Problem(
            "offload.params",
            f"parameter offload needs ZeRO stage 3, and the stage is {stage}: DeepSpeed would ignore it without a word",
            "offload=optimizer, or zero=stage3",
        )
    if section.optimizer is not None and stage == 0:
        yield Problem(
            "offload.optimizer",
            "optimizer offload needs ZeRO stage 1, 2 or 3, and the stage is 0",
            "offload=none, or zero=stage2",
        )
    elif section.optimizer == "nvme" and stage < 3:
        yield Problem(
            "offload.optimizer",
            f"optimizer states on nvme need ZeRO stage 3, and the stage is {stage}",
            "offload=optimizer, or zero=stage3",
        )
    if section.pin_memory is not None and section.optimizer is None and section.params is None:
        yield Problem("offload.pin_memory", "without effect: nothing is offloaded", "offload=optimizer or offload=all")
    if section.adam is not None and section.optimizer is None:
        yield Problem(
            "offload.adam",
            f"{section.adam} without effect: the optimizer is not offloaded",
            "offload=optimizer, or leave it out",
        )
    if section.adam == "gpu" and (stage == 3 or section.optimizer == "nvme"):
        yield Problem(
            "offload.adam",
            f"states pass through the GPU (gpu) at ZeRO stages 1 and 2, and the stage is {stage}",
            "zero=stage2 offload=optimizer, or offload.adam=deepspeed",
        )
    if section.gpu_places is not None and not passes_gpu(section):
        yield Problem(
            "offload.gpu_places",
            "without effect: no states pass through the GPU",
            "offload.adam=gpu with offload=optimizer, or leave it out",
        )


def nvme(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """What goes to a disk needs a folder; the disk's keys need something that goes there."""
    section = config.offload
    on_disk = [part for part in ("optimizer", "params") if getattr(section, part) == "nvme"]
    if on_disk and section.nvme_path is None:
        yield Problem(
            "offload.nvme_path",
            f"is null, and offload.{on_disk[0]}=nvme needs a folder on a local disk",
            "offload.nvme_path=FOLDER",
        )
    useless = [
        key
        for key, parts in NVME_KEYS.items()
        if getattr(section, key) is not None and not set(parts).intersection(on_disk)
    ]
    chosen = [key for key in useless if f"offload.{key}" in facts.explicit]
    for key in chosen or useless[:1]:
        parts = " or ".join(f"offload.{part}=nvme" for part in NVME_KEYS[key])
        more = f" (and {', '.join(useless[1:])})" if not chosen and useless[1:] else ""
        yield Problem(
            f"offload.{key}", f"without effect{more}: it is read with {parts}", "leave it out, or offload=nvme"
        )


def zero(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Keys that the stage does not read."""
    stage = config.zero.stage
    useless = [
        f"zero.{key}"
        for key, stages in ZERO_STAGES.items()
        if stage not in stages and getattr(config.zero, key) is not None
    ]
    if "zero.stage" in facts.explicit and useless:
        names = ", ".join(useless)
        yield Problem(
            "zero.stage",
            f"stage {stage} does not fit the values of the chosen option: without effect are {names}",
            f"zero=stage{stage} sets all of them",
        )
        return
    for key in useless:
        stages = ZERO_STAGES[key.removeprefix("zero.")]
        words = " and ".join(map(str, stages)) if len(stages) < 3 else "1, 2 and 3"
        plural = "stage" if len(stages) == 1 else "stages"
        yield Problem(
            key,
            f"without effect: DeepSpeed reads it in {plural} {words}, and the stage is {stage}",
            f"leave it out, or zero=stage{stages[-1]}",
        )


def zero_pairs(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Keys that DeepSpeed (0.19.8) reads in this stage and that another key makes idle."""
    zero, offload = config.zero, config.offload
    early = zero.stage in (1, 2)
    on_host = offload.optimizer is not None and not passes_gpu(offload)
    if early and zero.contiguous_gradients is False and on_host:
        yield _idle("contiguous_gradients", "with an offloaded optimizer gradients always go into one buffer")
    if early and zero.use_multi_rank_bucket_allreduce is not None and zero.reduce_scatter is False:
        yield _idle("use_multi_rank_bucket_allreduce", "it joins messages of zero.reduce_scatter, which is false")
    if early and zero.contiguous_gradients is False:
        for key, idle in {"use_multi_rank_bucket_allreduce": (True, False), "reduce_scatter": (False,)}.items():
            if getattr(zero, key) in idle:
                yield _idle(key, "with zero.contiguous_gradients=false all ranks get whole gradients, by all-reduce")
    gathered = zero.allgather_bucket_size or 0
    if early and gathered % 2:
        way_out = f"zero.allgather_bucket_size={gathered + 1}"
        yield Problem("zero.allgather_bucket_size", f"{gathered} is odd: DeepSpeed takes multiples of 2 alone", way_out)
    if zero.stage != 3:
        return
    if zero.reduce_scatter is False and zero.contiguous_gradients is False:
        yield _idle("reduce_scatter", "in stage 3 false needs one buffer, and zero.contiguous_gradients is false")
    if zero.stage3_model_persistence_threshold is not None and zero.stage3_param_persistence_threshold == 0:
        yield _idle("stage3_model_persistence_threshold", "with zero.stage3_param_persistence_threshold=0 none stays")
    if zero.stage3_use_all_reduce_for_fetch_params:
        if zero.stage3_allgather_sequential:
            yield _idle("stage3_use_all_reduce_for_fetch_params", "zero.stage3_allgather_sequential comes before it")
        if zero.zero_quantized_weights:
            yield _idle("stage3_use_all_reduce_for_fetch_params", "zero.zero_quantized_weights comes before it")


def _idle(key: str, reason: str) -> Problem:
    return Problem(f"zero.{key}", f"without effect: {reason}", "leave out one of the two")


def whole_blocks(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Blocks fetched as one piece lie on the GPUs, and nobody else fetches them."""
    others = other_ways(config)
    if config.zero.whole_blocks and others:
        yield Problem(
            "zero.whole_blocks",
            f"true, but {', '.join(others)} would fetch weights in another way",
            "zero.whole_blocks=null, or leave the others out",
        )


def fetching(config: RunConfig, explicit: Collection[str]) -> list[str]:
    """A warning where keys that the user set decide less than in DeepSpeed: blocks are fetched as one piece."""
    asked = [f"zero.{key}" for key in FETCHING if f"zero.{key}" in explicit and getattr(config.zero, key) is not None]
    if not asked or not gathers_blocks(config):
        return []
    rest = "read for what lies outside of blocks, which are fetched as one piece, two at a time"
    return [f"{', '.join(asked)}: {rest} (zero.whole_blocks=false: for all weights)"]


def gathering(config: RunConfig, explicit: Collection[str]) -> list[str]:
    """A warning where the user set a key that DeepSpeed (0.19.8) checks and does not use: ``runtime/utils.py`` gathers
    updated weights of a group in one piece wherever torch has ``all_gather_into_tensor``."""
    key = "zero.allgather_bucket_size"
    if key not in explicit or config.zero.allgather_bucket_size is None:
        return []
    return [f"{key}: without effect: DeepSpeed gathers all updated weights of an optimizer group at once"]


def zero_plus_plus(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """ZeRO++: groups of ranks must be equal, and its kernels are CUDA's."""
    size = config.zero.zero_hpz_partition_size
    if size is not None and facts.ranks % size:
        yield Problem(
            "zero.zero_hpz_partition_size",
            f"groups of {size} ranks do not divide the {facts.ranks} rank{'s' if facts.ranks > 1 else ''} of this run",
            "the number of GPUs of one host, or null",
        )
    for key in QUANTIZED:
        if getattr(config.zero, key) and facts.gpus == 0:
            yield Problem(
                f"zero.{key}",
                "needs a GPU and this machine has none: DeepSpeed quantizes with CUDA kernels",
                f"zero.{key}=null",
            )
