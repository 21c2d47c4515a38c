"""What an artifact holds does not depend on the ZeRO stage: names, shapes, dtypes and, in fp32, values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glmexp.config.errors import ArtifactError
from glmexp.entry import artifact, export, proof
from tests.engine.cells import all_stages, configure
from tests.ranks import run_on_ranks

STAGES = range(4)


@pytest.mark.parametrize(
    "method",
    ["lora", pytest.param("ptuning", marks=pytest.mark.matrix), pytest.param("full", marks=pytest.mark.matrix)],
)
def test_whole_and_sharded_artifacts_prove_themselves_at_every_stage(method: str, tmp_path: Path) -> None:
    gathers = ["full16", "sharded"]
    run_on_ranks(all_stages, ["model=tiny", f"method={method}"], gathers, str(tmp_path), folder=tmp_path, timeout_s=560)
    for stage in STAGES:
        for gather in gathers:
            verdict = proof.judge(tmp_path / f"stage{stage}-{gather}")
            assert verdict["faults"] == [], f"stage {stage}, {gather}"
        parts = tmp_path / f"stage{stage}-sharded" / "artifact" / "partitions"
        assert sorted(file.name for file in parts.iterdir()) == [
            "rank-0.safetensors", "rank-1.safetensors", "state.json"
        ], "no pickle"  # fmt: skip
        whole = load_file(tmp_path / f"stage{stage}-full16" / "artifact" / "model.safetensors")
        assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}, f"stage {stage}"


def test_bf16_adapters_have_one_dtype_at_every_stage(tmp_path: Path) -> None:
    """DeepSpeed alone keeps LoRA in bf16 at stage 2 and in fp32 at stage 3."""
    overrides = ["model=tiny", "method=lora", "precision=bf16"]
    run_on_ranks(all_stages, overrides, ["trainable"], str(tmp_path), folder=tmp_path)
    for stage in STAGES:
        assert proof.judge(tmp_path / f"stage{stage}-trainable")["faults"] == [], f"stage {stage}"
        tensors = load_file(tmp_path / f"stage{stage}-trainable" / "artifact" / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}, f"stage {stage}"


def test_stages_train_the_same_adapter(tmp_path: Path) -> None:
    """fp32, 5 steps: weights 5e-5 between any two stages (other order of summation)."""
    run_on_ranks(all_stages, ["model=tiny", "method=lora"], ["trainable"], str(tmp_path), folder=tmp_path)
    files = [tmp_path / f"stage{stage}-trainable" / "artifact" / "adapter_model.safetensors" for stage in STAGES]
    first, *others = [load_file(file) for file in files]
    for other in others:
        assert other.keys() == first.keys()
        for name, tensor in first.items():
            assert float((other[name] - tensor).abs().max()) <= 5e-5, name


def test_export_assembles_what_trainable_would_have_written(tmp_path: Path) -> None:
    """A sharded artifact of two ranks at stage 3, assembled by one process."""
    both = ["trainable", "sharded"]
    run_on_ranks(all_stages, ["model=tiny", "method=lora"], both, str(tmp_path), folder=tmp_path)
    out = tmp_path / "exported"
    out.mkdir()
    export.run(configure("entry=export", "export.form=trained", f"artifact.path={tmp_path}/stage3-sharded"), out)
    assembled = load_file(out / "artifact" / "adapter_model.safetensors")
    direct = load_file(tmp_path / "stage3-trainable" / "artifact" / "adapter_model.safetensors")
    assert assembled.keys() == direct.keys()
    # Two trainings of one seed in one process: equal to the last bit.
    assert all(torch.equal(assembled[name], direct[name]) for name in direct)
    assert artifact.read_card(out / "artifact").gather == "trainable"
    folder = tmp_path / "stage3-sharded" / "artifact"
    file = folder / "partitions" / "rank-1.safetensors"
    with file.open("r+b") as one:
        one.truncate(file.stat().st_size - 4)
    with pytest.raises(ArtifactError, match=r"rank-1.safetensors has [\d,]+ bytes, [\d,]+ were written"):
        artifact.load(folder, torch.float32)
