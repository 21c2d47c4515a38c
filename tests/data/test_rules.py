"""Keys of the data section that contradict each other or are not read are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.helpers import config, refusal, rows_file

PROMPTS = "eval.generate.prompts_file=builtin:prompts.jsonl"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("data.encoding=utf9",), "data.encoding: 'utf9' is no text encoding"),
        (("data.encoding=base64",), "data.encoding: 'base64' is no text encoding"),
        (("data.on_error=ignore",), "data.on_error: 'ignore' is not one of error, skip"),
        (("data.format=sharegpt", "data.columns.prompt=x"), "data.columns.prompt: 'x' without effect"),
        (("data.format=alpaca", "data.columns.messages=x"), "data.columns.messages: 'x' without effect"),
        (("data.packing=true", "data.group_by_length=true"), "data.group_by_length: without effect"),
        (("data.packing=true", "method=ptuning", "model=tiny_qwen2"), "data.packing: method=ptuning on qwen2"),
        (("data.num_workers=0", "data.prefetch=3"), "data.prefetch: without effect: data.num_workers is 0"),
        (("model.pad_token=eos",), "model.pad_token: 'eos' cannot be set: the vocabulary of chatglm3 fixes it"),
        (("inspect.rows=2",), "inspect.rows: without effect under entry=train"),
        (("eval.generate.prompts_file=none.jsonl",), "eval.generate.prompts_file: none.jsonl is no file"),
        (("eval.generate.prompts_file=builtin:other.jsonl",), "builtin:other.jsonl is no file"),
        (
            ("entry=inspect", "data.train_file=null", "data.eval_file=null"),
            "data.train_file: is null, and entry=inspect",
        ),
        (
            ("entry=evaluate", "eval=[generate,loss]", PROMPTS, "data.eval_file=null"),
            "data.eval_file: is null, and eval=loss needs held-out rows",
        ),
        (
            ("entry=evaluate", "eval=generate", PROMPTS, "data.holdout=3", "data.eval_file=null"),
            "data.holdout: 3 without effect: no hook of eval=generate reads rows",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_refused(words: tuple[str, ...], text: str) -> None:
    assert text in refusal(*words)


def test_a_missing_file_is_named_with_the_path_that_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for entry in ("train", "inspect"):
        assert f"data.train_file: {tmp_path / 'no.jsonl'} is not there" in refusal(
            f"entry={entry}", "data.train_file=no.jsonl"
        )


def test_paths_are_made_whole_and_hub_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path / "rows.jsonl")
    one = config("data.train_file=rows.jsonl")
    assert one.data.train_file == str(tmp_path / "rows.jsonl")
    assert one.data.cache_dir == str(tmp_path / "outputs" / ".prepared")
    assert config("data.train_file=hub:owner/name:train").data.train_file == "hub:owner/name:train"
