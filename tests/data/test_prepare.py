from __future__ import annotations

import json
from pathlib import Path

import pytest

from glmexp.config.errors import ConfigError, DataError
from glmexp.data.prepare import prepare

from .fakes import END, CharacterTemplate, section, text_of

TEMPLATE = CharacterTemplate()


def write(folder: Path, rows: list[tuple[str, str]], name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps({"prompt": prompt, "response": answer}) + "\n" for prompt, answer in rows))
    return str(file)


def test_the_answer_and_its_end_are_learned_and_nothing_else(tmp_path: Path) -> None:
    prepared = prepare(section(write(tmp_path, [("ask", "tell")])), 0, TEMPLATE)
    (row,) = prepared.train
    assert text_of(row.input_ids) == "asktell"
    assert text_of(row.labels) == "tell"
    assert row.labels[-1] == END
    assert row.supervised_tokens == 5
    assert text_of(row.prompt_ids) == "ask"
    assert row.blank().supervised_tokens == 0
    assert len(prepared.eval) == 0


def test_long_prompts_lose_their_middle_and_keep_the_answer_whole(tmp_path: Path) -> None:
    prompt = "first the task, " + "x" * 500 + " last the question"
    path = write(tmp_path, [("short", "answer"), (prompt, "answer")])
    prepared = prepare(section(path, max_length=64), 0, TEMPLATE)
    whole, cut = prepared.train
    assert whole.prompt == "short"
    assert len(cut.input_ids) == 64
    assert text_of(cut.labels) == "answer"
    assert cut.labels[-1] == END
    assert cut.prompt.startswith("first the task")
    assert cut.prompt.endswith("last the question")
    assert text_of(cut.prompt_ids) == cut.prompt
    assert f"{path}: 1 of 2 rows longer than data.max_length=64 tokens: the prompt is cut (line 2)" in prepared.report


def test_rows_whose_answer_does_not_fit_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path, [("short", "x" * 80), ("y" * 80, "x" * 60), ("short", "answer")])
    prepared = prepare(section(path, max_length=64), 0, TEMPLATE)
    assert [row.line for row in prepared.train] == [3]
    assert prepared.report[-1] == (
        f"{path}: 2 of 3 rows longer than data.max_length=64 tokens by their answer: dropped (lines 1, 2)"
    )
    with pytest.raises(DataError, match=r"all 3 rows are longer than data\.max_length=8 tokens by their answer"):
        prepare(section(path, max_length=8), 0, TEMPLATE)


def test_holdout_is_drawn_by_the_seed_and_never_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path, [(f"q{number}", "a") for number in range(20)])
    first = prepare(section(path, holdout=5), 1, TEMPLATE)
    again = prepare(section(path, holdout=5), 1, TEMPLATE)
    other = prepare(section(path, holdout=5), 2, TEMPLATE)
    assert [row.text for row in first.eval] == [row.text for row in again.eval]
    assert [row.line for row in first.eval] != [row.line for row in other.eval]
    assert len(first.eval) == 5
    assert sorted(row.line for row in [*first.eval, *first.train]) == list(range(1, 21))
    assert f"{path}: 5 rows held out, 15 left to train on" in first.report
    with pytest.raises(DataError, match="20 rows cannot be held out of the 20"):
        prepare(section(path, holdout=20), 1, TEMPLATE)


def test_evaluation_alone_holds_out_the_rows_that_training_held_out(tmp_path: Path) -> None:
    path = write(tmp_path, [(f"q{number}", "a") for number in range(20)])
    trained = prepare(section(path, holdout=5), 1, TEMPLATE)
    evaluated = prepare(section(path, holdout=5), 1, TEMPLATE, train=False)
    assert [row.text for row in evaluated.eval] == [row.text for row in trained.eval]
    assert len(evaluated.train) == 0


def test_evaluation_alone_does_not_read_the_training_file(tmp_path: Path) -> None:
    held = write(tmp_path, [("q", "a")], "held.jsonl")
    prepared = prepare(section("nowhere.jsonl", eval_file=held), 0, TEMPLATE, train=False)
    assert [row.prompt for row in prepared.eval] == ["q"]
    assert list(prepared.sha256) == [held]


def test_files_that_are_not_named_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_file: is not set"):
        prepare(section(None, eval_file=write(tmp_path, [("q", "a")])), 0, TEMPLATE)
    with pytest.raises(ConfigError, match=r"data\.eval_file: is not set"):
        prepare(section(write(tmp_path, [("q", "a")])), 0, TEMPLATE, train=False)
