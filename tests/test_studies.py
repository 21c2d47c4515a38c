"""Each study of experiments/ composes, says what it found, and has the table of exactly its own options beside it."""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from glmexp.compare.runs import Run
from tests.config.helpers import asked

FOLDER = Path(__file__).parents[1] / "experiments"


def _module() -> Any:
    spec = util.spec_from_file_location("glmexp_studies", FOLDER / "studies.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


studies = _module()


@pytest.mark.parametrize("name", studies.names())
def test_study_has_its_head_and_the_table_of_its_options(name: str) -> None:
    assert list(studies.contradictions(studies.read(name))) == []
    assert f"`{name}`" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", studies.names())
def test_study_composes_shortened(name: str, tmp_path: Path) -> None:
    """The last value of each axis: the others are options that have tests of their own."""
    study = studies.read(name)
    for words, _ in studies.shortened(study, tmp_path)[:1]:
        own = {word.partition("=")[0] for word in words}
        last = [f"{key}={values[-1]}" for key, values in study.grid.items() if key not in own]
        (trial,) = asked(*words[3:], *last).trials
    assert trial.train.max_steps == 2
    assert trial.run.name == name


def test_commands_of_a_shortened_study_stay_in_its_folder(tmp_path: Path) -> None:
    commands = studies.shortened(studies.read("resume"), tmp_path)
    assert [code for _, code in commands] == [0, 75, 0]
    assert all(f"hydra.sweep.dir={tmp_path}/resume/" in " ".join(words) for words, _ in commands)
    assert "train.stop_after=1" in commands[1][0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"grid": {"method.rank": [1, 4, 32], "train.seed": [1, 2]}}, "options of the table"),
        ({"fixed": {"train.max_steps": 31, "eval.generate.max_prompts": 32}}, "options of the table"),
        ({"grid": {"method.rank": [1, 4, 16], "train.seed": [1, 3]}}, "seeds of the table"),
        ({"Columns": "eval/loss/loss"}, "results of the table"),
        ({"Expected": "a loss of 7.77"}, "expected 7.77, which is no number of the table"),
        ({"Smoke": ""}, "the head has no Smoke"),
        ({"Command": "python -m glmexp -m +experiments=methods"}, "no command of this study"),
        ({"Measured": "not here yet"}, "and there is a table"),
    ],
)
def test_file_that_is_not_its_tables_is_told(change: dict[str, Any], told: str) -> None:
    study = studies.read("lora_rank")
    head = {key: value for key, value in change.items() if key in studies.HEAD}
    rest = {key: value for key, value in change.items() if key not in studies.HEAD}
    study = dataclasses.replace(study, head=study.head | head, **rest)
    (found,) = studies.contradictions(study)
    assert told in found


def test_table_is_refused_from_runs_of_another_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    study = studies.read("offload")
    (options, *_) = study.trials()
    config = studies._composed(study, options, None)
    monkeypatch.setattr(studies, "_composed", lambda *_: config)
    other = Run("mine", Path(), None, "finished", "", config | {"optim.weight_decay": 0.5}, {}, {}, {"train/loss": 1.0})
    with pytest.raises(SystemExit, match="mine differs in optim\\.weight_decay"):
        studies._row(study, options, [other], ())
    same = dataclasses.replace(other, config=config, results=dict.fromkeys(study.columns, 1.0))
    assert studies._row(study, options, [same], ()).runs == [same]
    with pytest.raises(SystemExit, match="mine is running"):
        studies._row(study, options, [dataclasses.replace(same, state="running")], ())


def test_side_of_a_speed_bench_is_a_row_of_its_study() -> None:
    """zero3_speed.py records its sides as commands; paths and the number of steps are no part of what is compared."""
    study = studies.read("buckets_true_size")
    line = json.loads((FOLDER / "bench/results/two_gpus_h200.jsonl").read_text(encoding="utf-8").splitlines()[0])
    shapes = "model=chatglm3 model.init=random model.sizes.num_layers=8 method=full method.lr=1e-5 precision=bf16"
    data = "data=alpaca data.train_file=WORK/rows.jsonl data.max_length=8192 data.packing=true"
    steps = "train.micro_batch_size=1 train.grad_accum=4 train.max_steps=100000 eval=none tracker=none launcher.nproc=2"
    words = f"{shapes} zero=stage2 {data} {steps} run.dir=WORK/stage2 run.overwrite=true"
    run = studies._bench_run(line | {"command": f"python -m glmexp {words}"})
    larger, smaller = ({"zero.reduce_bucket_size": size} for size in (200000000, 50000000))
    row = studies._row(study, study.fixed | larger, [run], studies._NOT_COMPARED)
    assert row.runs[0].results["perf/tokens_per_s"] == line["tokens_per_s"]
    with pytest.raises(SystemExit, match=r"stage2 differs in zero\.reduce_bucket_size"):
        studies._row(study, study.fixed | smaller, [run], studies._NOT_COMPARED)
