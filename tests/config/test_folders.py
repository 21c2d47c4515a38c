"""A folder that cannot be loaded is refused by the parent, from its files alone."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from glmexp.config.inherit import CARD
from glmexp.config.schema import Sizes
from tests.config.helpers import config, refusal

SIZES = dict.fromkeys(field.name for field in dataclasses.fields(Sizes))
WHOLE = {"stage": 2, "dtype": "bf16", "method": None, "tensors": {}, "base": ""}
"""The rest of a card."""
TINY = Path(__file__).parents[2] / "glmexp" / "model" / "tiny" / "tiny"


def folder(path: Path, without: str = "", **content: Any) -> Path:
    """The shipped model without some of its files, and with other values in its config.json."""
    shutil.copytree(TINY, path, ignore=shutil.ignore_patterns(without))
    file = path / "config.json"
    if content:
        file.write_text(json.dumps({**json.loads(file.read_text()), **content}))
    return path


@pytest.mark.parametrize(
    ("without", "content", "words", "part"),
    [
        ("config.json", {}, (), "holds no config.json"),
        ("*.safetensors", {}, (), "holds no weights"),
        ("token*", {}, (), "holds no tokenizer"),
        ("", {}, ("model=qwen2",), "holds a chatglm3 model, model=qwen2 is for qwen2"),
        ("", {"model_type": "llama"}, (), "holds a llama model, model=tiny is for chatglm3"),
        ("", {"model_type": "sprout", "auto_map": {"AutoModel": "sprout.Sprout"}}, (), "(sprout.py); it was not run"),
        ("", {"release": "chatglm9"}, (), "config.json: release: 'chatglm9' is unknown"),
    ],
)
def test_a_folder_that_cannot_be_loaded(
    without: str, content: dict[str, Any], words: tuple[str, ...], part: str, tmp_path: Path
) -> None:
    assert part in refusal(*words, f"model.path={folder(tmp_path / 'model', without, **content)}")


def test_what_an_entry_does_not_read_may_be_missing(tmp_path: Path) -> None:
    found = folder(tmp_path / "model", "*.safetensors")
    assert config("entry=plan", f"model.path={found}").model.path == str(found)
    (found / "config.json").write_text("{")
    assert "config.json: is no JSON object" in refusal("entry=plan", f"model.path={found}")
    assert "builtin:none is not shipped" in refusal("model.path=builtin:none")


def test_ranks_that_do_not_divide_what_answers_are_refused_in_whatever_form_it_lies(tmp_path: Path) -> None:
    """An artifact on its base, a folder of another program, an export in the layout of transformers, a checkpoint."""
    base = folder(tmp_path / "base", num_attention_heads=6, multi_query_group_num=3)
    model = {"name": "tiny", "family": "chatglm3", "path": str(base), "init": "pretrained", "sizes": SIZES}
    artifact, run = tmp_path / "artifact", tmp_path / "run"
    artifact.mkdir()
    (artifact / CARD).write_text(json.dumps({**WHOLE, "gather": "trainable", "model": model}))
    (run / "checkpoints" / "step-2").mkdir(parents=True)
    (run / "config.yaml").write_text(json.dumps({"model": model}))
    exported = folder(
        tmp_path / "exported", model_type="glm", num_key_value_heads=3, num_attention_heads=6, intermediate_size=344
    )
    (exported / CARD).write_text(json.dumps({**WHOLE, "gather": "exported", "model": model}))
    for path in (artifact, base, exported, run, run / "checkpoints" / "step-2"):
        words = ("entry=evaluate", f"artifact.path={path}", "placement=tensor_parallel")
        said = refusal(*words, "launcher.nproc=2")
        assert "launcher.nproc: 2 ranks do not divide the 3 key/value heads" in said, path
        assert said.count("launcher.nproc:") == 1
    assert config("entry=evaluate", f"model.path={TINY}", "placement=tensor_parallel", "launcher.nproc=2")


def test_a_prefix_of_peft_answers_on_one_device_the_plain_way(tmp_path: Path) -> None:
    model = {
        "name": "tiny_qwen2",
        "family": "qwen2",
        "path": "builtin:tiny_qwen2",
        "init": "pretrained",
        "sizes": SIZES,
    }
    method = {"name": "ptuning", "num_virtual_tokens": 4, "prefix_projection": False, "dropout": 0.0, "lr": 0.01}
    (tmp_path / CARD).write_text(json.dumps({**WHOLE, "gather": "trainable", "model": model, "method": method}))
    words = ("entry=evaluate", f"artifact.path={tmp_path}")
    assert config(*words).method.name == "ptuning"
    assert "layers has no place for a prefix of PEFT" in refusal(*words, "placement=layers")
    assert "static does not apply to a prefix of PEFT" in refusal(*words, "decoding.way=static")
