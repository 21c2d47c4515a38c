"""A folder that is no artifact, or not a whole one, is refused by the names of its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glmexp.config.inherit import CARD
from tests.config.helpers import config, refusal


@pytest.mark.parametrize("entry", ["evaluate", "generate", "bench", "export"])
@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({}, "holds nothing that can be loaded"),
        ({"config.yaml": "{}"}, "holds nothing that can be loaded"),
        ({CARD: "{}"}, "is no card: it names no model, method"),
        ({CARD: '{"model": {"name": "tiny"}, "method": {}}'}, "is no card: it names no method"),
        ({CARD: "CARD", "adapter_config.json": "{}"}, "holds no adapter_model.safetensors"),
        ({"adapter_config.json": "{}", "adapter_model.bin": ""}, "adapter_model.bin is a pickle"),
        (
            {"adapter_config.json": json.dumps({"target_modules": ["q_proj"]}), "adapter_model.safetensors": ""},
            "is an adapter of q_proj, which chatglm3 has not",
        ),
    ],
)
def test_what_is_missing_is_named(entry: str, files: dict[str, str], part: str, tmp_path: Path) -> None:
    card = dict.fromkeys(("gather", "stage", "dtype", "base"), "x") | {"tensors": {}}
    card |= {"model": {"name": "tiny"}, "method": {"name": "lora"}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(card) if content == "CARD" else content)
    words = ["generate.prompts_file=builtin:prompts.jsonl"] if entry == "generate" else []
    assert part in refusal(f"entry={entry}", f"artifact.path={tmp_path}", *words)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "global_step4/x", "mp_rank_00_model_states.pt", "latest"]
)
def test_what_other_programs_write_is_taken(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert config("entry=export", f"artifact.path={tmp_path}").artifact.path == str(tmp_path)
