"""Puts a network where it is to answer: on one device, block by block over several, or a share of it on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.inference_schema import DecodingSection, PlacementSection
from glmexp.config.schema import Family
from glmexp.engine import distributed
from glmexp.model import peer_sum, tensor_parallel
from glmexp.model.decoder import Decoder, applies, best_way

_ROOM = 0.85
"""Share of a GPU's free memory that weights may take: the rest is for keys, values and activations."""


def place(
    network: nn.Module, family: Family, section: PlacementSection, decoding: DecodingSection, timeout_s: float
) -> Any:
    """``network`` where ``section`` wants it, in evaluation mode. In place; collective under tensor_parallel, where a
    rank waits ``timeout_s`` for the others.

    LoRA is merged for split placements and wherever the decoder of this project writes; ``generate`` of transformers
    has it as it was trained. A prefix of PEFT (Qwen2) has no place in split placements: ConfigError.
    """
    if section.name == "single":
        whole: Any = merged(network) if merges(section, decoding) else network
        return whole.to(distributed.device()).eval()
    plain = merged(network)
    if not isinstance(plain, PreTrainedModel):
        raise ConfigError(
            Problem("placement.name", f"{section.name} has no place for a prefix of PEFT", "placement=single")
        )
    if section.name == "layers":
        return over_devices(plain, section).eval()
    tensor_parallel.share_out(plain, family, distributed.rank(), distributed.world_size())
    shared: Any = plain
    shared = shared.to(distributed.device()).eval()
    peer_sum.connect(plain.config.hidden_size, plain.dtype, distributed.device(), timeout_s, section.peer_sums)
    return shared


def merges(section: PlacementSection, decoding: DecodingSection) -> bool:
    """Whether ``place`` merges LoRA into the weights."""
    if section.name != "single":
        return True
    return decoding.way != "plain" if decoding.way is not None else torch.cuda.is_available()


def merged(network: Any) -> Any:
    """The network without PEFT around it: LoRA is added to the weights in float32 and rounded once to their format.

    In float32 the answers are those of the adapter to 1e-6; in 16 bit each weight is rounded anew, as the base's were.
    A prefix of PEFT stays.
    """
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    if not isinstance(network, PeftModel) or network.active_peft_config.is_prompt_learning:
        return network
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, LoraLayer):
                layer: Any = module
                weight = layer.base_layer.weight
                assert weight.is_floating_point(), "a base in fp8 is loaded in 16 bit for merging"
                down, up = (factor["default"].weight.float() for factor in (layer.lora_A, layer.lora_B))
                weight.copy_((weight.float() + layer.scaling["default"] * (up @ down)).to(weight.dtype))
    return network.unload()  # type: ignore[operator]  # peft hands it on to the adapter's model


def decoder(network: Any, section: DecodingSection, falls_back: bool) -> Decoder | None:
    """How ``network``, already placed, writes tokens; None: by ``generate`` of transformers. ``falls_back``: a way that
    nobody asked for may become another one where the compiler fails.

    Raises ConfigError where ``decoding.way`` names what does not apply to it.
    """
    if section.way == "plain":
        return None
    if section.way is None:
        way = best_way(network)
        return None if way is None else Decoder(network, way, falls_back=falls_back)
    if not applies(network):
        raise ConfigError(
            Problem(
                "decoding.way",
                f"{section.way} does not apply to {type(network).__name__}",
                "decoding.way=plain, or null; LoRA is merged for it, a prefix of PEFT cannot be",
            )
        )
    return Decoder(network, section.way)


def over_devices(network: Any, section: PlacementSection) -> Any:
    """Whole blocks on the GPUs, evenly, then in CPU memory, then on a disk (accelerate's device map). Raises
    ConfigError where they fit nowhere."""
    from accelerate import dispatch_model

    device_map = map_of(network, section)
    if set(device_map.values()) == {"cpu"}:
        return network
    folder = section.disk_folder
    if folder is None and "disk" in device_map.values():
        names = [name for name, place in device_map.items() if place == "disk"]
        raise ConfigError(
            Problem(
                "placement.disk_folder",
                f"is null, and {len(names)} parts fit neither on a GPU nor in CPU memory ({names[0]}, ...)",
                "placement.disk_folder=FOLDER, or larger placement.gpu_bytes and placement.cpu_bytes",
            )
        )
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    # Weights that stay in CPU memory or on a disk are computed with where inputs arrive.
    main = 0 if torch.cuda.is_available() else "cpu"
    return dispatch_model(network, device_map, main_device=main, offload_dir=folder)


def map_of(network: Any, section: PlacementSection) -> dict[str, Any]:
    """Name of a part to its device (a GPU's number, ``cpu`` or ``disk``); no block is split."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = list(network._no_split_modules)
    most: dict[int | str, int | str] = {}
    for index in range(torch.cuda.device_count()):
        free, _ = torch.cuda.mem_get_info(index)
        most[index] = min(section.gpu_bytes or free, int(_ROOM * free))
    most["cpu"] = section.cpu_bytes if section.cpu_bytes is not None else _free_host_bytes()
    if section.gpu_bytes is None and torch.cuda.is_available():
        most = get_balanced_memory(network, most, no_split_module_classes=whole)
    return infer_auto_device_map(network, most, no_split_module_classes=whole)


def _free_host_bytes() -> int:
    from glmexp.launcher.needs import available_memory_bytes

    found = available_memory_bytes()
    return 1 << 62 if found is None else found
