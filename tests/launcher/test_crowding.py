"""More ranks on the CPU than it has cores or memory for are named before they start; a mistake leaves no folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from glmexp.config.compose import run_config
from glmexp.launcher import folder
from glmexp.launcher.needs import Host, crowded, crowding

GIB = 2**30


def test_ranks_that_take_turns_on_a_core_are_warned_of() -> None:
    config = run_config(["tracker=none"], ranks=3)
    (line,) = crowding(config, Host(0, {}, None, cores=2))
    assert line.startswith("launcher.nproc: 3 ranks on 2 cores and no GPU: they take turns")
    assert line.endswith("Way out: launcher.nproc=2")
    assert not [*crowding(config, Host(3, {}, None, cores=2))], "GPUs do the work"
    assert not [*crowding(config, Host(0, {}, None, cores=3))]


@pytest.mark.parametrize("entry", ["train", "generate"])
def test_ranks_that_the_memory_cannot_hold_are_refused_with_what_would_fit(entry: str) -> None:
    words = ["tracker=none", f"entry={entry}", "model=chatglm3", "model.init=random"]
    words += ["generate.prompts_file=builtin:prompts.jsonl"] if entry == "generate" else []
    config = run_config([*words, "precision=bf16"], ranks=64)
    (problem,) = crowded(config, Host(0, {}, 40 * GIB, cores=8))
    assert problem.where == "launcher.nproc"
    assert problem.message.startswith("64 ranks on the CPU take at least 7"), "12.5 GB of weights each"
    assert problem.message.endswith("40.00 GiB are free")
    assert problem.fix == "launcher.nproc=3"
    (problem,) = crowded(config, Host(0, {}, 10 * GIB, cores=8))
    assert problem.fix == "a smaller model, or a machine with more memory"
    assert not [*crowded(config, Host(0, {}, 4000 * GIB, cores=8))]
    assert not [*crowded(config, Host(64, {}, 40 * GIB, cores=8))]


def test_only_what_holds_no_result_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (folder.make(run_config(["tracker=none"])) for _ in range(2))
    folder.take_back(first)
    assert not first.exists()
    (second / "metrics.jsonl").touch()
    folder.take_back(second)
    assert second.exists(), "there is a result"
    (second / "metrics.jsonl").unlink()
    folder.take_back(second)
    assert not [*tmp_path.iterdir()], "the folders above it were there for it alone"
    (tmp_path / "mine").mkdir()
    own = folder.make(run_config(["tracker=none", f"run.dir={tmp_path}/mine/run"]))
    folder.take_back(own)
    assert (tmp_path / "mine").is_dir()


def test_a_run_that_is_overwritten_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tracker=none", f"run.dir={tmp_path}/run", "run.overwrite=true"]
    place = folder.make(run_config(words))
    (place / "metrics.jsonl").touch()
    assert capsys.readouterr().err == "", "there was none"
    assert [*folder.make(run_config(words)).glob("metrics.jsonl")] == []
    told = f"run.overwrite=true: the run in {place} is gone, a new one takes its place\n"
    assert capsys.readouterr().err == told
