"""One loader for all that answers: whatever form the trained model lies in, the same numbers come out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glmexp.config.compose import run_config
from glmexp.config.errors import ArtifactError, UserError
from glmexp.entry import artifact, serving
from glmexp.entry.serving import Served
from tests.entry.test_export import exported, logits, trained


def served(*words: str) -> Served:
    config = run_config(["entry=evaluate", *words])
    return serving.load(serving.find(config), config)


def test_an_artifact_answers_in_its_own_format_and_in_another_that_is_chosen(tmp_path: Path) -> None:
    """The fingerprints are of the format that was trained in: another one is made of what was found right in it."""
    run = trained(tmp_path / "run", "model=tiny", "method=lora")
    own, other = served(f"artifact.path={run}"), served(f"artifact.path={run}", "precision=bf16")
    assert (own.dtype, other.dtype) == (torch.float32, torch.bfloat16)
    assert own.subject.steps == 3, "what was measured is of that step"
    assert {parameter.dtype for parameter in other.model.parameters()} == {torch.bfloat16}
    expected = logits(own.model)
    assert float((logits(other.model).float() - expected).abs().max()) <= 2e-2 * float(expected.abs().max())


def test_a_damaged_file_of_an_artifact_is_named(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", "model=tiny", "method=lora") / "artifact"
    damages: tuple[tuple[str, bytes | dict[str, Any], Callable[[], Any]], ...] = (
        *(
            ("glmexp.json", damage, lambda: artifact.read_card(folder))
            for damage in (b"{", b"[]", b"\xff", b"{}", {"model": None}, {"method": 5}, {"method": {}}, {"tensors": 1})
        ),
        ("glmexp.json", b"\xff", lambda: served(f"artifact.path={folder}")),
        ("adapter_config.json", b"{", lambda: served(f"artifact.path={folder}")),
        ("adapter_config.json", {"r": "x"}, lambda: served(f"artifact.path={folder}")),
    )
    for name, damage, read in damages:
        whole = (folder / name).read_bytes()
        content = json.dumps(json.loads(whole) | damage).encode() if isinstance(damage, dict) else damage
        (folder / name).write_bytes(content)
        with pytest.raises(UserError, match=re.escape(str(folder / name))):
            read()
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize("layout", ["released", "transformers"])
def test_an_export_answers_as_its_artifact_from_its_folder_alone(layout: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "model=tiny", "method=lora")
    folder, _ = exported(run, tmp_path / "out", f"export.layout={layout}")
    expected = logits(served(f"artifact.path={run}").model)
    assert float((logits(served(f"artifact.path={folder}").model) - expected).abs().max()) <= 1e-5 * float(
        expected.abs().max()
    )


def test_an_adapter_of_peft_alone_answers_on_the_named_base(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "model=tiny_qwen2", "method=lora")
    expected = logits(served(f"artifact.path={run}").model)
    (run / "artifact" / "glmexp.json").unlink()
    found = served(f"artifact.path={run}/artifact", "model=tiny_qwen2", "precision=fp32")
    assert torch.equal(logits(found.model), expected)


def test_an_adapter_on_another_base_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run = trained(tmp_path / "run", "model=tiny", "method=lora")
    file = run / "artifact" / "adapter_model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    next(iter(tensors.values())).add_(1)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="trained tensors are not as they were trained"):
        served(f"artifact.path={run}")
