"""What the keys and values of a generation take: from the network's own layers, groups and head width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from glmexp.launcher.needs import available_memory_bytes


@dataclass(frozen=True)
class CacheShape:
    """Keys and values of one token, in all layers."""

    layers: int
    groups: int
    """Key and value heads; query heads share them."""
    width: int
    """Of one head."""
    itemsize: int
    """Bytes of one number."""
    virtual_tokens: int = 0
    """Of a prefix that PEFT puts into the cache, in every row. A ChatGLM's own prefix is no part of the cache."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: keys and values."""
        return 2 * self.layers * self.groups * self.width * self.itemsize

    def bytes(self, rows: int, length: int) -> int:
        """Bytes of a cache of ``rows`` rows of ``length`` tokens."""
        return rows * (length + self.virtual_tokens) * self.token_bytes

    @property
    def formula(self) -> str:
        """``2 x 28 layers x 2 groups x 128 x 2 bytes = 28,672 bytes a token``."""
        words = f"2 x {self.layers} layers x {self.groups} groups x {self.width} x {self.itemsize} bytes"
        return f"{words} = {self.token_bytes:,} bytes a token"


def shape_of(network: Any, dtype: torch.dtype) -> CacheShape:
    """The cache of a network (ChatGLM, GlmForCausalLM, Qwen2; also inside of PEFT) that computes in ``dtype``."""
    config = network.config
    heads = config.num_attention_heads
    # Ours calls it head_size; transformers' configurations have head_dim, older Qwen2 ones neither.
    width = getattr(config, "head_size", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    prefixes = [one.num_virtual_tokens for one in getattr(network, "peft_config", {}).values() if is_prefix(one)]
    return CacheShape(
        config.num_hidden_layers, config.num_key_value_heads, width, dtype.itemsize, sum(prefixes, start=0)
    )


def is_prefix(settings: Any) -> bool:
    """Whether PEFT's settings are those of a prefix, which lies in the cache."""
    return getattr(settings, "num_virtual_tokens", None) is not None


def max_positions(network: Any) -> int:
    """Positions that the network was made for, in tokens."""
    return int(network.config.max_position_embeddings)


def free_bytes(device: torch.device) -> int | None:
    """Memory of the device that a cache could take now. None where it is not known (no Linux)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch's allocator holds and has not handed out is free too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_memory_bytes()


def too_large(shape: CacheShape, rows: int, length: int, free: int | None) -> str | None:
    """Why a cache of ``rows`` x ``length`` tokens has no room, with the numbers and what would fit; None: it has."""
    wanted = shape.bytes(rows, length)
    if free is None or wanted <= free:
        return None
    fits = max(0, free // (rows * shape.token_bytes) - shape.virtual_tokens)
    times = f"{rows} rows of {length:,}" if rows > 1 else f"{length:,}"
    return (
        f"{times} tokens need {wanted / 1e9:.2f} GB for keys and values ({shape.formula}), and {free / 1e9:.2f} GB are "
        f"free beside the weights: room for {fits:,} tokens a row"
    )
