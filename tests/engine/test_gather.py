"""What an artifact holds does not depend on the ZeRO stage: names, shapes, dtypes and, in fp32, values."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glmexp.config.errors import ArtifactError
from glmexp.entry import artifact, export, proof
from tests.engine.cells import all_stages, configure
from tests.ranks import run_on_ranks

STAGES = range(4)
GATHERS = ["full16", "sharded", "trainable"]


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LoRA in fp32, trained once at each stage on two ranks and gathered in every way: stage<N>-<gather>."""
    folder = tmp_path_factory.mktemp("lora")
    run_on_ranks(all_stages, ["model=tiny", "method=lora"], GATHERS, str(folder), folder=folder, timeout_s=560)
    return folder


def _prove(folder: Path) -> None:
    for stage in STAGES:
        for gather in GATHERS[:2]:
            verdict = proof.judge(folder / f"stage{stage}-{gather}")
            assert verdict["faults"] == [], f"stage {stage}, {gather}"
        whole = load_file(folder / f"stage{stage}-full16" / "artifact" / "model.safetensors")
        assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}, f"stage {stage}"
        parts = folder / f"stage{stage}-sharded" / "artifact" / "partitions"
        names = ["rank-0.safetensors", "rank-1.safetensors", "state.json"]
        assert sorted(file.name for file in parts.iterdir()) == names, "no pickle"


def test_whole_and_sharded_artifacts_prove_themselves_at_every_stage(lora: Path) -> None:
    _prove(lora)


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["ptuning", "full"])
def test_those_of_other_methods_do_too(method: str, tmp_path: Path) -> None:
    words = ["model=tiny", f"method={method}"]
    run_on_ranks(all_stages, words, GATHERS[:2], str(tmp_path), folder=tmp_path, timeout_s=560)
    _prove(tmp_path)


def test_bf16_adapters_have_one_dtype_at_every_stage(tmp_path: Path) -> None:
    """DeepSpeed alone keeps LoRA in bf16 at stage 2 and in fp32 at stage 3."""
    overrides = ["model=tiny", "method=lora", "precision=bf16"]
    run_on_ranks(all_stages, overrides, ["trainable"], str(tmp_path), folder=tmp_path)
    for stage in STAGES:
        assert proof.judge(tmp_path / f"stage{stage}-trainable")["faults"] == [], f"stage {stage}"
        tensors = load_file(tmp_path / f"stage{stage}-trainable" / "artifact" / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}, f"stage {stage}"


def test_stages_train_the_same_adapter(lora: Path) -> None:
    """fp32, 5 steps: weights 5e-5 between any two stages (other order of summation)."""
    files = [lora / f"stage{stage}-trainable" / "artifact" / "adapter_model.safetensors" for stage in STAGES]
    first, *others = [load_file(file) for file in files]
    for other in others:
        assert other.keys() == first.keys()
        for name, tensor in first.items():
            assert float((other[name] - tensor).abs().max()) <= 5e-5, name


def test_export_assembles_what_trainable_would_have_written(lora: Path, tmp_path: Path) -> None:
    """A sharded artifact of two ranks at stage 3, assembled by one process."""
    export.run(configure("entry=export", "export.form=trained", f"artifact.path={lora}/stage3-sharded"), tmp_path)
    assembled = load_file(tmp_path / "artifact" / "adapter_model.safetensors")
    direct = load_file(lora / "stage3-trainable" / "artifact" / "adapter_model.safetensors")
    assert assembled.keys() == direct.keys()
    assert all(torch.equal(assembled[name], direct[name]) for name in direct)
    assert artifact.read_card(tmp_path / "artifact").gather == "trainable"


def test_a_part_that_is_cut_short_is_named(lora: Path, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(lora / "stage3-sharded" / "artifact", folder)
    file = folder / "partitions" / "rank-1.safetensors"
    with file.open("r+b") as one:
        one.truncate(file.stat().st_size - 4)
    with pytest.raises(ArtifactError, match=r"rank-1.safetensors has [\d,]+ bytes, [\d,]+ were written"):
        artifact.load(folder, torch.float32)
