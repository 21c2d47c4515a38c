"""Folders that bring code: nothing of it runs unless the user says so, and the run says that it did."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glmexp.config.errors import ArtifactError, ConfigError
from glmexp.config.schema import ModelSection
from glmexp.model.build import announce_code, load_network, load_tokenizer
from glmexp.plan.shapes import network_of
from tests.engine.cells import configure
from tests.model.samples import released_config, small_network

CODE = """
import pathlib
from transformers import PreTrainedConfig, PreTrainedModel
pathlib.Path({marker!r}).write_text("ran")

class SproutConfig(PreTrainedConfig):
    model_type = "sprout"

class SproutModel(PreTrainedModel):
    config_class = SproutConfig
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a network that nobody knows, whose code leaves a file behind."""
    place = tmp_path / "checkpoint"
    place.mkdir()
    content = {"model_type": "sprout", "auto_map": {"AutoConfig": "sprout.SproutConfig"}}
    (place / "config.json").write_text(json.dumps(content))
    (place / "sprout.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    return place


def section(folder: Path, trusted: bool = False) -> ModelSection:
    """As a checkpoint of a hub would come: nothing has looked into it."""
    return replace(configure("model=chatglm").model, path=str(folder), trust_remote_code=trusted)


def composed(folder: Path) -> ModelSection:
    """As the command line takes a folder."""
    return configure("entry=plan", "model=chatglm", f"model.path={folder}").model


def test_code_in_a_folder_is_not_run_and_the_option_is_named(folder: Path, tmp_path: Path) -> None:
    for load in (load_tokenizer, lambda model: load_network(model, torch.float32)):
        with pytest.raises(ArtifactError) as caught:
            load(section(folder))
        assert "brings code of its own for it (sprout.py); it was not run" in str(caught.value)
        assert "model.trust_remote_code=true runs it" in str(caught.value)
    with pytest.raises(ConfigError, match="it was not run"):
        composed(folder)
    assert not (tmp_path / "marker").exists()


def test_code_that_the_user_trusts_is_run_and_the_run_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    trusted = section(folder, trusted=True)
    announce_code(trusted)
    assert capsys.readouterr().out == f"model.trust_remote_code=true: code from {folder} is run (sprout.py)\n"
    with pytest.raises(Exception, match=r"(?i)sprout"):  # it has no weights
        load_network(trusted, torch.float32)
    assert (tmp_path / "marker").exists()


def test_a_released_folder_loads_without_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_network("chatglm").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(released_config("chatglm")))
    (tmp_path / "modeling_chatglm.py").write_text("raise SystemExit('was run')")
    assert load_network(section(tmp_path), torch.float32).config.release == "chatglm"
    announce_code(section(tmp_path, trusted=True))
    assert "without effect" in capsys.readouterr().out


def test_a_folder_of_another_family_is_refused(tmp_path: Path) -> None:
    """A folder before anything is started; what comes from a hub when its config.json is there."""
    small_network("chatglm3").save_pretrained(tmp_path)
    said = "holds a chatglm3 model, model=chatglm is for chatglm"
    with pytest.raises(ConfigError, match=said):
        composed(tmp_path)
    with pytest.raises(ArtifactError, match=said):
        load_network(section(tmp_path), torch.float32)


def test_a_config_json_that_is_not_whole_is_refused_by_the_plan(tmp_path: Path) -> None:
    small_network("chatglm").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in content.items() if name != "num_layers"}))
    with pytest.raises(ArtifactError, match=f"config.json of {tmp_path} names no num_layers"):
        network_of(section(tmp_path))
    file.write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        composed(tmp_path)
