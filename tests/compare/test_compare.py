"""``python -m glmexp.compare``: from run folders alone to a table that hides nothing."""

from __future__ import annotations

import csv
import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glmexp.compare import terminal
from glmexp.compare.__main__ import main
from glmexp.compare.pairs import NO_EVIDENCE, differences, read_lines, scores
from glmexp.compare.runs import read_all
from glmexp.compare.table import table
from glmexp.compare.where import matches, parse
from glmexp.eval.answers import write_table
from tests.compare.folders import EXAMPLES, write_lines, write_run, write_sweep

RANK, BUCKET, SEED = "method.rank", "zero.reduce_bucket_size", "train.seed"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank x bucket: two finished trials, one out of memory, one never started."""
    root = tmp_path_factory.mktemp("outputs") / "grid"
    trials: list[dict[str, Any]] = []
    for number, (rank, bucket) in enumerate([(4, 10**6), (8, 10**6), (4, 10**9), (8, 10**9)]):
        state = ["finished", "finished", "out_of_memory", "waiting"][number]
        trial = {"folder": f"{number}_trial", "values": {RANK: str(rank), BUCKET: str(bucket)}, "state": state}
        if state != "waiting":
            failed = state != "finished"
            error = MemoryError("no room for 4 GiB") if failed else None
            more: dict[str, Any] = {"state": "failed", "steps": 3, "error": error, "answers": False} if failed else {}
            values = {RANK: rank, BUCKET: bucket, "method.lr": 1e-3 * rank, "optim.lr": 1e-3 * rank}
            write_run(root / f"{number}_trial", values, loss=0.8 / rank + 0.2, noise=number, **more)
            trial["reason"] = "MemoryError: no room for 4 GiB" if failed else ""
        trials.append(trial)
    return write_sweep(root, trials)


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))


def test_a_sweep_is_told_with_what_differs_and_what_came_of_each_trial(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep), "--csv", str(tmp_path / "t.csv"), "--parquet", str(tmp_path / "t.parquet")]) == 0
    rows = rows_of(tmp_path / "t.csv")
    assert [(row["run"], row["state"]) for row in rows] == [
        ("grid#1", "finished"),  # the lowest loss first
        ("grid#0", "finished"),
        ("grid#2", "out_of_memory"),
        ("grid#3", "waiting"),
    ]
    assert list(rows[0])[:5] == ["run", "label", RANK, BUCKET, "method.lr"]
    assert "optim.lr" not in rows[0], "it follows the method's"
    assert float(rows[0]["eval/loss/loss"]) == 0.8 / 8 + 0.2
    assert rows[2]["best/loss"] == rows[2]["eval/loss/loss"] == "3.0", "measured before the first step"
    assert rows[2]["reason"] == "MemoryError: no room for 4 GiB"
    assert (rows[3]["eval/loss/loss"], rows[3][RANK]) == ("", "8")
    assert (rows[0]["model/trainable_parameters"], rows[0]["time/wall_s"]) == ("12288.0", "100.0")
    out = capsys.readouterr().out
    assert "out of memory: MemoryError: no room for 4 GiB" in out
    assert "12,288" in out
    from pyarrow import parquet

    kept = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert [(row["run"], row[RANK]) for row in kept] == [("grid#1", 8), ("grid#0", 4), ("grid#2", 4), ("grid#3", 8)]
    assert [row["eval/loss/loss"] for row in kept] == [0.8 / 8 + 0.2, 0.4, 3.0, None]
    assert kept[2]["mem/peak_bytes"] == (2 + 4 / 16 + 1) * 2**30


def test_best_and_final_loss_time_and_speed_are_those_of_the_metrics_file(tmp_path: Path) -> None:
    place = write_run(tmp_path / "run", answers=False, steps=2)
    write_lines(
        place / "metrics.jsonl",
        [
            {"step": 0, "eval/loss/loss": 3.0},
            {"step": 2, "train/loss": 2.0, "perf/step_s": 9.0, "perf/tokens_per_s": 10.0, "mem/peak_bytes": 5.0},
            {"step": 4, "train/loss": 1.0, "perf/step_s": 1.0, "perf/tokens_per_s": 100.0, "mem/peak_bytes": 7.0},
            {"step": 4, "eval/loss/loss": 0.5},
            {"step": 6, "train/loss": "nan", "perf/step_s": 2.0, "perf/tokens_per_s": 50.0, "mem/peak_bytes": 6.0},
            {"step": 6, "eval/loss/loss": "nan"},
        ],
    )
    (run,) = read_all([place])
    found = run.results
    assert (found["best/loss"], found["best/step"], str(found["eval/loss/loss"])) == (0.5, 4, "nan")
    assert found["perf/tokens_per_s"] == 75, "the first step, which compiles, is left out"
    assert (found["time/train_s"], found["mem/peak_bytes"], found["train/steps"]) == (2 * 9 + 2 * 1 + 2 * 2, 7, 6)
    rows = table(read_all([place, write_run(tmp_path / "good", {RANK: 4}, loss=0.9)]))
    rows.sort("best/loss", descending=True)
    assert [row.config[RANK] for row in rows.rows] == [4, 8]
    rows.sort("eval/loss/loss", descending=True)
    assert [row.config[RANK] for row in rows.rows] == [4, 8], "nan is never the best"


def test_seeds_of_one_configuration_are_one_row_with_mean_and_spread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, loss in enumerate((0.5, 0.6, 0.7)):
        write_run(tmp_path / f"a{seed}", {SEED: seed}, loss=loss, answers=False)
    write_run(
        tmp_path / "a3", {SEED: 3}, loss=9.0, steps=2, state="failed", error=RuntimeError("broken"), answers=False
    )
    write_run(tmp_path / "b", {RANK: 16}, loss=0.55, answers=False)
    assert main([str(tmp_path), "--csv", str(tmp_path / "t.csv")]) == 0
    one, other = rows_of(tmp_path / "t.csv")
    assert (one["label"], other["label"], one["state"]) == ("rank=16", "rank=8", "finished")
    assert (float(other["eval/loss/loss"]), float(other["eval/loss/loss:sd"])) == (
        pytest.approx(0.6),
        pytest.approx(0.1),
    )
    assert (other["eval/loss/loss:seeds"], other["state"]) == ("3", "3 finished, 1 failed")
    assert "0.6 ± 0.1 (3)" in capsys.readouterr().out
    assert main([str(tmp_path), "--runs", "--csv", str(tmp_path / "t.csv")]) == 0
    assert len(rows_of(tmp_path / "t.csv")) == 5
    write_run(tmp_path / "a0_again", {SEED: 0}, loss=0.5, answers=False)
    assert main([str(tmp_path), "--csv", str(tmp_path / "t.csv")]) == 0
    counts = [row["eval/loss/loss:seeds"] for row in rows_of(tmp_path / "t.csv")]
    assert sorted(counts) == ["1", "1", "3"], "a seed that is run again is no fourth seed"


def test_runs_that_did_not_end_are_shown_as_what_they_are(tmp_path: Path) -> None:
    write_run(tmp_path / "1", {RANK: 1}, state="running", steps=4, answers=False)
    write_run(tmp_path / "2", {RANK: 2}, state="running", steps=4, answers=False)
    write_run(tmp_path / "3", {RANK: 3}, state="stopped", answers=False)
    broken = write_run(
        tmp_path / "4", {RANK: 4}, state="failed", error=RuntimeError("CUDA out of memory"), answers=False
    )
    (broken / "model.json").unlink()  # left by an older version
    with (tmp_path / "2" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = read_all([tmp_path])
    assert [run.state for run in runs] == ["unfinished", "running", "stopped", "out_of_memory"]
    assert runs[3].reason == "RuntimeError: CUDA out of memory"
    assert "model/trainable_parameters" not in runs[3].results


@pytest.mark.parametrize(
    ("conditions", "kept"),
    [
        (["method.rank>=8"], [1, 3]),
        (["rank>=8 and state=finished"], [1]),
        (["rank>=8", "state != finished"], [3]),
        (["rank=4"], [0, 2]),
        (["rank==4.0 and reduce_bucket_size>1e6"], [2]),
        (["eval/loss/loss<0.5"], [0, 1]),
        (["eval/loss/loss=null"], [3]),
        (["eval/loss/loss!=null and label~RANK=4"], [0, 2]),
        (["reason ~ 'no room'"], [2]),
        (["zero.overlap_comm=true"], [0, 1, 2]),
        (["optim.betas=[0.9, 0.999]"], [0, 1, 2]),
        (["data.name=demo and rank<100"], [0, 1, 2]),
    ],
)
def test_conditions(sweep: Path, conditions: list[str], kept: list[int]) -> None:
    """tests/compare/test_page.py holds the page's own reading of the same words against these."""
    rows = table(read_all([sweep]))
    found = rows.where(conditions).rows
    assert [row.runs[0].name for row in found] == [f"grid#{number}" for number in kept]
    assert all(matches(parse(conditions, rows.keys), row.cells) for row in found)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--where", "methd.rank=4"], "--where methd.rank: no row has such a key\n    -> did you mean method.rank?"),
        (["--where", "rank"], "--where 'rank': is no condition\n    -> KEY OP VALUE, joined by 'and'"),
        (["--where", "rank>big"], "'big' is no number\n    -> = != and ~ compare texts"),
        (["--where", "rank=5"], "--where 'method.rank=5': no row is left\n    -> method.rank is 4 (2), 8 (2)"),
        (["--where", "state=finishd and rank=4"], "-> state is finished (2), out_of_memory (1), waiting (1)"),
        (["--where", "state=waiting and rank=4"], "fits some rows, but none that the other conditions leave"),
        (["--where", "name=tiny"], "--where name: may be data.name, entry.name"),
        (["--sort", "los"], "--sort los: no row has such a key"),
        (["--columns", "speed"], "--columns speed: no row has such a key"),
        (["--axes", "rank", "bucket"], "--axes bucket: no row has such a key"),
        (["--baseline", "rank=5"], "--baseline 'rank=5': fits no run"),
        (["--baseline", "rank"], "fits several runs"),
        (["--csv", "/dev/null/t.csv"], "--csv /dev/null/t.csv: /dev/null is no folder\n    -> mkdir -p /dev/null"),
        (["--html", "/dev"], "--html /dev: is a folder\n    -> a file in it, such as /dev/compared"),
    ],
)
def test_mistakes_on_the_line_are_told_with_a_way_out(
    sweep: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep), *words]) == 2
    assert told in capsys.readouterr().err


def test_a_misspelt_folder_is_not_made(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep), "--html", str(tmp_path / "nope" / "x.html")]) == 2
    told = capsys.readouterr()
    assert f"{tmp_path / 'nope'} is no folder" in told.err
    assert told.out == "", "told before anything else is"
    assert not (tmp_path / "nope").exists()


def test_below_a_folder_only_trainings_and_evaluations_are_compared(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for entry in ("train", "trainer", "evaluate", "generate", "bench"):
        more = {"optim.weight_decay": 0.5} if entry == "bench" else {}
        write_run(tmp_path / entry, {"entry.name": entry, **more}, answers=False)
    start = write_run(tmp_path / "no_start", state="failed", error=RuntimeError("no"), answers=False)
    (start / "metrics.jsonl").write_text("")
    file = tmp_path / "t.csv"
    assert main([str(tmp_path), "--csv", str(file), "--runs"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("3 runs are not shown (--all): 1 bench, 1 generate, 1 failed before the first step\n")
    assert {row["run"].split("/")[1] for row in rows_of(file)} == {"train", "trainer", "evaluate"}
    assert "optim.weight_decay" not in told, "columns come from what is shown"
    assert main([str(tmp_path), "--csv", str(file), "--runs", "--all"]) == 0
    assert len(rows_of(file)) == 6
    assert main([str(start), str(tmp_path / "bench"), "--csv", str(file)]) == 0
    assert len(rows_of(file)) == 2, "what is named is shown"
    assert main([str(sweep.parent), "--csv", str(file)]) == 0
    assert len(rows_of(file)) == 4, "a trial that failed or waits is one of its sweep"
    others = tmp_path / "others"
    write_run(others / "bench", {"entry.name": "bench"}, answers=False)
    assert main([str(others)]) == 2
    assert "only 1 bench\n    -> --all, or name their folders" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 100])
def test_a_terminal_gets_whole_cells_and_the_number_of_what_is_left_out(
    sweep: Path, width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep), "--width", str(width)]) == 0
    shown, _, told = capsys.readouterr().out.partition("more columns: --columns, --csv, --html, or a pipe")
    intervals = told.partition("interval):")[2].partition("An interval")[0]
    lines = [*shown.split("\n"), *intervals.split("\n")]
    assert max(map(len, lines)) <= width
    row = next(line for line in lines if line.startswith("grid#1 "))
    assert row.split()[:5] == ["grid#1", "finished", "8", "1000000", "0.008"]
    assert "0.3" in row.split()[5:], "the loss that rows are sorted by has room in any case"
    assert "no evidence" in told
    assert main([str(sweep), "--width", str(width), "--columns", "train_s", "data.name"]) == 0
    row = next(line for line in capsys.readouterr().out.split("\n") if line.startswith("grid#1 "))
    assert row.split()[:5] == ["grid#1", "finished", "2.02", "demo", "8"]
    assert main([str(sweep)]) == 0
    head = next(line for line in capsys.readouterr().out.split("\n") if line.startswith("run "))
    assert head.split()[:4] == ["run", "state", RANK, BUCKET], "in a pipe heads stand on one line"
    assert head.split()[-1] == "time/wall_s", "and every column is there"


def test_the_step_of_the_best_loss_has_room_beside_that_loss_alone() -> None:
    first = [["run", "one"], ["state", "finished"]]
    columns = {"rank": ["rank", "8"], "best/loss": ["best/\nloss", "0.3675 ± 0.0123 (3)"], "best/step": ["step", "12"]}
    kept = {tuple(terminal._fitting(first, columns, [], width)) for width in range(10, 60)}
    assert kept == {(), ("rank",), ("rank", "best/loss"), tuple(columns)}
    assert terminal._fitting(first, columns, ["best/step"], 24) == ["best/step"], "what was asked for is shown"


def test_runs_that_have_little_in_common_are_known_by_their_names(tmp_path: Path) -> None:
    far = {"data.max_length": 256, "optim.schedule": "linear", "train.epochs": 9.0, "eval.batch_size": 3}
    far |= {"optim.warmup_ratio": 0.5, "optim.weight_decay": 0.25}
    write_run(tmp_path / "a" / "one", {RANK: 4}, answers=False)
    write_run(tmp_path / "a" / "two", far, answers=False)
    assert [row.label for row in table(read_all([tmp_path])).rows] == ["a/one", "a/two"]


def test_without_plotly_all_but_the_page_is_there(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    words = [str(sweep), "--csv", str(tmp_path / "t.csv"), "--html", str(tmp_path / "t.html")]
    assert main(words) == 2
    assert "--html: plotly is not installed\n    -> pip install plotly" in capsys.readouterr().err
    assert (tmp_path / "t.csv").exists()
    assert not (tmp_path / "t.html").exists()


def test_broken_folders_are_all_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("yaml", "status", "metrics", "good"):
        write_run(tmp_path / "runs" / name, answers=False)
    (tmp_path / "runs" / "yaml" / "config.yaml").write_text("a: [")
    (tmp_path / "runs" / "status" / "status.json").unlink()
    (tmp_path / "runs" / "metrics" / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n{"step": 2}\n')
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "runs"), str(tmp_path / "empty"), str(tmp_path / "gone")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("5 config errors:")
    for part in (
        "yaml/config.yaml: cannot be read: while parsing",
        "status/status.json: is not there\n    -> restore the file, or leave this folder out",
        "metrics/metrics.jsonl:2: broken JSON",
        "empty: holds no run",
        "gone: is no folder",
    ):
        assert part in told
    assert "good" not in told
    (tmp_path / "empty" / "sweep.json").write_text("{}")
    assert main([str(tmp_path / "empty")]) == 2
    assert "is no record of a sweep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("metrics.jsonl", "[1]\n", "metrics.jsonl:1: is not a step and its numbers"),
        ("metrics.jsonl", '{"step": 1, "train/loss": null}\n', "metrics.jsonl:1: is not a step and its numbers"),
        ("metrics.jsonl", '{"step": 1, "train/loss": "low"}\n', "metrics.jsonl:1: is not a step and its numbers"),
        ("metrics.jsonl", '{"train/loss": 1.0}\n', "metrics.jsonl:1: is not a step and its numbers"),
        ("metrics.jsonl", "\udcff\n", "metrics.jsonl: is no text: byte 0 is not UTF-8"),
        ("status.json", '{"state": 5}', "status.json: names no state"),
        ("status.json", '{"state": "finished", "time": "noon"}', "status.json: is not what a run writes"),
        ("environment.json", '{"started": 7}', "environment.json: is not what a run writes"),
        ("model.json", '{"trainable_parameters": "x"}', "model.json: is not what a run writes"),
        (
            "samples/loss-scores-step-20.jsonl",
            '{"example": "a", "loss": 1.0}\n5\n',
            "scores-step-20.jsonl: is not what",
        ),
        ("samples/loss-scores-step-20.jsonl", "\udcff\n", "loss-scores-step-20.jsonl: is not what a run writes"),
        ("samples/step-20.jsonl", '{"prompt": "a"}\n', "step-20.jsonl: is not what a run writes"),
    ],
)
def test_a_file_that_holds_something_else_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, told: str
) -> None:
    place = write_run(tmp_path / "run")
    (place / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    other = write_run(tmp_path / "other", {RANK: 2})
    assert main([str(other), str(place)]) == 2
    assert told in capsys.readouterr().err


def test_answers_with_separators_of_lines_in_them_are_read_back(tmp_path: Path) -> None:
    answer = {"prompt": "一\u2028二\u0085三", "expected": "b\u2028c", "generated": "\u2029", "exact": False}
    place = write_run(tmp_path / "run")
    write_lines(place / "samples" / "step-20.jsonl", [answer])
    write_table(place / "samples", "", "answers")
    assert list(read_lines(place / "samples" / "step-20.jsonl")) == [answer]
    assert "eval/generate/exact_match" in scores(read_all([place])[0])


def test_a_difference_is_claimed_where_there_is_one_and_only_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [
        write_run(tmp_path / "base", {RANK: 1}, loss=0.50, noise=1),
        write_run(tmp_path / "same", {RANK: 2}, loss=0.50, noise=2),
        write_run(tmp_path / "better", {RANK: 3}, loss=0.40, noise=3),
        write_run(tmp_path / "elsewhere", {RANK: 4}, loss=0.40, noise=4),
        write_run(tmp_path / "other_tokens", {RANK: 5}, loss=0.40, noise=5),
    ]
    file = places[3] / "samples" / "loss-scores-step-20.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    write_lines(file, rows[::-1][:30])  # another order, and fewer: an example is known by its name
    file = places[4] / "samples" / "loss-scores-step-20.jsonl"
    write_lines(file, [row | {"tokens": 1 + row["tokens"]} for row in rows])
    found = differences([scores(run) for run in read_all(places)], 0)
    of_loss = [one for one in found if one.metric == "eval/loss/loss"]
    assert [one.run for one in of_loss] == [1, 2, 3, 4]
    assert [one.verdict for one in of_loss[:3]] == [NO_EVIDENCE, "better", "better"]
    assert "tokenizer or template" in of_loss[3].verdict
    assert [one.interval.examples for one in of_loss[:3]] == [EXAMPLES, EXAMPLES, 30]
    assert of_loss[1].interval.difference == pytest.approx(-0.1, abs=0.03)
    assert {one.interval.examples for one in found if one.metric == "eval/generate/exact_match"} == {40}
    assert main([*map(str, places), "--baseline", "rank=3"]) == 0
    told = capsys.readouterr().out
    assert "against rank=3, paired over the same held-out examples (95 % interval)" in told
    assert "worse" in told
    write_lines(file, [{"index": 0, "loss": 1.0}])  # of a version that did not name examples
    assert "eval/loss/loss" not in scores(read_all([places[4]])[0])
    file.write_text("{")
    assert main([*map(str, places)]) == 2
    assert "loss-scores-step-20.jsonl:1: broken JSON" in capsys.readouterr().err


def test_a_folder_named_twice_is_one_run_and_a_search_has_no_twins(sweep: Path, tmp_path: Path) -> None:
    assert len(read_all([sweep, sweep / "0_trial", sweep.parent])) == 4
    write_run(tmp_path / "0_t", {RANK: 4})
    twin = {"folder": "0_t", "values": {RANK: "4"}, "state": "finished", "same_as": 0}
    write_sweep(tmp_path, [twin | {"same_as": None}, twin])
    assert len(read_all([tmp_path])) == 1


def test_nothing_heavy_is_loaded_and_help_is_there() -> None:
    script = (
        "import sys; from glmexp.compare.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'deepspeed', 'transformers', 'peft', 'datasets', 'wandb', 'plotly', 'numpy', 'pyarrow'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: python -m glmexp.compare" in done.stdout


def test_what_an_entry_does_not_read_is_no_difference_from_one_that_does(tmp_path: Path) -> None:
    trained = write_run(tmp_path / "trained", {"train.batch_size": 16, "data.packing": True, "eval.loss.every": 10})
    reading = {"entry.name": "evaluate", "artifact.path": str(trained), "train.batch_size": None, "zero.stage": 0}
    unread = {"data.train_file": None, "precision.check_grad_overflow": None, "placement.name": "layers"}
    asked = write_run(tmp_path / "asked", reading | unread)
    assert table(read_all([trained, asked])).differing == ["entry.name"]
    base = write_run(tmp_path / "base", reading | unread | {"artifact.path": None})
    assert table(read_all([base, asked])).differing == ["artifact.path"], "both could have one"
