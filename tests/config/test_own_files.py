"""Mistakes in files that users write themselves, experiments and options: told with the file, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.helpers import config, refusal


def test_mistakes_in_a_users_file_name_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    text = (
        "# @package _global_\ndefaults:\n  - override /method: freeze\nmethod: {num_layer: 3}\nhydra: {run: {dir: x}}"
    )
    (folder / "mine.yaml").write_text(text)
    text = refusal("--config-dir", str(tmp_path), "+experiment=mine")
    assert f"method.num_layer: there is no such key (from {folder / 'mine.yaml'})" in text
    assert "did you mean method.num_layers?" in text
    assert f"hydra.run.dir: has no effect here (from {folder / 'mine.yaml'})" in text
    (folder / "mine.yaml").write_text("optim: [1")
    assert f"{folder / 'mine.yaml'}:1: is no valid YAML" in refusal("--config-dir", str(tmp_path), "+experiment=mine")


METHODS = (
    "method=OPTION, or `- override /method: OPTION` in a file's defaults list, "
    "chooses one of freeze, full, lora, ptuning"
)
NO_SECTION = "is no section (from FILE)\n    -> leave it out, or set keys below it:"
SETS_NOTHING = "is an empty mapping and sets nothing (from FILE)\n    -> leave it out, or set keys below it, such as"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("method: {}", f"method: {SETS_NOTHING} method.rank; {METHODS}"),
        ("train: {}", f"train: {SETS_NOTHING} train.micro_batch_size"),
        ("eval: {loss: {}}", f"eval.loss: {SETS_NOTHING} eval.loss.every"),
        ("eval: {rouge: {}}", "eval.rouge: the hook rouge is not chosen\n    -> eval=[loss,generate,rouge]"),
        (
            "defaults: [override /method: null]\nmethod: {}",
            f"method: is an empty mapping (from FILE)\n    -> {METHODS}",
        ),
        ("method:", f"method: is null, which is no section (from FILE)\n    -> {METHODS}"),
        ("method: lora", f"method: is 'lora', which is no section (from FILE)\n    -> {METHODS}"),
        (
            "train: 3",
            f"train: 3 {NO_SECTION} train.micro_batch_size, ...",
        ),
        (
            "eval: {loss: null}",
            f"eval.loss: null {NO_SECTION} eval.loss.every, ...",
        ),
    ],
)
def test_a_section_of_a_card_that_holds_no_keys_is_told_as_what_it_is(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "study" / "card.yaml"
    file.parent.mkdir()
    file.write_text(f"# @package _global_\n{text}\n", encoding="utf-8")
    report = refusal("--config-dir", str(tmp_path), "+study=card")
    assert report == f"config error:\n  {told.replace('FILE', str(file))}", "and nothing that follows from it"


@pytest.mark.parametrize(
    ("text", "told"),
    [("{}", "method: is an empty mapping (from FILE)"), ("rank: 8", "method.name: is missing in FILE")],
)
def test_an_own_option_without_what_it_must_have_is_named_with_its_file(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "method" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    report = refusal("--config-dir", str(tmp_path), "method=mine")
    assert report == f"config error:\n  {told.replace('FILE', str(file))}\n    -> {METHODS}"
    file.write_text("defaults: [lora]\n", encoding="utf-8")
    assert config("--config-dir", str(tmp_path), "method=mine").method.name == "lora", "another name for one is enough"
