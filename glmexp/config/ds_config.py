"""The only writer of DeepSpeed keys: one table of paths serves lowering, its provenance and the user's own JSON.

Paths and their defaults: https://www.deepspeed.ai/docs/config-json/ and ``deepspeed/runtime/zero/config.py``. Not
written: ``optimizer`` and ``scheduler`` (the engine hands torch's AdamW and its own schedule to DeepSpeed; that AdamW
is on DeepSpeed's list of tested ones, so ``zero_allow_untested_optimizer`` is not needed) and ``data_types``
(DeepSpeed's own choice, the model's dtype, for accumulation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from glmexp.config.memory import passes_gpu
from glmexp.config.schema import RunConfig


@dataclass(frozen=True)
class Row:
    """One DeepSpeed key and the option behind it."""

    path: str
    """Dotted path in DeepSpeed's JSON."""
    key: str
    """The option's dotted key."""
    write: Callable[[RunConfig], Any] | None = None
    """The value to write, None to leave the key out. Without it: the option's value."""

    def value(self, config: RunConfig) -> Any:
        """What lowering writes for this configuration; None: nothing."""
        if self.write is not None:
            return self.write(config)
        section, name = self.key.split(".")
        return getattr(getattr(config, section), name)


def _optimizer_place(config: RunConfig) -> str | None:
    """DeepSpeed hears nothing of states that pass through the GPU: to it there is no offload."""
    return None if passes_gpu(config.offload) else config.offload.optimizer


def _pinned(part: str) -> Callable[[RunConfig], Any]:
    def write(config: RunConfig) -> Any:
        place = _optimizer_place(config) if part == "optimizer" else config.offload.params
        return None if place is None else config.offload.pin_memory

    return write


def _scale(name: str) -> Callable[[RunConfig], Any]:
    """fp16's keys; those of the dynamic scale are left out where the scale is fixed."""

    def write(config: RunConfig) -> Any:
        precision = config.precision
        fixed = bool(precision.loss_scale) and name != "loss_scale"
        return None if precision.dtype != "fp16" or fixed else getattr(precision, name)

    return write


def _check_grad_overflow(config: RunConfig) -> bool | None:
    return config.precision.check_grad_overflow if config.precision.dtype == "bf16" else None


def _on_nvme(part: str, name: str) -> Callable[[RunConfig], Any]:
    """An option that is read only where ``part`` (optimizer, params) is offloaded to nvme."""
    return lambda config: getattr(config.offload, name) if getattr(config.offload, part) == "nvme" else None


OTHER_WAYS = (
    "leaf_modules",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
)
"""Keys of the zero section by which DeepSpeed fetches weights; ``whole_blocks`` does it in their place."""


def other_ways(config: RunConfig) -> list[str]:
    """Keys of this configuration that let DeepSpeed fetch the weights of blocks."""
    asked = [f"zero.{key}" for key in OTHER_WAYS if getattr(config.zero, key)]
    return asked + (["offload.params"] if config.offload.params is not None else [])


def gathers_blocks(config: RunConfig) -> bool:
    """Whether stage 3 fetches each block of the network as one piece (``engine/whole_blocks.py``): by itself where no
    key asks for another way and the network's code is known here."""
    chosen = config.zero.whole_blocks
    if chosen is not None:
        return chosen
    return config.zero.stage == 3 and not other_ways(config) and not config.model.trust_remote_code


def cuts_blocks(config: RunConfig) -> bool:
    """Whether stage 3 leaves no graph that all blocks could share: it fetches weights in hooks on every module of a
    block, or each linear layer asks its weight for a number of its own (``memory_efficient_linear``)."""
    return config.zero.stage == 3 and not (gathers_blocks(config) and memory_efficient_linear(config) is False)


def memory_efficient_linear(config: RunConfig) -> bool | None:
    """Off for blocks that are whole: their weights hold no memory for the backward pass anyway, and DeepSpeed's layer
    asks each weight for its number, so that torch.compile would make a graph for each block."""
    own = config.zero.memory_efficient_linear
    return False if own is None and gathers_blocks(config) else own


ZERO = "zero_optimization"
OPTIMIZER = f"{ZERO}.offload_optimizer"
PARAMS = f"{ZERO}.offload_param"
SAME_NAME = (
    "stage",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "overlap_comm",
    "reduce_scatter",
    "contiguous_gradients",
    "round_robin_gradients",
    "use_multi_rank_bucket_allreduce",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "sub_group_size",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
)
"""Keys that are called alike in the zero section and under ``zero_optimization``."""
TABLE: tuple[Row, ...] = (
    Row("train_batch_size", "train.batch_size"),
    Row("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
    Row("gradient_accumulation_steps", "train.grad_accum"),
    # Written even where it is off: DeepSpeed clips to 1.0 when the key is absent.
    Row("gradient_clipping", "optim.max_grad_norm", lambda config: config.optim.max_grad_norm or 0.0),
    Row("bf16.enabled", "precision.dtype", lambda config: True if config.precision.dtype == "bf16" else None),
    Row("bf16.check_grad_overflow", "precision.check_grad_overflow", _check_grad_overflow),
    Row("fp16.enabled", "precision.dtype", lambda config: True if config.precision.dtype == "fp16" else None),
    Row("fp16.loss_scale", "precision.loss_scale", _scale("loss_scale")),
    Row("fp16.initial_scale_power", "precision.initial_scale_power", _scale("initial_scale_power")),
    Row("fp16.loss_scale_window", "precision.loss_scale_window", _scale("loss_scale_window")),
    Row("fp16.hysteresis", "precision.hysteresis", _scale("hysteresis")),
    Row("fp16.min_loss_scale", "precision.min_loss_scale", _scale("min_loss_scale")),
    Row("communication_data_type", "zero.communication_data_type"),
    Row(f"{ZERO}.leaf_module.classes", "zero.leaf_modules"),
    *(Row(f"{ZERO}.{name}", f"zero.{name}") for name in SAME_NAME),
    Row(f"{ZERO}.memory_efficient_linear", "zero.memory_efficient_linear", memory_efficient_linear),
    Row(f"{OPTIMIZER}.device", "offload.optimizer", _optimizer_place),
    Row(f"{OPTIMIZER}.pin_memory", "offload.pin_memory", _pinned("optimizer")),
    Row(f"{OPTIMIZER}.nvme_path", "offload.nvme_path", _on_nvme("optimizer", "nvme_path")),
    Row(f"{OPTIMIZER}.pipeline_read", "offload.nvme_pipeline_read"),
    Row(f"{OPTIMIZER}.pipeline_write", "offload.nvme_pipeline_write"),
    Row(f"{PARAMS}.device", "offload.params"),
    Row(f"{PARAMS}.pin_memory", "offload.pin_memory", _pinned("params")),
    Row(f"{PARAMS}.nvme_path", "offload.nvme_path", _on_nvme("params", "nvme_path")),
    Row(f"{PARAMS}.buffer_size", "offload.nvme_buffer_size"),
    Row(f"{PARAMS}.buffer_count", "offload.nvme_buffer_count"),
    Row(f"{PARAMS}.max_in_cpu", "offload.nvme_max_in_cpu"),
    Row("aio.block_size", "offload.aio_block_bytes"),
    Row("aio.queue_depth", "offload.aio_queue_depth"),
    Row("aio.intra_op_parallelism", "offload.aio_threads"),
    Row("aio.single_submit", "offload.aio_single_submit"),
    Row("aio.overlap_events", "offload.aio_overlap_events"),
)
CONSTANT: dict[str, Any] = {
    # The engine decides which AdamW steps on the host (offload.adam); DeepSpeed would refuse torch's.
    "zero_force_ds_cpu_optimizer": False,
    # The loop reports progress itself.
    "steps_per_print": 2**31,
    "wall_clock_breakdown": False,
    # It waits for the GPU before each forward pass and behind each step, for a number that nobody shows.
    "timers": {"throughput": {"enabled": False}},
}


def lower(config: RunConfig, ranks: int) -> dict[str, Any]:
    """DeepSpeed's JSON for a derived configuration (see ``derived``) on that many ranks. Nulls are left out."""
    train = config.train
    product = (train.micro_batch_size or 0) * (train.grad_accum or 0) * ranks
    assert train.batch_size == product, "lower() takes a configuration that was derived for this number of ranks"
    lowered: dict[str, Any] = deepcopy(CONSTANT)
    for row, value in _written(config):
        *folders, name = row.path.split(".")
        place = lowered
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value
    return lowered


def provenance(config: RunConfig) -> dict[str, str]:
    """DeepSpeed path of every value that ``lower`` takes from an option, to that option's key."""
    return {row.path: row.key for row, _ in _written(config)}


def _written(config: RunConfig) -> Iterator[tuple[Row, Any]]:
    for row in TABLE:
        value = row.value(config)
        if value is not None:
            yield row, value
