"""Checkpoints that plain DeepSpeed and the Trainer's layout leave are exported without running what is in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glmexp.config import load as files
from glmexp.config.compose import run_config
from glmexp.config.errors import ArtifactError, ConfigError
from glmexp.engine import build, ds_files, gather
from glmexp.entry import export, verify
from glmexp.entry.artifact import read_card
from glmexp.model.build import location
from tests.engine import cells, keeping
from tests.engine.cells import configure
from tests.ranks import run_on_ranks

KINDS = {"stage2": (2, "all"), "stage3": (3, "all"), "frozen2": (2, "frozen"), "excluded3": (3, "excluded")}


def _deepspeed_alone(root: str) -> None:
    """Every kind of KINDS and a PEFT model at stage 3, trained two steps in bf16, and the masters whole beside them."""
    import deepspeed
    from peft import LoraConfig, get_peft_model

    for name, (stage, trained) in KINDS.items():
        model = _network()
        if trained != "all":
            for parameter_name, parameter in model.named_parameters():
                parameter.requires_grad_("layers.1." in parameter_name)
        _steps(deepspeed, model, stage, Path(root, name), trained == "excluded")
    adapter = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    _steps(deepspeed, get_peft_model(_network(), adapter), 3, Path(root, "lora3"), False)
    _of_a_run(Path(root, "run"))


OWN = ("model=tiny", "method=lora", "zero=stage3", "precision=bf16")


def _of_a_run(folder: Path) -> None:
    """A checkpoint of this product after one step, and its masters."""
    config = cells.configure(*OWN, "data.max_length=48")
    engine = cells._engine(config, 2)
    keeping._steps(engine, config, 0, 1)
    keeper = keeping.saver(engine, folder)
    keeper.save(1, keeping.ABOUT)
    keeper.close()
    masters = gather.masters(build.trainable(engine.module), engine.optimizer)
    held = {name: value.cpu().clone() for name, value in masters}
    if torch.distributed.get_rank() == 0:
        save_file(held, folder / "masters.safetensors")
        files.write(config, folder / "config.yaml")


def _network() -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(location(configure("model=tiny_qwen2").model), dtype=torch.float32)


def _steps(deepspeed: Any, model: Any, stage: int, folder: Path, exclude: bool) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    ids = torch.arange(8)[None] + 8 * torch.distributed.get_rank()
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(folder, exclude_frozen_parameters=exclude)
    masters = {
        name: deepspeed.utils.safe_get_full_fp32_param(parameter)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }
    if torch.distributed.get_rank() == 0:
        save_file({name: value.clone() for name, value in masters.items()}, folder / "masters.safetensors")
    engine.destroy()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    run_on_ranks(_deepspeed_alone, str(folder), folder=folder)
    return folder


def _exported(source: Path, out: Path, *words: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = [] if any(word.startswith("model=") for word in words) else ["model=tiny_qwen2"]
    wanted = ["entry=export", f"artifact.path={source}", "export.dtype=fp32", "export.verify=false"]
    config = run_config([*model, *wanted, *words])
    out.mkdir()
    files.write(config, out / "config.yaml")
    export.run(config, out)
    return load_file(out / "artifact" / "model.safetensors"), verify.judge(out)


@pytest.mark.parametrize("kind", KINDS)
def test_masters_of_two_ranks_become_a_whole_model(kind: str, checkpoints: Path, tmp_path: Path) -> None:
    """To the bit; what is frozen comes from the checkpoint, or from the base where it was left out."""
    masters = load_file(checkpoints / kind / "masters.safetensors")
    held, verdict = _exported(checkpoints / kind, tmp_path / "out")
    assert verdict["faults"] == []
    assert all(torch.equal(held[name], master) for name, master in masters.items())
    base = load_file(Path(location(configure("model=tiny_qwen2").model)) / "model.safetensors")
    assert held.keys() == base.keys()
    assert all(torch.equal(held[n], base[n].bfloat16().float()) for n in held if n not in masters) or kind[-1] == "3"


def test_an_adapter_without_its_settings_takes_them_from_the_command_line(checkpoints: Path, tmp_path: Path) -> None:
    words = ("method=lora", "method.rank=4", "method.alpha=12", "method.target_modules=[q_proj,v_proj]")
    held, verdict = _exported(checkpoints / "lora3", tmp_path / "out", *words)
    assert verdict["faults"] == []
    masters = load_file(checkpoints / "lora3" / "masters.safetensors")
    module = "model.layers.1.self_attn.q_proj"
    a, b = (masters[f"base_model.model.{module}.lora_{one}.default.weight"] for one in "AB")
    base = load_file(Path(location(configure("model=tiny_qwen2").model)) / "model.safetensors")
    expected = base[f"{module}.weight"].bfloat16().float() + 3 * b @ a
    assert torch.allclose(held[f"{module}.weight"], expected, atol=1e-6)
    with pytest.raises(ConfigError, match="holds an adapter without its adapter_config"):
        _exported(checkpoints / "lora3", tmp_path / "other", "method=full")


def test_a_checkpoint_of_a_run_is_exported_from_its_masters(checkpoints: Path, tmp_path: Path) -> None:
    """The run's own base in bf16 and float32 masters of the adapter, whatever the number of ranks."""
    run = checkpoints / "run"
    held, verdict = _exported(run / "checkpoints" / "step-1", tmp_path / "out", "model=tiny")
    assert verdict["faults"] == []
    assert read_card(tmp_path / "out" / "artifact").steps == 1
    masters = load_file(run / "masters.safetensors")
    module = "transformer.encoder.layers.0.self_attention.query_key_value"
    a, b = (masters[f"base_model.model.{module}.lora_{one}.default.weight"] for one in "AB")
    base = load_file(Path(location(configure("model=tiny").model)) / "model.safetensors")[f"{module}.weight"]
    scale = configure(*OWN).method.alpha / configure(*OWN).method.rank
    assert torch.equal(held[f"{module}.weight"], base.bfloat16().float() + scale * (b @ a))
    state = run / "checkpoints" / "step-1" / "rank-0.safetensors"
    content = state.read_bytes()
    state.write_bytes(content[:-8])
    with pytest.raises(ArtifactError):
        _exported(run, tmp_path / "other", "model=tiny")
    state.write_bytes(content)


def test_a_trainer_checkpoint_brings_its_own_sizes(checkpoints: Path, tmp_path: Path) -> None:
    """checkpoint-N of transformers.Trainer under DeepSpeed: config.json beside global_stepN; or plain safetensors."""
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(checkpoints / "stage3", folder)
    network = _network()
    network.config.save_pretrained(folder)
    held, verdict = _exported(folder, tmp_path / "out")
    assert verdict["faults"] == []
    plain = tmp_path / "checkpoint-3"
    network.load_state_dict(held)
    network.save_pretrained(plain, max_shard_size="1MB")
    again, verdict = _exported(plain, tmp_path / "again")
    assert verdict["faults"] == []
    assert all(torch.equal(again[name], held[name]) for name in held)


def test_a_checkpoint_of_another_network_or_without_a_rank_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="keys fit nothing in the model"):
        _exported(checkpoints / "stage2", tmp_path / "other", "model=tiny")
    shutil.copytree(checkpoints / "stage2", tmp_path / "part")
    next((tmp_path / "part").glob("*/*rank_1*optim_states.pt")).unlink()
    with pytest.raises(ArtifactError, match="holds 1 of 2 ranks' optimizer files"):
        _exported(tmp_path / "part", tmp_path / "out")


class Touch:
    """What a pickle can do when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    folder, marker = tmp_path / "global_step1", tmp_path / "marker"
    folder.mkdir()
    state = {"module": {}, "param_shapes": [], "buffer_names": [], "shared_params": {}, "extra": Touch(marker)}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(ArtifactError) as caught:
        _exported(tmp_path, tmp_path / "out")
    assert not marker.exists()
    said = caught.value.report()
    assert "is a pickle that holds" in said
    assert "safetensors is wanted" in said
    assert "weights_only" not in said, "no hint how to switch the guard off"
    torch.save({"model.norm.weight": torch.ones(2), "extra": Touch(marker)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match="was not loaded"):
        ds_files.load_pickle(tmp_path / "pytorch_model.bin")
    assert not marker.exists()
