"""LoRA adapters (PEFT folders) of ChatGLM2/3 as those of ``GlmForCausalLM``, and back; see ``glm_layout``.

On query_key_value: W + s B A splits by rows, so q, k and v each get the same A and their rows of B. Back: with one A
the rows of B are put together again. Where the three differ, [Aq; Ak; Av] with B's blocks on the diagonal says the same
at three times the rank, and alpha grows alike; the other adapters are then filled up with zeros. Not converted, because
it would not be exact or has no place: DoRA, trained biases, a rank or alpha of its own for some layers, adapters on
embeddings, and with three different A rsLoRA (its scale goes by the root of the rank).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GlmConfig

from glmexp.config.errors import ArtifactError, Problem
from glmexp.model.configuration import ChatGLM2Config
from glmexp.model.glm_layout import SPLIT, chatglm_module, glm_modules, split_rows

SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
Factors = dict[str, tuple[Tensor, Tensor]]
"""Module name to its A (rank, inputs) and B (outputs, rank)."""


def adapter_to_glm(source: Path, target: Path, config: ChatGLM2Config, base: str | None = None) -> None:
    """Write the adapter folder ``source``, made for a network of ``config``, to ``target`` for ``GlmForCausalLM``.

    ``base``: what the new adapter says its base model is. Raises ArtifactError for what cannot be converted exactly.
    """
    settings, factors, whole = _read(source)
    converted: Factors = {}
    for module, (a, b) in factors.items():
        places = list(glm_modules(module))
        parts = split_rows(b, config) if len(places) == len(SPLIT) else (b,)
        # Copies: safetensors refuses tensors that share memory.
        converted |= {place: (a.clone(), part) for place, part in zip(places, parts, strict=True)}
    saved: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        module, _, kind = name.rpartition(".")
        places = list(glm_modules(module))
        parts = split_rows(tensor, config) if len(places) == len(SPLIT) else (tensor,)
        saved |= {f"{place}.{kind}": part for place, part in zip(places, parts, strict=True)}
    _write(target, settings, converted, saved, base)


def adapter_from_glm(source: Path, target: Path, config: GlmConfig, base: str | None = None) -> None:
    """Write the adapter folder ``source``, made for a ``GlmForCausalLM`` of ``config``, to ``target`` for ChatGLM2/3.

    The rank stays where q, k and v share their A, else it is tripled. Raises ArtifactError as above.
    """
    settings, factors, whole = _read(source)
    fused: dict[str, list[tuple[Tensor, Tensor] | None]] = {}
    converted: Factors = {}
    for module, pair in factors.items():
        place, part = chatglm_module(module)
        if part is None:
            converted[place] = pair
        else:
            fused.setdefault(place, [None] * len(SPLIT))[part] = pair
    rows = _rows(config)
    together = all(_one_a(parts) for parts in fused.values())
    if not together and settings.get("use_rslora"):
        raise ArtifactError(
            Problem("use_rslora", "q, k and v have an A each, and rsLoRA's scale does not keep at three times the rank")
        )
    for place, parts in fused.items():
        converted[place] = _joined(parts, rows) if together else _stacked(parts, rows)
    if not together:
        rank = settings["r"] * len(SPLIT)
        converted = {place: _filled(pair, rank) for place, pair in converted.items()}
        settings = {**settings, "r": rank, "lora_alpha": settings["lora_alpha"] * len(SPLIT)}
    _write(target, settings, converted, dict(_saved_from_glm(whole)), base)


def _saved_from_glm(whole: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in whole.items():
        module, _, kind = name.rpartition(".")
        place, part = chatglm_module(module)
        if part is None:
            yield f"{place}.{kind}", tensor
        elif part == 0:
            parts = [whole.get(f"{module.removesuffix(SPLIT[0])}{one}.{kind}") for one in SPLIT]
            present = [one for one in parts if one is not None]
            if len(present) < len(SPLIT):
                raise ArtifactError(Problem(name, "is saved whole and the other two of q, k, v are not"))
            yield f"{place}.{kind}", torch.cat(present)


def _read(folder: Path) -> tuple[dict[str, Any], Factors, dict[str, Tensor]]:
    """Settings, factors by module, and tensors that were trained whole. Raises ArtifactError for what has no exact
    form."""
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    wanted: dict[str, Any] = {"peft_type": "LORA", "use_dora": False, "bias": "none", "lora_bias": False}
    wanted |= {"rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": False}
    problems = [
        Problem(
            f"{folder / SETTINGS}: {name}", f"{settings[name]!r} cannot be converted exactly", f"only {value!r} can"
        )
        for name, value in wanted.items()
        if name in settings and (settings[name] or value) != value
    ]
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        plain = name.removeprefix(PREFIX)
        if plain.endswith(".lora_A.weight"):
            first[plain.removesuffix(".lora_A.weight")] = tensor
        elif plain.endswith(".lora_B.weight"):
            second[plain.removesuffix(".lora_B.weight")] = tensor
        elif ".lora_" in plain:
            problems.append(
                Problem(f"{folder / WEIGHTS}: {name}", "cannot be converted exactly", "use linear LoRA only")
            )
        else:
            whole[plain] = tensor
    if first.keys() != second.keys():
        problems.append(Problem(str(folder / WEIGHTS), "some A has no B", "the file is not whole"))
    if problems:
        raise ArtifactError(*problems)
    return settings, {module: (first[module], second[module]) for module in first}, whole


def _write(
    folder: Path, settings: dict[str, Any], factors: Factors, whole: dict[str, Tensor], base: str | None
) -> None:
    tensors = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in whole.items()}
    for module, (a, b) in factors.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a.contiguous()
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b.contiguous()
    # Whole names: short ones would also match layers that have no adapter.
    content = {**settings, "target_modules": sorted(factors), "layers_to_transform": None, "layers_pattern": None}
    content |= {"exclude_modules": None, "base_model_name_or_path": base}
    content["modules_to_save"] = sorted({name.rpartition(".")[0] for name in whole}) or None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _rows(config: GlmConfig) -> tuple[int, int, int]:
    """Outputs of q, k and v."""
    heads = config.num_attention_heads
    groups, width = config.num_key_value_heads or heads, config.head_dim or config.hidden_size // heads
    return heads * width, groups * width, groups * width


def _one_a(parts: list[tuple[Tensor, Tensor] | None]) -> bool:
    present = [pair[0] for pair in parts if pair is not None]
    return all(torch.equal(present[0], other) for other in present[1:])


def _joined(parts: list[tuple[Tensor, Tensor] | None], rows: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """One A, and B's rows one below the other; zeros where one of q, k, v has no adapter."""
    a, b = next(pair for pair in parts if pair is not None)
    blocks = [
        b.new_zeros(count, b.shape[1]) if pair is None else pair[1] for pair, count in zip(parts, rows, strict=True)
    ]
    return a, torch.cat(blocks)


def _stacked(parts: list[tuple[Tensor, Tensor] | None], rows: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """The three A one below the other, and B's blocks on the diagonal."""
    a, b = next(pair for pair in parts if pair is not None)
    pairs = [
        (a.new_zeros(a.shape), b.new_zeros(count, b.shape[1])) if pair is None else pair
        for pair, count in zip(parts, rows, strict=True)
    ]
    return torch.cat([pair[0] for pair in pairs]), torch.block_diag(*(pair[1] for pair in pairs))


def _filled(pair: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """The same product at a higher rank."""
    a, b = pair
    missing = rank - a.shape[0]
    return torch.cat([a, a.new_zeros(missing, a.shape[1])]), torch.cat([b, b.new_zeros(b.shape[0], missing)], dim=1)
