"""libyaml reads what OmegaConf's own parser would have read, and leaves to it what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from glmexp.config.compose import run_config
from glmexp.config.load import dump
from glmexp.config.nearest import conf_folder
from glmexp.config.yaml_files import Files

VALUES = """# @package _global_
rates: [1e-3, 1.5E+3, .5, 1_000, 0x1f, 010, -.inf, 1:30, "1e-3", '2']
words: {yes: no, on: "on", none: ~, date: 2024-01-02, empty: , text: 第一, ref: "${a.b}"}
deep: [&one {a: 1}, *one]
"""


def test_shipped_files_and_odd_values_are_read_alike(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(VALUES, encoding="utf-8")
    (tmp_path / "list.yaml").write_text("- 1\n", encoding="utf-8")
    (tmp_path / "empty.yaml").write_text("# nothing\n", encoding="utf-8")
    files = [*conf_folder().rglob("*.yaml"), *tmp_path.glob("*.yaml")]
    assert len(files) > 50
    for file in files:
        read = Files("main", f"file://{file.parent}").load_config(file.stem)
        assert repr(read.config) == repr(OmegaConf.load(file)), file
        assert read.header["package"] == ("_global_" if "@package _global_" in file.read_text("utf-8") else None), file


@pytest.mark.parametrize("text", ["a: 1\na: 2\n", "a: [1\n", "a: {b: 1, b: 2}\n", "\ta: 1\n", "a: b: c\n"])
def test_what_is_wrong_is_told_as_before(text: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(text, encoding="utf-8")
    told = []
    for read in (lambda: Files("main", f"file://{tmp_path}").load_config("wrong"), lambda: OmegaConf.load(file)):
        with (tmp_path / "wrong.yaml").open() as file, pytest.raises(Exception) as caught:
            read()
        told.append(str(caught.value).replace(str(tmp_path), ""))
    assert told[0] == told[1]


def test_nothing_of_a_composition_stays_for_the_next_one(tmp_path: Path) -> None:
    """Files are kept in memory between compositions: neither overrides nor an edited file may show in another."""
    study = tmp_path / "experiments" / "mine.yaml"
    study.parent.mkdir()
    plain = dump(run_config([]))
    for steps in (3, 4):
        study.write_text(f"# @package _global_\ntrain:\n  max_steps: {steps}\nrun:\n  name: mine\n", encoding="utf-8")
        words = [
            "--config-dir",
            str(tmp_path),
            "+experiments=mine",
            "optim.lr=0.5",
            "+launcher.env.A=b",
            "run.name=one",
        ]
        changed = run_config(words)
        assert (changed.train.max_steps, changed.optim.lr, changed.run.name) == (steps, 0.5, "one")
        assert run_config(words[:3]).run.name == "mine"
        assert dump(run_config([])) == plain
