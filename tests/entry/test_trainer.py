"""entry=trainer is entry=train through transformers' Trainer: the same numbers, its callbacks and its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
from pathlib import Path

import pytest
from torch.distributed import FileStore
from transformers import TrainerCallback, set_seed

from glmexp.config.errors import ConfigError
from glmexp.config.schema import RunConfig
from glmexp.data.prepare import prepare
from glmexp.engine import distributed
from glmexp.engine.checkpoint import Found
from glmexp.entry import train, trainer
from glmexp.entry.console import Screen
from glmexp.entry.session import Session
from glmexp.entry.training import Finished, Stopped
from glmexp.launcher import stopping
from glmexp.model.build import load_tokenizer
from glmexp.model.renderer import renderer
from glmexp.tracker.base import Guard, NoTracker
from glmexp.tracker.metrics_file import MetricsFile, read_metrics
from tests.cli import wait_until
from tests.config.helpers import refusal, rows_file
from tests.engine.cells import configure
from tests.ranks import run_on_ranks

SAME = ("train/loss", "train/grad_norm", "train/lr", "train/supervised_tokens", "train/epoch")


def _run(config: RunConfig, folder: Path) -> dict[int, dict[str, float]]:
    """The metrics by step of what all ranks do, without launcher and proof."""
    _life(config, folder, [])
    return read_metrics(folder / "metrics.jsonl") if distributed.rank() == 0 else {}


def _life(config: RunConfig, folder: Path, callbacks: list[TrainerCallback]) -> Finished | Stopped:
    """How it ended."""
    set_seed(config.train.seed)
    first = distributed.rank() == 0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text("{}")
    screen, file = Screen(active=first), folder / "metrics.jsonl"
    guard = Guard("none", NoTracker(), warn=lambda line: None)
    here = Session(config, folder, screen, MetricsFile(file) if first else None, guard)
    template = renderer(config.model.family, load_tokenizer(config.model))
    data = prepare(config.data, config.train.seed, template)
    if config.entry.name == "train":
        return train.train(here, template, data)
    return trainer._train(here, template, data, callbacks)


def both_entries(overrides: list[str], folder: str, stages: tuple[int, ...]) -> tuple[dict, list[str]]:
    """(stage, what) -> metrics by step, of train, trainer and trainer gone on from step 2; what libraries warned of."""
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    for name in ("accelerate", "transformers", "deepspeed", "DeepSpeed"):
        logging.getLogger(name).addHandler(handler)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # asked for by accelerate; the ranks have met
    found = {}
    for stage in stages:
        config = configure(*overrides, f"zero=stage{stage}")
        for entry in ("train", "trainer"):
            config = dataclasses.replace(config, entry=dataclasses.replace(config.entry, name=entry))
            found[stage, entry] = _run(config, Path(folder) / f"{entry}{stage}")
        named = Path(folder) / f"trainer{stage}" / "checkpoints" / "checkpoint-2"
        resumed = dataclasses.replace(config, train=dataclasses.replace(config.train, resume=str(named)))
        found[stage, "resumed"] = _run(resumed, Path(folder) / f"trainer{stage}")
    return found, warned


@pytest.mark.parametrize("stages", [(2, 3), pytest.param((0, 1), marks=pytest.mark.parity)], ids=str)
def test_numbers_equal_those_of_our_loop_and_go_on_from_a_checkpoint(stages: tuple[int, ...], tmp_path: Path) -> None:
    # Dropout, so that the order of random numbers is held too; 20 rows, 8 a step: blank rows and a second epoch.
    rows = rows_file(tmp_path / "rows.jsonl", 20)
    overrides = ["method.dropout=0.1", "optim.lr=1e-3", f"data.train_file={rows}", f"data.eval_file={rows}"]
    overrides += ["eval=[loss]", "eval.loss.every=2", "train.save_steps=2", "train.keep_checkpoints=3"]
    found, warned = run_on_ranks(both_entries, overrides, str(tmp_path), stages, folder=tmp_path)[0]
    for stage in stages:
        ours = found[stage, "train"]
        for what in ("trainer", "resumed"):
            theirs = found[stage, what]
            assert sorted(ours) == sorted(theirs) == [0, 1, 2, 3, 4, 5], f"stage {stage}, {what}"
            for step in range(1, 6):
                said = {name for name in ours[step] if not name.startswith("perf/save_")}
                assert said == theirs[step].keys(), f"stage {stage}, {what}, step {step}"
                for name in SAME:
                    assert theirs[step][name] == pytest.approx(ours[step][name], rel=1e-6), f"{stage} {what} {name}"
            for step in (0, 2, 4, 5):
                held_out = theirs[step]["eval/loss/loss"]
                assert held_out == pytest.approx(ours[step]["eval/loss/loss"], abs=1e-5), f"{stage} {what}"
    assert not [line for line in warned if "accumulation steps mismatch" in line]


class Preempted(TrainerCallback):
    """This rank is asked to end after step 3, and hears of it before step 4 ends."""

    def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        ear = stopping.listener()
        if state.global_step == 3 and ear is not None:
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: ear.agreed, 60, "all ranks were asked")


class Met(FileStore):
    """A store with a second connection for the thread that listens."""

    def clone(self) -> Met:
        return self


def three_lives(overrides: list[str], folder: str) -> list[tuple[str, int | None]]:
    """Planned stop with a time line; preemption after going on; the rest. (How it ended, its exit code) of each."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")
    run = Path(folder, "run")
    config = configure("entry=trainer", *overrides)
    first = dataclasses.replace(config.train, stop_after=2, profile=True)
    auto = dataclasses.replace(config.train, resume="auto")
    ends = [_life(dataclasses.replace(config, train=first), run, [])]
    stopping.listen(run, distributed.rank())
    ear = stopping.listener()
    assert ear is not None
    ear.offer(Met(f"{folder}/asked", distributed.world_size()), distributed.world_size(), grace_s=300)
    ends.append(_life(dataclasses.replace(config, train=auto), run, [Preempted()]))
    stopping._listener = None  # the next life is another process, which nobody has asked anything
    ends.append(_life(dataclasses.replace(config, train=auto), run, []))
    return [(type(end).__name__, getattr(end, "exit_code", None)) for end in ends]


def test_planned_stops_signals_and_the_time_line_are_those_of_our_loop(tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl", 20)
    overrides = ["optim.lr=1e-3", f"data.train_file={rows}", f"data.eval_file={rows}"]
    overrides += ["eval=[loss]", "eval.loss.every=1", "zero=stage2"]
    for ends in run_on_ranks(three_lives, overrides, str(tmp_path), folder=tmp_path):
        assert ends == [("Stopped", 0), ("Stopped", 75), ("Finished", None)]
    run = tmp_path / "run"
    assert sorted(read_metrics(run / "metrics.jsonl")) == [0, 1, 2, 3, 4, 5], "each step once"
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["checkpoint-2", "checkpoint-4"]
    line = json.loads((run / "profile" / "summary.json").read_text())
    assert line["steps"] == 2
    assert all(line["seconds"][phase] > 0 for phase in ("forward", "backward", "optimizer", "eval", "save"))


def test_a_checkpoint_of_other_ranks_or_another_stage_is_refused_with_both_numbers() -> None:
    found = Found(Path("run/checkpoints/checkpoint-2"), {"ranks": 2, "config": {"zero": {"stage": 2}}}, [])
    with pytest.raises(ConfigError) as caught:
        trainer._same_engine(found, configure("zero=stage3"))
    for key, now, before in (("launcher.nproc", 1, 2), ("zero.stage", 3, 2)):
        assert (
            f"{key}: {now}, but run/checkpoints/checkpoint-2 was saved with {before}, and DeepSpeed's checkpoints fit "
            f"no other\n    -> {key}={before}; checkpoints of entry=train fit all" in caught.value.report()
        ), caught.value.report()


class Quiet(TrainerCallback):
    """A callback of a user."""


class Choosy(TrainerCallback):
    """One that cannot be made without an argument."""

    def __init__(self, metric: str) -> None:
        self.metric = metric


def test_callbacks_are_found_by_name_and_mistakes_are_named() -> None:
    assert [type(one) for one in trainer.own_callbacks([f"{__name__}:Quiet"])] == [Quiet]
    for name, words in {
        "no_such_module:Stop": "trainer.callbacks: cannot import 'no_such_module': No module named 'no_such_module'",
        f"{__name__}:Loud": f"trainer.callbacks: {__name__} has no Loud",
        "pathlib:Path": "trainer.callbacks: pathlib:Path is no transformers.TrainerCallback",
        f"{__name__}:Choosy": f"trainer.callbacks: {__name__}:Choosy() failed",
    }.items():
        with pytest.raises(ConfigError) as caught:
            trainer.own_callbacks([name])
        assert words in caught.value.report()


def test_what_the_trainer_cannot_do_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("entry: {name: train}\n")
    report = refusal("entry=trainer", f"train.resume={tmp_path}", "trainer.callbacks=[Stop]", "eval=[loss]")
    assert f"train.resume: {tmp_path} was trained by entry=train, and entry=trainer cannot read its" in report
    assert "trainer.callbacks: 'Stop' is not module:Class" in report
    best = refusal("entry=trainer", "train.save_steps=2", "train.keep_best=eval/loss/loss", "eval.loss.every=2")
    assert "train.keep_best: entry=trainer keeps its newest checkpoints alone" in best
    assert "trainer.callbacks: without effect under entry=train" in refusal("trainer.callbacks=[a:B]")
