"""kill -9 at any moment, then the same line again: the run ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from glmexp.config.errors import ArtifactError, ConfigError, DataError, UserError
from glmexp.config.load import dump
from glmexp.engine.checkpoint import Found
from glmexp.entry import resume
from glmexp.entry.evaluation import Evaluation
from glmexp.tracker.metrics_file import MetricsFile
from tests.cli import alive, forked, metrics, started, status, wait_until
from tests.config.helpers import config
from tests.entry.kill_plugin import FILE

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
LINE = (
    "launcher.nproc=2", "precision=fp32", "tracker=none", f"train.max_steps={STEPS}", "train.save_steps=2",
    "train.micro_batch_size=1", "train.grad_accum=2", "method.dropout=0.1", "eval=[loss]", "eval.loss.every=3",
    "eval.batch_size=4", "train.resume=auto", "data.packing=true", "data.max_length=64",
)  # fmt: skip
"""Packed rows, dropout, accumulation, 7 steps an epoch."""


def line(stage: int, folder: Path) -> tuple[str, ...]:
    """The command line of one life of a run."""
    rows = folder.parent / "rows.jsonl"
    if not rows.exists():
        text = "".join(
            f'{{"instruction": "Lamp {number}?", "output": "{"red green blue "[: 4 + number % 9]}"}}\n'
            for number in range(90)
        )
        rows.write_text(text, encoding="utf-8")
    data = (f"data.train_file={rows}", f"data.eval_file={rows}")
    return (*LINE, *data, f"zero=stage{stage}", f"run.dir={folder}")


def curve(run: Path) -> dict[int, float]:
    """Training losses by step; each step stands once."""
    lines = [one for one in metrics(run) if "train/loss" in one]
    assert [one["step"] for one in lines] == list(range(1, STEPS + 1)), "each step once"
    return {one["step"]: one["train/loss"] for one in lines}


def held_out(run: Path) -> dict[int, float]:
    """Held-out losses by step; each evaluation stands once."""
    lines = [one for one in metrics(run) if "eval/loss/loss" in one]
    assert [one["step"] for one in lines] == [0, 3, 6, 9, STEPS]
    return {one["step"]: one["eval/loss/loss"] for one in lines}


def undisturbed(stage: int, folder: Path) -> Path:
    """The run that all others are held against."""
    done = forked(*line(stage, folder), folder=folder.parent)
    assert done.returncode == 0, done.stderr
    return folder


def disturbed(stage: int, folder: Path, kills: list[str]) -> None:
    """A life for each kill, and one more that comes to the end."""
    marks = folder.parent
    for kill in kills:
        before = _killed(marks)
        variables = {
            "GLMEXP_PLUGINS": "tests.entry.kill_plugin",
            "PYTHONPATH": str(ROOT),
            "KILL_AT": kill,
            "KILL_MARKS": str(marks),
        }
        with started(*line(stage, folder), folder=marks, **variables) as process:
            out, err = process.communicate(timeout=240)
            wait_until(lambda: not alive(process), 60, "ranks of a killed parent end")
        assert _killed(marks) == before + 1, f"{kill} did not strike:\n{out}\n{err}"
        assert process.returncode != 0
        assert status(folder)["state"] != "finished"
    done = forked(*line(stage, folder), folder=marks)
    assert done.returncode == 0, f"{kills}\n{done.stdout}\n{done.stderr}"


def _killed(marks: Path) -> int:
    return len((marks / FILE).read_text().splitlines()) if (marks / FILE).exists() else 0


def assert_same(run: Path, other: Path) -> None:
    """Bit-equal weights, losses and evaluations."""
    one, two = (load_file(folder / "artifact" / "adapter_model.safetensors") for folder in (run, other))
    assert one.keys() == two.keys()
    assert all(bool((one[name] == two[name]).all()) for name in one)
    assert curve(run) == curve(other)
    assert held_out(run) == held_out(other)
    assert status(run)["state"] == status(other)["state"] == "finished"
    assert not list((run / "checkpoints").glob(".step-*")), "nothing of a save that was cut off stays"


def test_two_kills_leave_no_trace(tmp_path: Path) -> None:
    """The short version: one in the middle of a rank's file, one of the parent while an evaluation runs."""
    whole = undisturbed(2, tmp_path / "whole")
    disturbed(2, tmp_path / "killed", ["data:6:1", "eval:9:parent"])
    assert_same(tmp_path / "killed", whole)


KEEPS = ("train.save_steps=2", "train.keep_best=eval/loss/loss", "eval.loss.every=2")


def test_an_evaluation_that_was_recorded_before_a_kill_is_judged_and_remembered(tmp_path: Path) -> None:
    """The checkpoint of its step was written before it, perhaps still when it ended: nobody may have crowned it yet."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(4, {"train/loss": 2.0})
    file.write(4, {"eval/loss/loss": 1.5})
    here: Any = SimpleNamespace(metrics=file, config=config(*KEEPS))
    judged, ran = [], []
    saver: Any = SimpleNamespace(judge=lambda *found: judged.append(found))
    keeper = resume.Keeper(here, saver, plan=Any, fixed={}, done=4, saved=4)  # type: ignore[arg-type]  # not used
    evaluation = Evaluation(*[None] * 10)  # type: ignore[arg-type]  # nothing is run
    evaluation.run = lambda step, all_hooks: ran.append(step) or {"eval/loss/loss": 9.0}  # type: ignore[method-assign]
    evaluation.train_losses[:] = [3.0, 2.0]
    keeper.judge(keeper.done, resume.evaluate(here, evaluation, keeper.done))
    assert (judged, ran) == ([(4, "eval/loss/loss", 1.5)], [])
    assert (evaluation.history, evaluation.train_losses) == ([(4, 1.5, 2.5)], [])
    keeper.done = keeper.saved = 6
    keeper.judge(keeper.done, resume.evaluate(here, evaluation, keeper.done))
    assert (judged[1:], ran) == ([(6, "eval/loss/loss", 9.0)], [6]), "none in the records: run now"


def chains(stage: int, kills: int = 20, a_chain: int = 4) -> list[list[str]]:
    """Kills by seed: half on the parent, a quarter or more inside of a save, some inside of an evaluation."""
    dice = random.Random(f"kills {stage}")
    saves = ["data", "state", "named", "data", "state", "named"]
    moments = [*saves, *["eval"] * 4, *dice.choices(["start", "accumulated"], k=kills - len(saves) - 4)]
    victims = ["parent", "rank"] * (kills // 2)
    dice.shuffle(moments)
    dice.shuffle(victims)
    found = []
    for first in range(0, kills, a_chain):
        part = []
        for place, (moment, victim) in enumerate(
            zip(moments[first : first + a_chain], victims[first : first + a_chain], strict=True)
        ):
            low = 1 + place * STEPS // a_chain  # each life comes further than the one before
            within = range(low, low + STEPS // a_chain)
            grid = (
                [step for step in within if step % {"eval": 3}.get(moment, 2) == 0]
                if moment in ("eval", *saves)
                else within
            )
            step = dice.choice(list(grid) or [low])
            number = 0 if moment in ("state", "named") else dice.randrange(2)
            part.append(f"{moment}:{step}:{'parent' if victim == 'parent' else number}")
        found.append(part)
    return found


@pytest.mark.kill
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("stage", [2, 3])
def test_twenty_kills_leave_no_trace(stage: int, tmp_path: Path) -> None:
    """The whole matrix: 20 kills a stage, in 5 runs of 4 kills each (`make kill`; minutes, not part of CI)."""
    whole = undisturbed(stage, tmp_path / "whole")
    for number, kills in enumerate(chains(stage)):
        disturbed(stage, tmp_path / f"killed-{number}", kills)
        assert_same(tmp_path / f"killed-{number}", whole)
        print(f"stage {stage}: {kills} leave no trace", flush=True)


def test_the_matrix_has_the_kills_that_it_promises() -> None:
    for stage in (2, 3):
        kills = [kill for chain in chains(stage) for kill in chain]
        assert len(kills) == 20
        assert sum(kill.endswith(":parent") for kill in kills) == 10
        assert sum(kill.split(":")[0] in ("data", "state", "named") for kill in kills) >= 5
        assert sum(kill.startswith("eval") for kill in kills) >= 3


def _state(**data: object) -> dict[str, object]:
    one = {"files": {"rows.jsonl": "a" * 64}, "examples": 8, "rows": "r1", "template": "t" * 64, **data}
    return {"config": dump(config("train.max_steps=5")), "data": one, "base": "b1", "environment": None}


@pytest.mark.parametrize(
    ("now", "kind", "said"),
    [
        ({"config": dump(config("optim.lr=7e-4"))}, ConfigError, "optim.lr: 0.0007, it was 0.005"),
        (
            _state(rows="r2", files={"rows.jsonl": "c" * 64}, examples=9),
            DataError,
            "rows.jsonl has sha256 cccccccccccc now, aaaaaaaaaaaa in the checkpoint (9 examples now, 8 then)",
        ),
        (
            _state(rows="r2", template="u" * 64),
            DataError,
            "chat template and tokenizer have the fingerprint uuuuuuuuuuuu now, tttttttttttt in the checkpoint",
        ),
        ({"base": "b2"}, ArtifactError, "its frozen weights have the digest b2, those of checkpoints/step-3 had b1"),
    ],
)
def test_what_has_changed_since_the_checkpoint_is_named_with_both_values(
    now: dict[str, object], kind: type[UserError], said: str
) -> None:
    found = Found(Path("checkpoints/step-3"), {**_state(), "step": 3}, [])
    with pytest.raises(kind) as caught:
        resume.same_run(found, {**_state(), **now})
    assert said in caught.value.report()


def test_steps_place_and_tracker_may_change_and_a_moved_file_of_the_same_rows() -> None:
    found = Found(Path("checkpoints/step-3"), {**_state(), "step": 3}, [])
    later = dump(config("train.max_steps=9", "train.save_steps=2", "tracker=none", "zero=stage3", "data.num_workers=0"))
    resume.same_run(found, {**_state(files={"moved.jsonl": "a" * 64}), "config": later})


def test_a_run_that_ends_before_its_checkpoint_is_refused_and_not_recorded_as_fewer_steps() -> None:
    found = Found(Path("checkpoints/step-12"), {**_state(), "step": 12}, [])
    resume.within(found, 12)
    with pytest.raises(ConfigError) as caught:
        resume.within(found, 8)
    assert "checkpoints/step-12 has 12 steps behind it, and this run ends after 8" in caught.value.report()
