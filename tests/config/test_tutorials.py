"""The JSON files that the well-known tutorials use, from their keys: each key becomes an option or is refused by name.

HF: https://huggingface.co/docs/transformers/deepspeed. DeepSpeed: https://www.deepspeed.ai/tutorials/.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from glmexp.config.ds_config import lower
from glmexp.config.load import flatten
from glmexp.config.schema import RunConfig
from tests.config.helpers import asked, ds_file, refusal

FP16_DYNAMIC = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 2000,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 10, "total_num_steps": 100},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 15,
    },
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
}
BF16_OFFLOAD = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_bucket_size": "5e8",
        "reduce_bucket_size": 5e8,
        "round_robin_gradients": True,
    },
    "gradient_accumulation_steps": 4,
    "train_micro_batch_size_per_gpu": 1,
}
ALL_AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
STAGE3_OFFLOAD = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
NVME = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 4,
            "fast_init": False,
            "pipeline_read": True,
            "pipeline_write": True,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
    },
    "aio": {
        "block_size": 262144,
        "queue_depth": 32,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
    },
}
ZERO_PLUS_PLUS = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 10000000,
        "reduce_scatter": True,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 2,
        "zero_quantized_gradients": True,
        "contiguous_gradients": True,
        "overlap_comm": True,
    }
}
FILES = {
    "fp16 with a dynamic scale and WarmupDecayLR": FP16_DYNAMIC,
    "bf16 with offload and no optimizer": BF16_OFFLOAD,
    "all auto with offload and WarmupLR": ALL_AUTO,
    "stage 3 with offload": STAGE3_OFFLOAD,
    "stage 3 with nvme": NVME,
    "ZeRO++": ZERO_PLUS_PLUS,
}
ELSEWHERE = ("optimizer.", "scheduler.", "fp16.", "bf16.", "train_batch_size")
"""Not written again, or written otherwise (see the tests below)."""


def _run(content: Any, folder: Path) -> tuple[RunConfig, list[str]]:
    request = asked(f"deepspeed.config_file={ds_file(folder / 'ds.json', content)}", "launcher.nproc=2", gpus=2)
    return request.trials[0], request.warnings


@pytest.mark.parametrize("content", FILES.values(), ids=FILES.keys())
def test_every_key_is_lowered_as_the_file_has_it_or_named_in_a_warning(content: Any, tmp_path: Path) -> None:
    one, warnings = _run(content, tmp_path)
    lowered = flatten(lower(one, 2))
    for path, value in flatten(content).items():
        if value == "auto" or path.startswith(ELSEWHERE):
            continue
        if path in lowered and path not in ("steps_per_print", "wall_clock_breakdown"):
            assert lowered[path] == (5e8 if value == "5e8" else value), path
        else:
            assert any(f": {path}: " in warning for warning in warnings), path


def test_fp16_with_a_dynamic_scale_and_a_schedule_is_taken_over(tmp_path: Path) -> None:
    one, _ = _run(FP16_DYNAMIC, tmp_path)
    assert (one.train.micro_batch_size, one.train.grad_accum, one.train.batch_size) == (4, 1, 8)
    assert (one.precision.dtype, one.precision.initial_scale_power, one.precision.loss_scale_window) == (
        "fp16",
        15,
        500,
    )
    assert (one.optim.lr, one.optim.betas, one.optim.weight_decay) == (0.001, [0.8, 0.999], 3e-7)
    assert (one.optim.schedule, one.optim.warmup_steps, one.train.max_steps) == ("linear", 10, 100)


def test_auto_leaves_this_projects_values(tmp_path: Path) -> None:
    one, _ = _run(ALL_AUTO, tmp_path)
    assert (one.precision.dtype, one.optim.lr, one.optim.schedule) == ("bf16", 5e-3, "constant")
    assert (one.offload.optimizer, one.train.micro_batch_size, one.train.batch_size) == ("cpu", 8, 16)


def test_auto_clipping_is_refused_by_name_and_nothing_else_is(tmp_path: Path) -> None:
    """As the transformers tutorials have it, where the Trainer fills it in."""
    for content in (ALL_AUTO, STAGE3_OFFLOAD):
        more = copy.deepcopy(content) | {"gradient_clipping": "auto"}
        text = refusal(f"deepspeed.config_file={ds_file(tmp_path / 'ds.json', more)}", gpus=1)
        assert text.startswith("config error:")
        assert "gradient_clipping: 'auto' is no number" in text
        assert "leave it out: optim.max_grad_norm decides" in text
