"""The table of a sweep: what differs, the metrics, the state; best first."""

from __future__ import annotations

import csv
from pathlib import Path

from glmexp.config.schema import SweepSection
from glmexp.launcher.summary import compared_by, ranked, table, write_csv
from glmexp.launcher.trials import SweepState, Trial


def settings(metric: str | None = None, direction: str = "minimize") -> SweepSection:
    return SweepSection("grid", metric, direction, [], None, None)  # type: ignore[arg-type]


def sweep(root: Path) -> SweepState:
    def trial(number: int, state: str, **metrics: float | str) -> Trial:
        values = {"method.rank": str(number), "zero": "stage2"}
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        return Trial(number, f"id{number}", values, f"{number}_folder", state, named)

    trials = [
        trial(0, "finished", train__loss=2.0, eval__loss__loss=1.25, eval__rouge__rouge_l=10.0),
        trial(1, "out_of_memory"),
        trial(2, "finished", train__loss=1.0, eval__loss__loss=1.123456789, eval__rouge__rouge_l=5.0),
        trial(3, "finished", train__loss=0.5, eval__loss__loss="nan"),
        trial(4, "waiting"),
    ]
    return SweepState(root, {"name": "grid"}, ["-m"], trials)


def test_rows_are_sorted_by_the_metric_and_its_direction_and_what_has_none_comes_last(tmp_path: Path) -> None:
    trials = sweep(tmp_path).trials
    assert compared_by(settings(), trials) == "eval/loss/loss"
    assert [one.number for one in ranked(settings(), trials)] == [2, 0, 1, 3, 4]
    assert [one.number for one in ranked(settings("eval/rouge/rouge_l", "maximize"), trials)] == [0, 2, 1, 3, 4]
    assert [one.number for one in ranked(settings("train/loss"), trials)] == [3, 2, 0, 1, 4]
    assert compared_by(settings(), trials[1:2]) is None


def test_the_table_has_only_what_differs_and_the_file_all_digits(tmp_path: Path) -> None:
    state = sweep(tmp_path)
    lines = table(state, settings())
    assert lines[0].split() == [
        "trial",
        "method.rank",
        "eval/loss/loss",
        "eval/rouge/rouge_l",
        "train/loss",
        "state",
        "folder",
    ]
    assert lines[1].split() == ["2", "2", "1.12346", "5", "1", "finished", "2_folder"]
    assert lines[3].split() == ["1", "1", "out", "of", "memory", "1_folder"]
    rows = list(csv.DictReader(write_csv(state, settings()).open()))
    assert rows[0]["eval/loss/loss"] == "1.123456789"
    assert rows[2]["state"] == "out_of_memory"
    assert rows[3]["eval/loss/loss"] == "nan"
    assert "zero" not in rows[0]
