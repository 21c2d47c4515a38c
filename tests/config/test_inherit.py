"""A resumed run and an artifact bring their own configuration; a contradicting word of the user is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from glmexp.config import inherit
from glmexp.config.load import dump, flatten, write
from glmexp.config.schema import RunConfig
from tests.config.helpers import asked, config, refusal, rows_file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as a run with many own words leaves it."""
    rows = rows_file(tmp_path / "rows.jsonl")
    (tmp_path / "run" / "checkpoints" / "step-3").mkdir(parents=True)
    one = config(
        "model=tiny_qwen2", "method=freeze", "method.num_layers=2", "zero=stage3", "offload=all", "precision=fp32",
        "optim.lr=3e-4", "optim.warmup_steps=2", "train.max_steps=6", "train.save_steps=3", "train.batch_size=4",
        "eval=loss", "tracker=none", f"data.train_file={rows}", "data.max_length=64", "run.name=mine",
    )  # fmt: skip
    write(one, tmp_path / "run" / "config.yaml")
    return tmp_path / "run"


def saved(run: Path) -> RunConfig:
    from glmexp.config.load import read

    return read(run / "config.yaml")


def test_a_resume_without_another_word_is_the_run_as_it_was(run: Path) -> None:
    for start in (run, run / "checkpoints" / "step-3"):
        resumed = config(f"train.resume={start}")
        before = saved(run)
        assert resumed == dataclasses.replace(before, train=dataclasses.replace(before.train, resume=str(start)))


def test_a_resume_may_say_again_what_was_said_and_go_on_longer(run: Path, tmp_path: Path) -> None:
    words = ["model=tiny_qwen2", "method=freeze", "method.num_layers='2'", "optim.lr=3e-4", "train.max_steps=12",
             f"data.train_file={tmp_path}/rows.jsonl", "train.batch_size=4"]  # fmt: skip
    resumed = config(f"train.resume={run}", *words)
    assert resumed.train.max_steps == 12
    differs = {key for key, value in flatten(dump(resumed)).items() if flatten(dump(saved(run)))[key] != value}
    assert differs == {"train.max_steps", "train.resume"}


def test_what_does_not_decide_the_training_may_change(run: Path) -> None:
    resumed = config(
        f"train.resume={run}", "tracker=wandb", "eval=[loss,generate]", "offload=none", "train.log_steps=5"
    )
    assert resumed.tracker.name == "wandb"
    assert set(resumed.eval.hooks) == {"loss", "generate"}
    assert resumed.offload.optimizer is None
    assert resumed.train.log_steps == 5
    assert resumed.method.name == "freeze"


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("method.num_layers=1", "method.num_layers: 1 (from the command line), but the resumed run has 2 (in "),
        ("optim.lr=1e-3", "optim.lr: 0.001 (from the command line), but the resumed run has 0.0003"),
        ("method=lora", "method.name: 'lora' (from method=lora on the command line), but the resumed run has 'freeze'"),
        ("precision=bf16", "precision.dtype: 'bf16' (from precision=bf16 on the command line)"),
        ("train.seed=7", "train.seed: 7 (from the command line), but the resumed run has 42"),
        ("launcher.nproc=3", "train.batch_size: 4 rows cannot be split"),
        ("train.batch_size=8", "train.batch_size: 8 (from the command line), but the resumed run has 4"),
        ("method.rank=4", "method.rank: belongs to method=lora"),
        ("run.dir=elsewhere", "run.dir: train.resume goes on in the resumed run's own folder"),
    ],
)
def test_a_resume_that_would_train_something_else_is_refused(run: Path, word: str, part: str) -> None:
    text = refusal(f"train.resume={run}", *word.split())
    assert text.startswith("config error:")
    assert part in text


def test_stage_offload_ranks_and_place_of_the_data_may_change_and_the_batch_stays(run: Path, tmp_path: Path) -> None:
    moved = rows_file(tmp_path / "moved.jsonl")
    resumed = config(
        f"train.resume={run}", "zero=stage2", "offload=none", "launcher.nproc=2", f"data.train_file={moved}"
    )
    assert (resumed.zero.stage, resumed.offload.optimizer, resumed.data.train_file) == (2, None, moved)
    train = resumed.train
    assert (train.micro_batch_size, train.grad_accum, train.batch_size) == (2, 1, 4)
    train = config(f"train.resume={run}", "train.micro_batch_size=1").train
    assert (train.micro_batch_size, train.grad_accum, train.batch_size) == (1, 4, 4)
    train = config(f"train.resume={run}", "train.grad_accum=2", "launcher.nproc=2").train
    assert (train.micro_batch_size, train.grad_accum, train.batch_size) == (1, 2, 4)


def test_what_differs_between_two_whole_configurations_is_named_with_both_values() -> None:
    one = dump(config("optim.lr=1e-3", "train.max_steps=5", "tracker=none"))
    two = dump(config("optim.lr=2e-3", "train.max_steps=9", "zero=stage3", "launcher.nproc=1"))
    assert inherit.changed(one, two) == ["optim.lr: 0.002, it was 0.001"]


def test_a_planned_stop_is_over_when_the_run_goes_on(run: Path) -> None:
    one = config("train.max_steps=6", "train.stop_after=2", f"data.train_file={run.parent}/rows.jsonl")
    write(one, run / "config.yaml")
    assert config(f"train.resume={run}").train.stop_after is None


def test_a_file_that_is_older_than_a_key_resumes_with_the_key_s_default(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    for key in ("  stop_after_s: null\n", "  hysteresis: null\n"):  # of the train and of another option's precision
        assert key in text
        text = text.replace(key, "")
    (run / "config.yaml").write_text(text)
    resumed = config(f"train.resume={run}")
    assert (resumed.train.stop_after_s, resumed.precision.hysteresis) == (None, None)


def test_a_sweep_cannot_resume(run: Path) -> None:
    assert "every trial would go on in one folder" in refusal("-m", f"train.resume={run}", "train.log_steps=1,2")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    one = config("model=tiny_qwen2", "method=lora", "method.rank=3")
    folder = tmp_path / "run" / "artifact"
    folder.mkdir(parents=True)
    card = {"model": dataclasses.asdict(one.model), "method": dataclasses.asdict(one.method), "dtype": "bf16"}
    (folder / "glmexp.json").write_text(json.dumps(card))
    return folder


def test_model_and_method_come_from_the_artifact(artifact: Path) -> None:
    for path in (artifact, artifact.parent):
        one = config("entry=evaluate", f"artifact.path={path}")
        assert (one.model.name, one.method.rank) == ("tiny_qwen2", 3)
        assert asked("entry=evaluate", f"artifact.path={path}").warnings == []
    assert config("entry=evaluate", f"artifact.path={artifact}", "model=tiny_qwen2", "method.rank=3")


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("model=tiny", "model.name: 'tiny' (from model=tiny on the command line), but the artifact has 'tiny_qwen2'"),
        ("method=full", "method.name: 'full' (from method=full on the command line), but the artifact has 'lora'"),
        ("method.rank=8", "method.rank: 8 (from the command line), but the artifact has 3"),
    ],
)
def test_a_word_that_contradicts_the_artifact_is_refused(artifact: Path, word: str, part: str) -> None:
    assert part in refusal("entry=evaluate", f"artifact.path={artifact}", word)


def test_an_artifact_brings_the_number_format_it_was_trained_in_and_another_may_be_chosen(artifact: Path) -> None:
    card = json.loads((artifact / "glmexp.json").read_text())
    (artifact / "glmexp.json").write_text(json.dumps({**card, "dtype": "fp32"}))
    words = ("entry=evaluate", f"artifact.path={artifact}")
    assert config(*words).precision.dtype == "fp32"
    assert config(*words, "precision=bf16").precision.dtype == "bf16"
    assert config(*words, "precision.dtype=bf16").precision.dtype == "bf16"
