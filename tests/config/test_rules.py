"""Contradictions across groups, and keys without effect: each refused with the key and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from glmexp.config.rules import RULES, check
from tests.config.helpers import config, refusal


@pytest.mark.parametrize(
    ("words", "gpus", "where", "part"),
    [
        (["precision=fp16"], 0, "precision.dtype", "DeepSpeed's CPU accelerator refuses fp16"),
        (["precision=fp32", "precision.check_grad_overflow=true"], 0, "precision.check_grad_overflow", "dtype is fp32"),
        (["precision=bf16", "precision.loss_scale=8"], 0, "precision.loss_scale", "only fp16 has a loss scale"),
        (["precision=fp16", "precision.loss_scale=8", "precision.hysteresis=3"], 1, "precision.hysteresis", "fixed"),
        (["zero=stage0", "offload=optimizer"], 0, "offload.optimizer", "needs ZeRO stage 1, 2 or 3"),
        (["zero=stage3", "offload=optimizer", "offload.adam=gpu"], 0, "offload.adam", "at ZeRO stages 1 and 2"),
        (["zero=stage2", "offload=optimizer", "offload.gpu_places=2"], 0, "offload.gpu_places", "no states pass"),
        (["offload.pin_memory=true"], 0, "offload.pin_memory", "nothing is offloaded"),
        (["zero=stage2", "zero.sub_group_size=1e9"], 0, "zero.sub_group_size", "in stage 3, and the stage is 2"),
        (["zero=stage2", "zero.stage3_prefetch_bucket_size=1"], 0, "zero.stage3_prefetch_bucket_size", "zero=stage3"),
        (["zero=stage0", "zero.reduce_bucket_size=1"], 0, "zero.reduce_bucket_size", "stages 1, 2 and 3"),
        (["zero=stage3", "zero.allgather_bucket_size=1"], 0, "zero.allgather_bucket_size", "stages 1 and 2"),
        (["zero.stage=3"], 0, "zero.stage", "zero=stage3 sets all of them"),
        (["zero=stage2", "offload=optimizer", "zero.contiguous_gradients=false"], 0, "zero.contiguous_gradients",
         "with an offloaded optimizer gradients always go into one buffer"),
        (["zero=stage2", "zero.reduce_scatter=false", "zero.use_multi_rank_bucket_allreduce=true"], 0,
         "zero.use_multi_rank_bucket_allreduce", "zero.reduce_scatter, which is false"),
        (["zero=stage2", "zero.contiguous_gradients=false", "zero.use_multi_rank_bucket_allreduce=false"], 0,
         "zero.use_multi_rank_bucket_allreduce", "all ranks get whole gradients"),
        (["zero=stage1", "zero.contiguous_gradients=false", "zero.reduce_scatter=false"], 0, "zero.reduce_scatter",
         "all ranks get whole gradients"),
        (["zero=stage2", "zero.allgather_bucket_size=1001"], 0, "zero.allgather_bucket_size", "1001 is odd"),
        (["zero=stage3", "zero.reduce_scatter=false", "zero.contiguous_gradients=false"], 0, "zero.reduce_scatter",
         "false needs one buffer"),
        (["zero=stage3", "zero.stage3_model_persistence_threshold=9", "zero.stage3_param_persistence_threshold=0"], 0,
         "zero.stage3_model_persistence_threshold", "none stays"),
        (["zero=stage3", "zero.stage3_use_all_reduce_for_fetch_params=true", "zero.stage3_allgather_sequential=true"],
         0, "zero.stage3_use_all_reduce_for_fetch_params", "zero.stage3_allgather_sequential comes before it"),
        (["zero=stage3", "zero.stage3_use_all_reduce_for_fetch_params=true", "zero.zero_quantized_weights=true"],
         2, "zero.stage3_use_all_reduce_for_fetch_params", "zero.zero_quantized_weights comes before it"),
        (["method=freeze", "method.patterns=[a]", "method.num_layers=2"], 0, "method.num_layers", "both say"),
        (["method=freeze", "method.num_layers=null"], 0, "method.num_layers", "nothing is trained"),
        (["method=freeze", "method.patterns=['a(']"], 0, "method.patterns", "is no regular expression"),
        (["method.target_modules=[]"], 0, "method.target_modules", "names that exist: query_key_value, dense"),
        (["model=tiny_qwen2", "method=ptuning", "train.gradient_checkpointing=true"], 0, "train.gradient_checkpointing",
         "transformers drops the cache"),
        (["model=tiny_qwen2", "method=ptuning", "gather=full16"], 0, "gather.name", "a prefix cannot be merged"),
        (["train.compile=true", "zero=stage3", "zero.whole_blocks=false"], 0, "train.compile", "cut each block's"),
        (["train.compile=true", "zero=stage3", "zero.memory_efficient_linear=true"], 0, "train.compile", "DeepSpeed's"),
        (["zero=stage3", "zero.whole_blocks=true", "offload=all"], 0, "zero.whole_blocks", "but offload.params would"),
        (["train.compile=true", "zero=stage3", "zero.leaf_modules=[A]"], 0, "train.compile", "DeepSpeed's"),
        (["optim.betas=[0.9]"], 0, "optim.betas", "is not two numbers"),
        (["optim.warmup_steps=2", "optim.warmup_ratio=0.1"], 0, "optim.warmup_steps", "both say how long"),
        (["optim.warmup_steps=9", "train.max_steps=3"], 0, "optim.warmup_steps", "in a run of train.max_steps=3"),
        (["train.epochs=null"], 0, "train.epochs", "would never end"),
        (["train.keep_checkpoints=3"], 0, "train.keep_checkpoints", "train.save_steps is null"),
        (["train.keep_best=eval/loss/loss"], 0, "train.keep_best", "train.save_steps is null"),
        (["train.keep_best_mode=max"], 0, "train.keep_best_mode", "train.keep_best is null"),
        (["train.keep_best=eval/rouge/rouge_l", "train.save_steps=2"], 0, "train.keep_best", "no metric of a chosen"),
        (["train.keep_best=eval/loss/loss", "train.save_steps=2", "eval.loss.every=3"], 0, "train.keep_best", "common"),
        (["train.stop_after=9", "train.max_steps=8"], 0, "train.stop_after", "never reached"),
        (["train.resume=auto", "run.dir=x", "run.overwrite=true"], 0, "run.overwrite", "goes on with what lies"),
        (["launcher=inprocess", "launcher.nproc=2"], 0, "launcher.nproc", "is one rank, not 2"),
        (["launcher.nproc=3"], 2, "launcher.nproc", "3 ranks on 2 GPUs"),
        (["launcher.nnodes=2", "launcher.master_addr=a"], 0, "launcher.node_rank", "is null, with launcher.nnodes=2"),
        (["launcher.nnodes=2", "launcher.node_rank=2", "launcher.master_addr=a"], 0, "launcher.node_rank", "2 is too"),
        (["launcher.nnodes=2", "launcher.node_rank=1"], 0, "launcher.master_addr", "is null"),
        (["launcher.node_rank=1"], 0, "launcher.node_rank", "1 of launcher.nnodes=1"),
        (["launcher.master_addr=a"], 0, "launcher.master_addr", "without effect on a single machine"),
        (["launcher=inprocess", "launcher.nnodes=2"], 0, "launcher.nnodes", "is one rank, not 2 nodes"),
        (["launcher=inprocess", "launcher.master_port=9"], 0, "launcher.master_port", "without effect"),
        (["data.holdout=3", "data.eval_file=builtin:demo/eval.jsonl"], 0, "data.holdout", "both say what is held out"),
        (["data.train_file=null"], 0, "data.train_file", "entry=train needs rows"),
        (["data.train_file=nowhere.jsonl"], 0, "data.train_file", "nowhere.jsonl is not there"),
        (["data.eval_file=nowhere.jsonl"], 0, "data.eval_file", "nowhere.jsonl is not there"),
        (["model.path=./nowhere"], 0, "model.path", "is no folder"),
        (["run.name=a/b"], 0, "run.name", "is no plain folder name"),
        (["run.name=.."], 0, "run.name", "is no plain folder name"),
        (["run.overwrite=true"], 0, "run.overwrite", "without effect"),
        (["artifact.path=."], 0, "artifact.path", "entry=train starts from the base model"),
        (["entry=export"], 0, "artifact.path", "entry=export needs an artifact"),
        (["entry=evaluate", "artifact.path=nowhere"], 0, "artifact.path", "nowhere is no folder"),
        (["entry=evaluate", "eval=none"], 0, "eval", "runs nothing else"),
        (["entry=evaluate", "data.eval_file=null"], 0, "data.eval_file", "needs held-out rows"),
        (["entry=evaluate", "train.resume=."], 0, "train.resume", "without effect under entry=evaluate"),
        (["train.resume=nowhere"], 0, "train.resume", "nowhere is no folder"),
        (["train.resume=.", "run.dir=x"], 0, "run.dir", "the resumed run's own folder"),
    ],
)  # fmt: skip
def test_refused_with_key_and_reason(words: list[str], gpus: int, where: str, part: str) -> None:
    text = refusal(*words, gpus=gpus)
    assert text.startswith("config error:"), "nothing else is wrong with it"
    assert f"  {where}: " in text
    assert part in text


@pytest.mark.parametrize(
    "words",
    [
        ["precision=fp16"],
        ["precision=fp16", "precision.loss_scale=128"],
        ["zero=stage3", "offload=all"],
        ["zero=stage1", "offload=optimizer"],
        ["method=ptuning", "train.gradient_checkpointing=true", "gather=full16"],
        ["model=tiny_qwen2", "method=lora", "train.gradient_checkpointing=true", "gather=full16"],
        ["launcher.nproc=2"],
        ["entry=evaluate", "data.train_file=null"],
        ["entry=evaluate", "data.eval_file=null", "data.holdout=2"],
        ["train.epochs=null", "train.max_steps=1"],
        ["optim.warmup_steps=0", "optim.warmup_ratio=null"],
        ["zero=stage2", "zero.overlap_comm=null"],
    ],
)
def test_what_makes_sense_passes(words: list[str]) -> None:
    config(*words, gpus=2)


def test_every_rule_is_silent_on_the_default_run() -> None:
    assert len(RULES) >= 12
    assert check(config(), ranks=1, gpus=0) == []


def test_a_rule_that_reads_a_wrong_value_stays_silent_and_the_others_speak(tmp_path: Path) -> None:
    text = refusal("zero.stage=x", "optim.betas=[1,1]", "optim.warmup_steps=9", "train.max_steps=3")
    assert text.startswith("3 config errors:")
    assert "optim.warmup_steps: 9 steps of warm-up" in text


def test_a_sweep_as_artifact_names_its_best_trial(tmp_path: Path) -> None:
    (tmp_path / "sweep.csv").write_text(
        "trial,method.rank,state,folder\n3,8,finished,3_rank-8\n1,2,finished,1_rank-2\n"
    )
    told = refusal("entry=evaluate", f"artifact.path={tmp_path}")
    assert f"{tmp_path} is a sweep, not a run" in told
    assert f"one of its trials, the best: {tmp_path}/3_rank-8" in told
