"""Vectors recorded from the released implementations. They are not part of the repository: GLMEXP_ORACLES names their
folder (``models/<variant>/...`` and ``tokenizers/...``), and without it the tests that need them are skipped."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import glmexp.model  # noqa: F401  (registers the classes)

FOLDER = os.environ.get("GLMEXP_ORACLES")
needs_oracles = pytest.mark.skipif(
    not FOLDER, reason="GLMEXP_ORACLES does not name the folder of the recorded vectors (models/, tokenizers/)"
)

# One CPU kernel against another, float32: the vectors' own rounding is up to 2e-5, logits are up to 20 in size.
LOGITS, LOSS, GRADIENT = 5e-5, 1e-5, 1e-4


def variants() -> list[str]:
    """All recorded models; a placeholder when there are none, so that the skip shows up."""
    return sorted(path.name for path in Path(FOLDER, "models").iterdir()) if FOLDER else ["no_oracles"]


@dataclass(frozen=True)
class Recorded:
    """One variant: its folder, its cases with their facts, and all tensors by ``<case>.<field>``."""

    folder: Path
    cases: dict[str, dict[str, Any]]
    tensors: dict[str, Tensor]

    @property
    def is_v1(self) -> bool:
        return self.folder.name.startswith("v1")

    def get(self, case: str, field: str) -> Tensor | None:
        return self.tensors.get(f"{case}.{field}")

    def inputs(self, case: str, names: list[str] | None = None) -> dict[str, Tensor]:
        """The inputs of a case under their names in ``forward``; v1's masks are stored as bytes and mean bool."""
        names = self.cases[case]["inputs_passed"] if names is None else names
        found = {name: self.tensors[f"{case}.{name}"] for name in names if f"{case}.{name}" in self.tensors}
        return {name: tensor.bool() if tensor.dtype == torch.uint8 else tensor for name, tensor in found.items()}


@cache
def recorded(variant: str) -> Recorded:
    folder = Path(str(FOLDER), "models", variant)
    facts = json.loads((folder / "meta.json").read_text())
    return Recorded(folder, facts["cases"], load_file(folder / "vectors.safetensors"))


@cache
def network(variant: str, attention: str) -> PreTrainedModel:
    """The variant's model in float32 and eval mode; tests leave it as it is."""
    folder = Path(str(FOLDER), "models", variant)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32).eval()


def tokenizer_folder(release: str, target: Path) -> Path:
    """A folder in the released layout: vocabulary, tokenizer_config.json and config.json."""
    root = Path(str(FOLDER))
    shutil.copy(root / "configs" / f"{release}-6b.config.json", target / "config.json")
    if release == "chatglm":
        for name in ("ice_text.model", "tokenizer_config.json"):
            shutil.copy(root / "tokenizers" / "chatglm" / name, target / name)
    else:
        source = root / "tokenizers" / "chatglm2_3"
        shutil.copy(source / "tokenizer.model", target / "tokenizer.model")
        shutil.copy(source / f"tokenizer_config.v{release[-1]}.json", target / "tokenizer_config.json")
    return target


def records(version: str) -> list[dict[str, Any]]:
    path = Path(str(FOLDER), "tokenizers", "vectors", f"{version}.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
