"""The proof catches what goes wrong silently: each fault is put into a good artifact, and each must be found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from glmexp.config.errors import ArtifactError
from glmexp.entry import proof
from glmexp.method import peft_files
from glmexp.model.build import location
from tests.cli import SHORT, forked, runs, status
from tests.engine.cells import configure, engine_loop
from tests.ranks import run_on_ranks

ADAPTER = "artifact/adapter_model.safetensors"


def _train(overrides: list[str], folder: str) -> None:
    engine_loop(configure(*overrides), folder)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run of two ranks at stage 3, whose artifact is as it should be."""
    folder = tmp_path_factory.mktemp("good")
    run_on_ranks(_train, ["model=tiny", "method=lora", "zero=stage3"], str(folder / "run"), folder=folder)
    assert proof.judge(folder / "run")["faults"] == []
    return folder / "run"


def _edit(run: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(run / ADAPTER)), run / ADAPTER)


def _empty(run: Path) -> None:
    """What rank 0 saves under stage 3 without gathering."""
    _edit(run, lambda tensors: {name: torch.empty(0) for name in tensors})


def _rename(run: Path) -> None:
    _edit(run, lambda tensors: {n.replace("model.model.", "model.model.module.", 1): t for n, t in tensors.items()})


def _zero_b(run: Path) -> None:
    """An adapter that loads without a word and does nothing."""
    _edit(run, lambda tensors: {n: torch.zeros_like(t) if "lora_B" in n else t for n, t in tensors.items()})


def _drop_one(run: Path) -> None:
    _edit(run, lambda tensors: dict(list(tensors.items())[1:]))


def _swap_layers(run: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n.replace("layers.0", "layers.X").replace("layers.1", "layers.0").replace("layers.X", "layers.1"): t
                for n, t in tensors.items()}  # fmt: skip

    _edit(run, change)


def _round(run: Path) -> None:
    """A detour through bf16: too small for the logits' tolerance to be sure of, not for the tensors."""
    _edit(run, lambda tensors: {name: tensor.bfloat16().float() for name, tensor in tensors.items()})


def _cut_file(run: Path) -> None:
    content = (run / ADAPTER).read_bytes()
    (run / ADAPTER).write_bytes(content[: len(content) // 2])


def _other_scale(run: Path) -> None:
    """All tensors are right, and alpha is not."""
    file = run / "artifact" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * 2}))


def _other_logits(run: Path) -> None:
    """The live model gave other logits than the artifact: the network that loads it computes something else."""
    probe = load_file(run / proof.PROBE)
    save_file({name: one * 1.5 if name.endswith("logits") else one for name, one in probe.items()}, run / proof.PROBE)


def _other_base(run: Path) -> None:
    """A base of the same shape with one weight changed."""
    card_file = run / "artifact" / "glmexp.json"
    card = json.loads(card_file.read_text())
    base = run / "base"
    shutil.copytree(location(configure("model=tiny").model), base)
    weights = load_file(base / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.dense_4h_to_h.weight"))
    weights[name][0, 0] += 0.5
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    card["model"]["path"] = str(base)
    card_file.write_text(json.dumps(card))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_empty, "has shape (0,)"),
        (_rename, "keys fit nothing in the model"),
        (_drop_one, "would stay at their start values"),
        (_zero_b, "are not as they were trained"),
        (_swap_layers, "are not as they were trained"),
        (_round, "are not as they were trained"),
        (_cut_file, "cannot be read"),
        (_other_scale, "scales the adapter by 4, and it was trained with alpha / rank = 2"),
        (_other_logits, "logits differ from the live model's"),
        (_other_base, "the base is another one"),
    ],
)
def test_a_spoilt_artifact_is_found(spoil: Callable[[Path], None], said: str, good: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(good, run)
    spoil(run)
    faults = proof.judge(run)["faults"]
    assert any(said in fault for fault in faults), faults


def test_a_frozen_weight_that_moved_and_a_trained_one_that_did_not_are_found() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    method = configure("method=full").method
    engine = SimpleNamespace(module=model, optimizer=None)
    start = proof.before(engine)
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-3
        model[1].weight += 1.0
    faults = proof.changes(engine, start, method, steps=1)
    assert faults == [
        "1 of 2 trained tensors did not move: 1.bias",
        "1 of 2 frozen tensors changed: 0.weight",
    ]


PLUGIN = '''
"""A method that trains like LoRA and saves an adapter without effect, as people meet it."""
from dataclasses import dataclass
from glmexp.config.registry import register
from glmexp.method.lora import Lora

@register("method", "forgetful")
@dataclass
class Forgetful(Lora):
    def write(self, folder, model, tensors):
        held = super().write(folder, model, {n: t * 0 if "lora_B" in n else t for n, t in tensors.items()})
        return {name: tensors[name] for name in held}
'''


def test_a_run_whose_proof_fails_exits_nonzero_and_says_failed(tmp_path: Path) -> None:
    (tmp_path / "forgetful_plugin.py").write_text(PLUGIN)
    (tmp_path / "options" / "method").mkdir(parents=True)
    lora = Path(__file__).parents[2] / "conf" / "method" / "lora.yaml"
    (tmp_path / "options/method/forgetful.yaml").write_text(lora.read_text().replace("name: lora", "name: forgetful"))
    done = forked(
        *SHORT,
        "--config-dir",
        "options",
        "method=forgetful",
        folder=tmp_path,
        GLMEXP_PLUGINS="forgetful_plugin",
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 1
    assert "the proof of the artifact failed" in done.stderr
    assert "are not as they were trained" in done.stderr
    (run,) = runs(tmp_path)
    assert status(run)["state"] == "failed"
    assert json.loads((run / "proof.json").read_text())["passed"] is False


def test_an_adapter_whose_scale_was_changed_is_no_longer_what_was_trained(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    for changed in ({}, {"lora_alpha": 64}, {"use_rslora": True}, {"alpha_pattern": {"1": 2}}):
        settings = {"r": 2, "lora_alpha": 4, "target_modules": ["0", "1"], **changed}
        base = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model = get_peft_model(base, LoraConfig(**settings))
        if not changed:
            peft_files.check_scale(tmp_path, model, 2.0)
            continue
        with pytest.raises(ArtifactError, match=r"trained with alpha / rank = 2"):
            peft_files.check_scale(tmp_path, model, 2.0)
