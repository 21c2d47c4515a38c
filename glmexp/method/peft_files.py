"""PEFT adapters: wrap a model, write and load the folder that the ecosystem reads. Shared by lora and ptuning."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glmexp.config.errors import ArtifactError, ConfigError, Problem
from glmexp.method.base import check_keys, check_shapes

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig
    from torch import nn

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_NO_EMBEDDINGS: dict[str, Any] = {"save_embedding_layers": False}
"""PEFT would add embeddings that are not trained where the vocabulary is not the one it finds by the model's name."""


def wrap(model: Any, config: PeftConfig) -> nn.Module:
    """``model`` with PEFT's parameters, the base frozen. They take the base's dtype (no silent float32 copy)."""
    from peft import get_peft_model

    _check_targets(model, config)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def _check_targets(model: Any, config: PeftConfig) -> None:
    """PEFT accepts a target that matches nothing as long as another one does."""
    modules = [name for name, _ in model.named_modules()]
    problems = []
    for key in ("target_modules", "modules_to_save"):
        for target in sorted(getattr(config, key, None) or []):
            if not any(name == target or name.endswith(f".{target}") for name in modules):
                there = sorted(
                    {name.rpartition(".")[2] for name in modules if not name.rpartition(".")[2].isdigit()} - {""}
                )
                problems.append(
                    Problem(
                        f"method.{key}", f"{target!r} matches no module of the model", f"there are: {', '.join(there)}"
                    )
                )
    if problems:
        raise ConfigError(*problems)


def write(folder: Path, model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The PEFT folder from whole tensors: PEFT itself never sees partitions. Returns what a loaded model holds."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    held = tensors
    if model.active_peft_config.is_prompt_learning:
        # PEFT keeps the finished table, not the network that makes it, and loads it as the encoder's embedding.
        table = _prompt_table(model, tensors)
        state = {"prompt_embeddings": table}
        held = {"prompt_encoder.default.embedding.weight": table}
    else:
        state = get_peft_model_state_dict(model, state_dict=dict(tensors), **_NO_EMBEDDINGS)
    save_file({name: t.contiguous() for name, t in state.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    model.active_peft_config.save_pretrained(folder)
    return held


def _prompt_table(model: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The prefix as (virtual tokens, layers * 2 * width): what the encoder gives for its own token ids.

    Computed by a fresh encoder: under ZeRO-3 the live one holds partitions.
    """
    import torch

    config = model.active_peft_config
    encoder = type(model.prompt_encoder["default"])(config)
    prefix = "prompt_encoder.default."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    encoder.load_state_dict(own, assign=True)
    with torch.no_grad():
        return encoder(torch.arange(config.num_virtual_tokens)).clone()


def names_in_file(model: Any) -> dict[str, str]:
    """Key of an adapter file to the name of the live parameter that it holds."""
    from peft import get_peft_model_state_dict

    parameters = dict(model.named_parameters())
    live = {id(parameter): name for name, parameter in parameters.items()}
    state = get_peft_model_state_dict(model, state_dict=parameters, **_NO_EMBEDDINGS)
    return {name: live[id(one)] for name, one in state.items()}


def load(folder: Path, model: Any) -> nn.Module:
    """The base with the adapter, after a check that PEFT leaves out: every key of both sides must fit the other."""
    from peft import PeftConfig, PeftModelForCausalLM
    from safetensors import SafetensorError, safe_open

    if not (folder / CONFIG).exists():
        raise ArtifactError(
            Problem(str(folder), f"holds no {CONFIG}", "name a folder that method=lora or ptuning wrote")
        )
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            Problem(str(folder / WEIGHTS), f"cannot be read: {error}", "the file is not whole")
        ) from error
    try:
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        loaded = PeftModelForCausalLM(model, config, autocast_adapter_dtype=False)
    except (KeyError, TypeError, ValueError) as error:
        message = f"is no adapter of this base: {error}"
        raise ArtifactError(Problem(str(folder / CONFIG), message, "restore the file")) from error
    expected = _expected_shapes(loaded)
    check_keys(folder / WEIGHTS, set(found), set(expected))
    check_shapes(folder / WEIGHTS, found, expected)
    loaded.load_adapter(str(folder), "default", is_trainable=False, autocast_adapter_dtype=False)
    return loaded


def check_scale(folder: Path, loaded: Any, scale: float) -> None:
    """The factor before B A stands in no tensor, so that no fingerprint vouches for it: each layer must have the one
    that was trained with. Raises ArtifactError."""
    from peft.tuners.lora import LoraLayer

    found = {module.scaling["default"] for module in loaded.modules() if isinstance(module, LoraLayer)}
    other = [one for one in found if not math.isclose(one, scale, rel_tol=1e-6)]
    if other:
        text = f"scales the adapter by {other[0]:g}, and it was trained with alpha / rank = {scale:g}"
        raise ArtifactError(Problem(str(folder / CONFIG), text, "restore lora_alpha, alpha_pattern and use_rslora"))


def _expected_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    from peft import get_peft_model_state_dict

    return {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(model, **_NO_EMBEDDINGS).items()}
