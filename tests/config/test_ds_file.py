"""The user's own DeepSpeed JSON: mapped key by key, or refused by name; it never wins over a user's own word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glmexp.config.ds_config import lower
from tests.config.helpers import asked, config, ds_file, refusal


def given(tmp_path: Path, content: Any) -> str:
    return f"deepspeed.config_file={ds_file(tmp_path / 'ds.json', content)}"


STAGE3 = {
    "train_micro_batch_size_per_gpu": "2",
    "gradient_accumulation_steps": 4,
    "train_batch_size": "auto",
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "1e6",
        "overlap_comm": False,
        "stage3_prefetch_bucket_size": 0,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "none"},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.8, 0.9], "eps": "1e-7", "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": "auto"}},
    "steps_per_print": 10,
}


def test_a_whole_file_becomes_options(tmp_path: Path) -> None:
    request = asked(given(tmp_path, STAGE3))
    (one,) = request.trials
    assert (one.train.micro_batch_size, one.train.grad_accum, one.train.batch_size) == (2, 4, 8)
    assert (one.zero.stage, one.zero.reduce_bucket_size, one.zero.overlap_comm) == (3, 1_000_000, False)
    assert one.zero.stage3_prefetch_bucket_size == 0
    assert one.zero.stage3_max_live_parameters == 1_000_000_000, "zero=stage3 fills in what the file leaves open"
    assert one.zero.allgather_bucket_size is None
    assert (one.offload.optimizer, one.offload.params, one.offload.pin_memory) == ("cpu", None, False)
    assert (one.optim.lr, one.optim.betas, one.optim.eps, one.optim.weight_decay) == (3e-4, [0.8, 0.9], 1e-7, 0.1)
    assert (one.optim.schedule, one.optim.warmup_steps, one.optim.warmup_ratio) == ("linear", 3, None)
    assert one.optim.max_grad_norm == 0.5
    assert [part for part in ("steps_per_print", "scheduler.type", "torch_adam") if part in str(request.warnings)] == [
        "steps_per_print", "scheduler.type", "torch_adam",
    ]  # fmt: skip


def test_the_lowered_configuration_read_as_a_file_changes_nothing(tmp_path: Path) -> None:
    plain = config("zero=stage3", "offload=all", "precision=fp16", gpus=1)
    again = config(given(tmp_path, lower(plain, 1)), gpus=1)
    again.deepspeed.config_file = None
    assert again == plain


@pytest.mark.parametrize(
    ("content", "dtype"),
    [
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "bf16"),
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": False}}, "bf16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32"),
    ],
)
def test_precision_follows_the_file_where_the_user_chose_none(tmp_path: Path, content: Any, dtype: str) -> None:
    assert config(given(tmp_path, content), gpus=1).precision.dtype == dtype


def test_loss_scale_counts_only_in_fp16(tmp_path: Path) -> None:
    assert config(given(tmp_path, {"fp16": {"enabled": True, "loss_scale": 64}}), gpus=1).precision.loss_scale == 64
    content = {"fp16": {"enabled": "auto", "loss_scale": 64}}
    request = asked(given(tmp_path, content))
    assert request.trials[0].precision.loss_scale is None
    assert "fp16.loss_scale: without effect, the run is not in fp16" in str(request.warnings)


@pytest.mark.parametrize(
    ("words", "content", "part"),
    [
        (
            ["optim.lr=1e-3"],
            {"optimizer": {"params": {"lr": 1e-4}}},
            "optim.lr: 0.001 (from the command line) contradicts",
        ),
        (
            ["method.lr=1e-3"],
            {"optimizer": {"params": {"lr": 1e-4}}},
            "optim.lr: 0.001 (from the command line) contrad",
        ),
        (["zero=stage1"], {"zero_optimization": {"stage": 2}}, "zero.stage: 1 (from zero=stage1 on the command line)"),
        (
            ["zero=stage2"],
            {"zero_optimization": {"reduce_bucket_size": 5}},
            "200000000 (from zero=stage2 on the command",
        ),
        (
            ["precision=fp32"],
            {"bf16": {"enabled": True}},
            "'fp32' (from precision=fp32 on the command line) contradicts",
        ),
        (["precision=bf16"], {"bf16": {"enabled": False}}, "contradicts false"),
        (["train.batch_size=4"], {"train_batch_size": 8}, "train.batch_size: 4 (from the command line) contradicts 8"),
    ],
)
def test_a_key_that_the_user_also_set_must_agree(tmp_path: Path, words: list[str], content: Any, part: str) -> None:
    assert part in refusal(*words, given(tmp_path, content))


def test_a_key_that_agrees_is_no_contradiction(tmp_path: Path) -> None:
    content = {"optimizer": {"params": {"lr": "0.001"}}, "zero_optimization": {"stage": 2}}
    assert config("optim.lr=1e-3", "zero=stage2", given(tmp_path, content)).optim.lr == 1e-3


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"gradient_cliping": 1.0}, ["gradient_cliping: is no key", "did you mean gradient_clipping?"]),
        ({"stage3_gather_16bit_weights_on_model_save": True},
         ["stands in the wrong place", "zero_optimization.stage3_gather_16bit_weights_on_model_save"]),
        ({"zero_optimization": {"gradient_clipping": 1}}, ["in the wrong place", "belongs to gradient_clipping"]),
        ({"reduce_bucket_size": 5}, ["it belongs to zero_optimization.reduce_bucket_size"]),
        ({"zero_optimization": {"cpu_offload": True}}, ["did you mean zero_optimization.offload_optimizer.device?"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, ["'gpu' is not there", "cpu, nvme or none"]),
        ({"gradient_clipping": "auto"}, ["gradient_clipping: 'auto' is no number", "optim.max_grad_norm decides"]),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3}}},
         ["scheduler.params.total_num_steps: is missing, and WarmupDecayLR decays until then"]),
        ({"zero_optimization": {"stage": 3, "offload_params": {"device": "cpu"}}},
         ["offload_params.device", "did you mean zero_optimization.offload_param.device"]),
        ({"optimizer": {"type": "Lamb"}}, ["optimizer.type: 'Lamb' is not there"]),
        ({"optimizer": {"params": {"lr": "fast"}}}, ["optim.lr: 'fast' is not a number", "optimizer.params.lr"]),
        ({"scheduler": {"type": "OneCycle"}}, ["one of WarmupLR, WarmupDecayLR, WarmupCosineLR"]),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}}, ["warmup_type", "'linear'"]),
        ({"amp": {"enabled": True}}, ["amp.enabled: true has no option here"]),
        ({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5}}, ["zero.stage3_max_live_parameters"]),
        ({"quantum": 1}, ["quantum: is no key that glmexp maps to an option"]),
        ("{", ["ds.json:1", "is no valid JSON"]),
        ('{"train_batch_size": 8, "train_batch_size": 9}', ["train_batch_size: stands twice in the file"]),
        ("[]", ["is no JSON object"]),
    ],
)  # fmt: skip
def test_what_cannot_be_mapped_is_refused_by_name(tmp_path: Path, content: Any, parts: list[str]) -> None:
    text = refusal(given(tmp_path, content))
    for part in parts:
        assert part in text


def test_auto_means_as_the_options_say(tmp_path: Path) -> None:
    content = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
    }
    one = config(given(tmp_path, content))
    one.deepspeed.config_file = None
    assert one == config()


def test_no_clipping_in_the_file_is_no_clipping(tmp_path: Path) -> None:
    assert config(given(tmp_path, {"gradient_clipping": 0})).optim.max_grad_norm is None


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    text = refusal(f"deepspeed.config_file={tmp_path}/none.json", "rank=3")
    assert "deepspeed.config_file" in text
    assert "No such file" in text
    assert "did you mean method.rank?" in text, "the other mistakes are still told"
