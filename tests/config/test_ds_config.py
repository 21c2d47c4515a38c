"""The lowered DeepSpeed JSON: DeepSpeed's own classes read back what the options say; each value has an option."""

from __future__ import annotations

import json
from typing import Any

import pytest

from glmexp.config.ds_config import CONSTANT, TABLE, lower, provenance
from glmexp.config.load import dump, flatten
from glmexp.config.schema import RunConfig
from tests.config.helpers import config

STAGES = ("stage0", "stage1", "stage2", "stage3")
OFFLOADS = {"stage0": ("none",), "stage1": ("none", "optimizer"), "stage2": ("none", "optimizer")}
CELLS = [
    (stage, precision, offload)
    for stage in STAGES
    for precision in ("bf16", "fp16", "fp32")
    for offload in OFFLOADS.get(stage, ("none", "optimizer", "all"))
]


def cell(stage: str, precision: str, offload: str) -> RunConfig:
    return config(f"zero={stage}", f"precision={precision}", f"offload={offload}", "launcher.nproc=2", gpus=2)


@pytest.mark.parametrize(("stage", "precision", "offload"), CELLS)
def test_deepspeeds_own_classes_read_what_the_options_say(stage: str, precision: str, offload: str) -> None:
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
    from deepspeed.runtime.zero.config import get_zero_config

    one = cell(stage, precision, offload)
    lowered = json.loads(json.dumps(lower(one, 2)))
    zero: Any = get_zero_config(lowered)
    assert int(zero.stage) == one.zero.stage
    for name in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "sub_group_size",
                 "contiguous_gradients", "round_robin_gradients"):  # fmt: skip
        wanted = getattr(one.zero, name)
        assert wanted is None or getattr(zero, name) == wanted, name
    for name in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance"):
        wanted = getattr(one.zero, f"stage3_{name}")
        assert wanted is None or getattr(zero, name) == wanted, name
    for part, wanted in ((zero.offload_optimizer, one.offload.optimizer), (zero.offload_param, one.offload.params)):
        assert (None if part is None else part.device) == wanted
        assert part is None or part.pin_memory == one.offload.pin_memory
    half, brain = get_float16_config(lowered), get_bfloat16_config(lowered)
    assert (half.enabled, brain.enabled) == (precision == "fp16", precision == "bf16")
    if precision == "fp16":
        for name in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"):
            assert getattr(half, name) == getattr(one.precision, name), name


def test_a_whole_lowering_is_written_out_here() -> None:
    assert lower(config("launcher.nproc=2", "train.batch_size=64", "train.micro_batch_size=4"), 2) == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 200_000_000,
            "allgather_bucket_size": 200_000_000,
            "overlap_comm": True,
            "reduce_scatter": True,
            "contiguous_gradients": True,
            "round_robin_gradients": False,
        },
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def test_nulls_are_left_out() -> None:
    one = config("zero=stage0", "precision=fp32", "optim.max_grad_norm=null")
    assert flatten(lower(one, 1)).keys() == {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "zero_optimization.stage", *CONSTANT,
    }  # fmt: skip


def test_a_fixed_loss_scale_leaves_the_dynamic_keys_out() -> None:
    lowered = lower(config("precision=fp16", "precision.loss_scale=128", gpus=1), 1)
    assert lowered["fp16"] == {"enabled": True, "loss_scale": 128.0}


def test_every_written_value_can_be_traced_to_its_option() -> None:
    one = cell("stage3", "fp16", "all")
    options = flatten(dump(one))
    lowered = flatten(lower(one, 2))
    traced = provenance(one)
    assert set(lowered) == set(traced) | set(CONSTANT)
    for path, key in traced.items():
        assert lowered[path] == (True if key == "precision.dtype" else options[key]), path


def test_every_row_of_the_table_names_an_option() -> None:
    options = flatten(dump(config()))
    assert {row.key for row in TABLE} <= set(options)
    assert len({row.path for row in TABLE}) == len(TABLE)


def test_lowering_for_another_number_of_ranks_than_derived_is_a_bug_and_says_so() -> None:
    with pytest.raises(AssertionError, match="derived for this number of ranks"):
        lower(config(), 2)
