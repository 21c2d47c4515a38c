"""The only writer of DeepSpeed keys: one table of paths serves lowering, its provenance and the user's own JSON.

Paths and their defaults: https://www.deepspeed.ai/docs/config-json/ and ``deepspeed/runtime/zero/config.py``. Not
written: ``optimizer`` and ``scheduler`` (the engine hands torch's AdamW and its own schedule to DeepSpeed; that AdamW
is on DeepSpeed's list of tested ones, so ``zero_allow_untested_optimizer`` is not needed), ``data_types`` and
``communication_data_type`` (DeepSpeed's own choice, the model's dtype, for accumulation and reduction).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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


def _pinned(part: str) -> Callable[[RunConfig], Any]:
    return lambda config: None if getattr(config.offload, part) is None else config.offload.pin_memory


def _scale(name: str) -> Callable[[RunConfig], Any]:
    """fp16's keys; those of the dynamic scale are left out where the scale is fixed."""

    def write(config: RunConfig) -> Any:
        precision = config.precision
        fixed = bool(precision.loss_scale) and name != "loss_scale"
        return None if precision.dtype != "fp16" or fixed else getattr(precision, name)

    return write


ZERO = "zero_optimization"
OPTIMIZER = f"{ZERO}.offload_optimizer"
PARAMS = f"{ZERO}.offload_param"
TABLE: tuple[Row, ...] = (
    Row("train_batch_size", "train.batch_size"),
    Row("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
    Row("gradient_accumulation_steps", "train.grad_accum"),
    # Written even where it is off: DeepSpeed clips to 1.0 when the key is absent.
    Row("gradient_clipping", "optim.max_grad_norm", lambda config: config.optim.max_grad_norm or 0.0),
    Row("bf16.enabled", "precision.dtype", lambda config: True if config.precision.dtype == "bf16" else None),
    Row("fp16.enabled", "precision.dtype", lambda config: True if config.precision.dtype == "fp16" else None),
    Row("fp16.loss_scale", "precision.loss_scale", _scale("loss_scale")),
    Row("fp16.initial_scale_power", "precision.initial_scale_power", _scale("initial_scale_power")),
    Row("fp16.loss_scale_window", "precision.loss_scale_window", _scale("loss_scale_window")),
    Row("fp16.hysteresis", "precision.hysteresis", _scale("hysteresis")),
    Row("fp16.min_loss_scale", "precision.min_loss_scale", _scale("min_loss_scale")),
    Row(f"{ZERO}.stage", "zero.stage"),
    Row(f"{ZERO}.reduce_bucket_size", "zero.reduce_bucket_size"),
    Row(f"{ZERO}.allgather_bucket_size", "zero.allgather_bucket_size"),
    Row(f"{ZERO}.overlap_comm", "zero.overlap_comm"),
    Row(f"{ZERO}.reduce_scatter", "zero.reduce_scatter"),
    Row(f"{ZERO}.contiguous_gradients", "zero.contiguous_gradients"),
    Row(f"{ZERO}.round_robin_gradients", "zero.round_robin_gradients"),
    Row(f"{ZERO}.stage3_prefetch_bucket_size", "zero.stage3_prefetch_bucket_size"),
    Row(f"{ZERO}.stage3_param_persistence_threshold", "zero.stage3_param_persistence_threshold"),
    Row(f"{ZERO}.stage3_max_live_parameters", "zero.stage3_max_live_parameters"),
    Row(f"{ZERO}.stage3_max_reuse_distance", "zero.stage3_max_reuse_distance"),
    Row(f"{ZERO}.sub_group_size", "zero.sub_group_size"),
    Row(f"{OPTIMIZER}.device", "offload.optimizer"),
    Row(f"{OPTIMIZER}.pin_memory", "offload.pin_memory", _pinned("optimizer")),
    Row(f"{PARAMS}.device", "offload.params"),
    Row(f"{PARAMS}.pin_memory", "offload.pin_memory", _pinned("params")),
)
CONSTANT: dict[str, Any] = {
    # torch's AdamW steps on the host too: DeepSpeed's own CPU Adam would be compiled on first use.
    "zero_force_ds_cpu_optimizer": False,
    # The loop reports progress itself.
    "steps_per_print": 2**31,
    "wall_clock_breakdown": False,
}


def lower(config: RunConfig, ranks: int) -> dict[str, Any]:
    """DeepSpeed's JSON for a derived configuration (see ``rules.derive``) on that many ranks. Nulls are left out."""
    train = config.train
    product = (train.micro_batch_size or 0) * (train.grad_accum or 0) * ranks
    assert train.batch_size == product, "lower() takes a configuration that was derived for this number of ranks"
    lowered: dict[str, Any] = dict(CONSTANT)
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
