"""What a run leaves behind: written from a live engine, loaded by a process that knows nothing but the folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glmexp.config.errors import ArtifactError, Problem
from glmexp.config.families import FAMILIES
from glmexp.config.registry import option
from glmexp.config.schema import ModelSection, RunConfig, Sizes
from glmexp.engine import distributed, fingerprint, gather, sharded
from glmexp.engine.build import DTYPES, frozen, trainable
from glmexp.method import weight_files
from glmexp.method.base import Method
from glmexp.model.build import load_network

FOLDER = "artifact"
CARD = "glmexp.json"


@dataclass(frozen=True)
class Card:
    """``glmexp.json``: how to put the artifact on its base, and what must come out."""

    gather: str
    stage: int
    dtype: str
    model: dict[str, Any]
    method: dict[str, Any]
    tensors: dict[str, int]
    """Fingerprint of each tensor that was trained (full16: of each that was written)."""
    base: str
    """Digest over the fingerprints of the frozen parameters: another base has another."""

    def write(self, folder: Path) -> None:
        """Write the card into the artifact folder."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (folder / CARD).write_text(text + "\n", encoding="utf-8")

    def model_section(self) -> ModelSection:
        """The base model."""
        return ModelSection(**{**self.model, "sizes": Sizes(**self.model["sizes"])})

    def method_settings(self) -> Method:
        """The method with its settings."""
        return option("method", self.method["name"])(**self.method)


def find(path: Path) -> Path:
    """The artifact folder that ``artifact.path`` means: itself, or the one in a run folder. Raises ArtifactError."""
    for folder in (path, path / FOLDER):
        if (folder / CARD).exists():
            return folder
    raise ArtifactError(Problem("artifact.path", f"{path} holds no {CARD}", "name a run folder or its artifact folder"))


def read_card(folder: Path) -> Card:
    """The card of an artifact folder."""
    return Card(**json.loads((folder / CARD).read_text(encoding="utf-8")))


def base_digest(model: nn.Module) -> str:
    """Digest of what is frozen, the same whole or partitioned. Collective."""
    return digest(fingerprint.of_parameters(frozen(model)))


def digest(prints: dict[str, int]) -> str:
    """One short word for many fingerprints."""
    return hashlib.sha256(json.dumps(sorted(prints.items())).encode()).hexdigest()[:32]


def write(engine: Any, config: RunConfig, method: Method, tokenizer: Any, run_folder: Path) -> Card:
    """Write ``artifact/``. Collective; files come from rank 0 (sharded: from each rank). Gathers only what is saved."""
    folder = run_folder / FOLDER
    model = engine.module
    if distributed.rank() == 0:
        folder.mkdir(exist_ok=True)
    distributed.barrier()
    prints = fingerprint.of_parameters(trainable(model))
    if config.gather.name == "sharded":
        sharded.write(engine, folder)
    elif config.gather.name == "full16":
        prints = _write_full16(folder, config, method, model)
    else:
        tensors = gather.tensors(trainable(model))
        if distributed.rank() == 0:
            held = {name: fingerprint.of_tensor(t) for name, t in method.write(folder, model, tensors).items()}
            torn = [name for name, value in held.items() if prints.get(name, value) != value]
            assert not torn, f"gathering changed {torn[:3]}: the partitions hold something else"
            prints = held
    card = Card(
        gather=config.gather.name,
        stage=config.zero.stage,
        dtype=_half(config) if config.gather.name == "full16" else config.precision.dtype,
        model=asdict(config.model),
        method=asdict(method),  # type: ignore[call-overload]  # every method is a dataclass
        tensors=prints,
        base=base_digest(model),
    )
    if distributed.rank() == 0:
        tokenizer.save_pretrained(folder)
        card.write(folder)
    distributed.barrier()
    return card


def _half(config: RunConfig) -> str:
    """16-bit format of ``full16``: the run's own, else bf16, whose range is that of fp32."""
    return config.precision.dtype if config.precision.dtype != "fp32" else "bf16"


def _write_full16(folder: Path, config: RunConfig, method: Method, model: nn.Module) -> dict[str, int]:
    """The whole model, adapters merged, as rank 0 puts it together one tensor at a time."""
    dtype = DTYPES[_half(config)]
    tensors: dict[str, torch.Tensor] = {}
    for name, parts, merge in method.merged(model):
        values = [value for _, value in gather.whole(parts)]
        if distributed.rank() == 0:
            tensors[name] = merge(*values).to(dtype)
    if distributed.rank() == 0:
        weight_files.write(folder, model, tensors)
    return {name: fingerprint.of_tensor(tensor) for name, tensor in tensors.items()}


def load(folder: Path, dtype: torch.dtype) -> tuple[nn.Module, Card]:
    """The trained model from an artifact folder, in ``dtype``, on the CPU, in eval mode.

    Raises ArtifactError where a file, the base or a tensor is not what the card says.
    """
    card = read_card(folder)
    if card.gather == "full16":
        whole = replace(card.model_section(), path=str(folder), init="pretrained")
        return load_network(whole, dtype).eval(), card
    base = load_network(card.model_section(), dtype)
    method, family = card.method_settings(), FAMILIES[card.model_section().family]
    if card.gather == "sharded":
        model = method.apply(base, family)
        tensors = sharded.assemble(folder, card.stage, [name for name, _ in trainable(model)])
        with torch.no_grad():
            for name, parameter in trainable(model):
                parameter.copy_(tensors[name])
    else:
        model = method.load(folder, base, family)
    return model.eval(), card


def check(model: nn.Module, card: Card) -> list[str]:
    """What in a loaded model is not as the card says, in words. Call with the card's dtype."""
    found = fingerprint.of_parameters(model.named_parameters())
    wrong = [name for name, value in card.tensors.items() if found.get(name) != value]
    faults = []
    if wrong:
        faults.append(
            f"{len(wrong)} of {len(card.tensors)} trained tensors are not as they were trained: {', '.join(wrong[:3])}"
        )
    rest = {name: value for name, value in found.items() if name not in card.tensors}
    if card.gather != "full16" and digest(rest) != card.base:
        faults.append(f"the base is another one: {card.model['path']} does not hold the weights that were trained on")
    return faults
