"""Networks of true sizes with random weights, for dry runs and benchmarks: ready in seconds, the same everywhere.

Each weight is a function of the seed, the parameter's name and the weight's place in it, in integer arithmetic: CPU and
GPU, whole or in ZeRO-3's partitions, any number of ranks give the same bits. So the proof of a run can make the base
again, and no rank ever holds more than its part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)
from transformers.initialization import no_init_weights
from transformers.integrations import is_deepspeed_zero3_enabled

from glmexp.config.families import FAMILIES
from glmexp.config.schema import ModelSection
from glmexp.model.attention import DEFAULT_KIND
from glmexp.model.configuration import ChatGLM2Config, ChatGLMConfig

STD = 0.02
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Weights made at a time: few kernels on a GPU, and what stays in the cache of a CPU."""
# The sum of eight bytes of a hash: mean 8 * 127.5, variance 8 * (256^2 - 1) / 12. Close to normal, at most 4.9 sigma.
_MEAN, _SIGMA = 1020, math.sqrt(8 * (256**2 - 1) / 12)
_QWEN2_ROPE_BASE = 1_000_000.0
# Odd constants of Steele et al. 2014 (SplitMix64), as signed numbers: products wrap around modulo 2^64.
_GOLDEN, _MIX_1, _MIX_2 = (
    constant - (1 << 64) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def random_network(model: ModelSection, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> PreTrainedModel:
    """A network of ``model.sizes`` in ``dtype``: normal(0, 0.02), norms 1, biases 0.

    On the GPU where there is one, else on the CPU; partitioned while it is made where transformers knows of ZeRO-3.
    """
    attention = model.attention or DEFAULT_KIND
    return build(network_config(model, tokenizer), dtype, attention, model.init_seed)


def build(config: PreTrainedConfig, dtype: torch.dtype, attention: str, seed: int) -> PreTrainedModel:
    """The network of a configuration with random weights, in eval mode; see ``random_network``."""
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if is_deepspeed_zero3_enabled():
        network = AutoModelForCausalLM.from_config(config, **settings)
    else:
        place = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        with place, no_init_weights():
            network = AutoModelForCausalLM.from_config(config, **settings)
        network.tie_weights()
    fill(network, seed)
    return network.eval()


def network_config(model: ModelSection, tokenizer: Any) -> Any:
    """The configuration that ``model.sizes`` and the tokenizer's special ids describe."""
    sizes = {key: getattr(model.sizes, name) for name, key in FAMILIES[model.family].sizes.items()}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if model.family == "qwen2":
        rope = {"rope_type": "default", "rope_theta": _QWEN2_ROPE_BASE}
        return Qwen2Config(**sizes, **ids, rope_parameters=rope)
    if model.family == "chatglm":
        masks = {name: getattr(tokenizer, name) for name in ("mask_token_id", "gmask_token_id")}
        return ChatGLMConfig(**sizes, **ids, **masks)
    return ChatGLM2Config(**sizes, **ids, release=model.family)


@torch.no_grad()
def fill(network: nn.Module, seed: int) -> None:
    """Give every parameter its values: matrices random by ``seed`` and name, norms 1, biases 0. Partitions get their
    own part."""
    for name, parameter in network.named_parameters():
        _fill_one(name, parameter, seed)


@torch.no_grad()
def tensor_of(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """One parameter's values alone, on the CPU."""
    tensor = torch.empty(shape, dtype=dtype)
    _fill_one(name, tensor, seed)
    return tensor


def _fill_one(name: str, parameter: Any, seed: int) -> None:
    for part, start in _parts(parameter):
        if len(getattr(parameter, "ds_shape", parameter.shape)) < 2:
            part.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            _fill_normal(part, start, _key(seed, name))


def _parts(parameter: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """What this rank holds of a parameter, flat, and where it starts in the whole."""
    if not hasattr(parameter, "ds_tensor"):
        yield parameter.view(-1), 0
        return
    # offload.params=nvme: the partition is in a file, and what stands in its place is no part of it.
    on_disk = parameter.ds_tensor.status.name == "NOT_AVAILABLE"
    if on_disk:
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    part = parameter.ds_tensor.view(-1)
    start = part.numel() * (dist.get_rank() if dist.is_initialized() else 0)
    length = max(0, min(part.numel(), parameter.ds_numel - start))
    part[length:] = 0  # padding behind the last element
    yield part[:length], start
    if on_disk:
        parameter.nvme_swapper.swap_out_and_release([parameter])


def _key(seed: int, name: str) -> int:
    """A signed 64-bit number for a seed and a parameter's name."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little", signed=True)


def _fill_normal(flat: torch.Tensor, start: int, key: int) -> None:
    """``flat[i]`` becomes the normal number of place ``start + i``."""
    place = flat.device
    if place.type == "cpu" and torch.cuda.is_available():  # an offloaded partition: the GPU is faster at this
        place = torch.device("cuda", torch.cuda.current_device())
    size = _CHUNK[place.type]
    for offset in range(0, flat.numel(), size):
        chunk = flat[offset : offset + size]
        first = start + offset
        chunk.copy_(_normal(torch.arange(first, first + chunk.numel(), device=place), key))


def _normal(index: torch.Tensor, key: int) -> torch.Tensor:
    """float32 numbers of mean 0 and standard deviation STD for int64 places."""
    bits = index.mul_(_GOLDEN).add_(key)
    bits = (bits ^ _shifted(bits, 30)).mul_(_MIX_1)
    bits = (bits ^ _shifted(bits, 27)).mul_(_MIX_2)
    bits = bits ^ _shifted(bits, 31)
    # Eight bytes to four sums of two, then one product adds those up in its top 16 bits.
    low_bytes = 0x00FF00FF00FF00FF
    pairs = (bits & low_bytes) + (_shifted(bits, 8) & low_bytes)
    total = _shifted(pairs.mul_(0x0001000100010001), 48)
    return (total - _MEAN).float().mul_(STD / _SIGMA)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right: torch's own keeps the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
