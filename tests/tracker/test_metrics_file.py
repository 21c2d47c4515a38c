from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from glmexp.config.errors import DataError
from glmexp.tracker.metrics_file import MetricsFile, read_metrics


def test_lines_keep_all_digits_and_words_for_what_json_has_no_number_for(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(1, {"train/loss": 1 / 3, "a": math.nan, "b": math.inf, "c": -math.inf, "n": 7})
    text = file.path.read_text()
    assert text == '{"step": 1, "train/loss": 0.3333333333333333, "a": "nan", "b": "inf", "c": "-inf", "n": 7}\n'
    back = read_metrics(file.path)[1]
    assert math.isnan(back.pop("a"))
    assert back == {"train/loss": 1 / 3, "b": math.inf, "c": -math.inf, "n": 7}


def test_lines_of_one_step_are_read_together(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(0, {"eval/loss/loss": 3.0})
    file.write(1, {"train/loss": 2.0})
    file.write(1, {"eval/loss/loss": 2.5})
    assert read_metrics(file.path) == {0: {"eval/loss/loss": 3.0}, 1: {"train/loss": 2.0, "eval/loss/loss": 2.5}}


@pytest.mark.parametrize("tail", ["", '{"step": 9, "train/lo'], ids=["whole", "killed_while_writing"])
def test_a_resume_leaves_each_step_once(tmp_path: Path, tail: str) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate_after(0)
    for step in range(1, 9):
        file.write(step, {"train/loss": 1 / step})
    with file.path.open("a") as stream:
        stream.write(tail)
    assert list(read_metrics(file.path)) == list(range(1, 9))
    before = file.path.read_text().splitlines()[:5]
    file.truncate_after(5)
    assert file.path.read_text().splitlines() == before
    for step in range(6, 13):
        file.write(step, {"train/loss": 0.0})
    steps = [json.loads(line)["step"] for line in file.path.read_text().splitlines()]
    assert steps == list(range(1, 13))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: broken JSON"):
        read_metrics(path)
