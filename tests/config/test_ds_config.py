"""The lowered DeepSpeed JSON: DeepSpeed's own classes read back what the options say; each value has an option."""

from __future__ import annotations

import json
from typing import Any

import pytest

from glmexp.config.ds_config import CONSTANT, TABLE, gathers_blocks, lower, provenance
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
    if precision == "bf16":
        assert brain.check_grad_overflow is False
    if precision == "fp16":
        for name in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"):
            assert getattr(half, name) == getattr(one.precision, name), name


OPTIONS: dict[str, tuple[str, Any]] = {
    "zero.use_multi_rank_bucket_allreduce": ("zero_config.use_multi_rank_bucket_allreduce", False),
    "zero.stage3_model_persistence_threshold": ("zero_config.model_persistence_threshold", 77),
    "zero.stage3_module_granularity_threshold": ("zero_config.module_granularity_threshold", 78),
    "zero.stage3_use_all_reduce_for_fetch_params": ("zero_config.use_all_reduce_for_fetch_params", True),
    "zero.stage3_allgather_sequential": ("zero_config.allgather_sequential", True),
    "zero.memory_efficient_linear": ("zero_config.memory_efficient_linear", False),
    "zero.leaf_modules": ("zero_config.leaf_module.classes", ["Expert"]),
    "zero.zero_hpz_partition_size": ("zero_config.zero_hpz_partition_size", 2),
    "zero.zero_quantized_weights": ("zero_config.zero_quantized_weights", True),
    "zero.zero_quantized_gradients": ("zero_config.zero_quantized_gradients", True),
    "offload.nvme_path": ("zero_config.offload_param.nvme_path", "/disk"),
    "offload.nvme_buffer_size": ("zero_config.offload_param.buffer_size", 79),
    "offload.nvme_buffer_count": ("zero_config.offload_param.buffer_count", 6),
    "offload.nvme_max_in_cpu": ("zero_config.offload_param.max_in_cpu", 80),
    "offload.nvme_pipeline_read": ("zero_config.offload_optimizer.pipeline_read", True),
    "offload.nvme_pipeline_write": ("zero_config.offload_optimizer.pipeline_write", True),
    "offload.aio_block_bytes": ("aio_config.block_size", 4096),
    "offload.aio_queue_depth": ("aio_config.queue_depth", 9),
    "offload.aio_threads": ("aio_config.intra_op_parallelism", 2),
    "offload.aio_single_submit": ("aio_config.single_submit", True),
    "offload.aio_overlap_events": ("aio_config.overlap_events", False),
    "zero.communication_data_type": ("communication_data_type", "fp32"),
    "optim.max_grad_norm": ("gradient_clipping", 0.25),
}
"""Option -> where DeepSpeed keeps it after parsing, and a value that is not its default."""


def test_every_further_option_arrives_in_deepspeeds_own_configuration() -> None:
    """Those of the cells above have their tests there; together they are all that the table writes."""
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig

    stage2 = {"zero.use_multi_rank_bucket_allreduce"}
    for stage, keys in (("stage2", stage2), ("stage3", OPTIONS.keys() - stage2)):
        values = {key: OPTIONS[key][1] for key in keys}
        offload = ["offload=nvme", "offload.nvme_path=/disk"] if stage == "stage3" else []
        one = config(f"zero={stage}", *offload, "launcher.nproc=1", gpus=2)
        for key, value in values.items():
            section, name = key.split(".")
            setattr(getattr(one, section), name, value)
        parsed = DeepSpeedConfig(lower(one, 1))
        for key, value in values.items():
            found: Any = parsed
            for part in OPTIONS[key][0].split("."):
                found = found[part] if isinstance(found, dict) else getattr(found, part)
            found = {torch.float32: "fp32"}.get(found, found) if not isinstance(found, (dict, list)) else found
            assert (str(found) if key == "offload.nvme_path" else found) == value, key


def test_no_option_of_the_table_is_without_such_a_test() -> None:
    tested = {row.key for row in TABLE if row.key.split(".")[0] in ("train", "precision")} | OPTIONS.keys()
    tested |= {f"zero.{name}" for name in ("stage", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm",
        "reduce_scatter", "contiguous_gradients", "round_robin_gradients", "sub_group_size",
        "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance")}  # fmt: skip
    tested |= {"offload.optimizer", "offload.params", "offload.pin_memory"}
    assert {row.key for row in TABLE} == tested


def test_a_whole_lowering_is_written_out_here() -> None:
    assert lower(config("launcher.nproc=2", "train.batch_size=64", "train.micro_batch_size=4"), 2) == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True, "check_grad_overflow": False},
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
        "timers": {"throughput": {"enabled": False}},
    }


def test_nulls_are_left_out() -> None:
    one = config("zero=stage0", "precision=fp32", "optim.max_grad_norm=null")
    assert flatten(lower(one, 1)).keys() == {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "zero_optimization.stage", *flatten(CONSTANT),
    }  # fmt: skip


def test_a_fixed_loss_scale_leaves_the_dynamic_keys_out() -> None:
    lowered = lower(config("precision=fp16", "precision.loss_scale=128", gpus=1), 1)
    assert lowered["fp16"] == {"enabled": True, "loss_scale": 128.0}


def test_every_written_value_can_be_traced_to_its_option() -> None:
    one = cell("stage3", "fp16", "all")
    options = flatten(dump(one))
    lowered = flatten(lower(one, 2))
    traced = provenance(one)
    assert set(lowered) == set(traced) | set(flatten(CONSTANT))
    for path, key in traced.items():
        assert lowered[path] == (True if key == "precision.dtype" else options[key]), path


def test_every_row_of_the_table_names_an_option() -> None:
    options = flatten(dump(config()))
    assert {row.key for row in TABLE} <= set(options)
    assert len({row.path for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize(
    ("words", "whole", "linear"),
    [
        ([], True, False),
        (["zero.memory_efficient_linear=true"], True, True),
        (["offload=optimizer"], True, False),
        (["zero.stage3_module_granularity_threshold=0"], True, False),
        (["zero.whole_blocks=false"], False, None),
        (["offload=all"], False, None),
        (["zero.leaf_modules=[Block]"], False, None),
        (["zero.stage3_module_granularity_threshold=9"], False, None),
        (["zero.stage3_use_all_reduce_for_fetch_params=true"], False, None),
        (["zero.stage3_allgather_sequential=true"], False, None),
        (["zero.zero_hpz_partition_size=1"], False, None),
        (["zero.zero_quantized_weights=true"], False, None),
        (["model.trust_remote_code=true"], False, None),
    ],
)
def test_stage_3_fetches_whole_blocks_unless_another_way_is_asked_for(
    words: list[str], whole: bool, linear: bool | None
) -> None:
    one = config("zero=stage3", *words, gpus=1)
    assert gathers_blocks(one) is whole
    assert lower(one, 1)["zero_optimization"].get("memory_efficient_linear") is linear


def test_lowering_for_another_number_of_ranks_than_derived_is_a_bug_and_says_so() -> None:
    with pytest.raises(AssertionError, match="derived for this number of ranks"):
        lower(config(), 2)
