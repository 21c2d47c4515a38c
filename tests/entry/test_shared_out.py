"""Two ranks that share one network evaluate and answer as one that has all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import forked, metrics, runs

WORDS = ("model=tiny", "precision=fp32", "tracker=none")


def evaluated(folder: Path, *words: str) -> tuple[dict[str, float], list[str]]:
    done = forked(
        "entry=evaluate", "eval=[loss,generate]", "eval.generate.max_prompts=3", *WORDS, *words, folder=folder
    )
    assert done.returncode == 0, done.stderr
    (run,) = runs(folder)
    (line,) = [line for line in metrics(run) if "eval/loss/loss" in line]
    samples = (run / "samples" / "step-0.jsonl").read_text().splitlines()
    return line, [json.loads(sample)["generated"] for sample in samples]


def answered(folder: Path, *words: str) -> list[str]:
    (folder / "p.jsonl").write_text('{"prompt": "12 + 30?"}\n{"prompt": "1 + 1?"}\n{"prompt": "7 + 2?"}\n')
    given = ("generate.prompts_file=p.jsonl", "generate.batch_size=2", "generate.output=a.jsonl")
    done = forked("entry=generate", *given, *WORDS[:2], *words, folder=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["answer"] for line in (folder / "a.jsonl").read_text().splitlines()]


@pytest.mark.matrix
def test_two_ranks_evaluate_and_answer_as_one(tmp_path: Path) -> None:
    ways: dict[str, tuple[str, ...]] = {
        "one": ("launcher.nproc=1",),
        "two": ("placement=tensor_parallel", "launcher.nproc=2"),
        "slots": ("placement=tensor_parallel", "launcher.nproc=2", "decoding.way=static"),
    }
    found = {}
    for name, words in ways.items():
        for part in ("evaluate", "generate"):
            (tmp_path / name / part).mkdir(parents=True)
        numbers, samples = evaluated(tmp_path / name / "evaluate", *words)
        found[name] = (numbers, samples, answered(tmp_path / name / "generate", *words))
    numbers, samples, answers = found["one"]
    assert len(samples) == len(answers) == 3
    for name in ("two", "slots"):
        assert found[name][0]["eval/loss/loss"] == pytest.approx(numbers["eval/loss/loss"], abs=1e-5)
        assert found[name][0]["eval/generate/exact_match"] == numbers["eval/generate/exact_match"]
        assert found[name][1:] == (samples, answers), name
