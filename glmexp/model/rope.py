"""Rotary position embedding of the three releases (Su et al. 2021, arXiv:2104.09864).

Frequencies are made anew in every forward, in float32: as buffers they would be lost by a cast of the model, by a
construction on the meta device or by ``deepspeed.zero.Init``. It is a handful of tiny kernels a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROPE_BASE = 10000.0


def inverse_frequencies(
    width: int, device: torch.device, base: float = ROPE_BASE, half_rounded: bool = False
) -> Tensor:
    """``base ** (-2i / width)`` for i in 0..width/2-1, float32, shape (width / 2,).

    ``half_rounded``: rounded to float16 and kept so, as ChatGLM-6B was trained (exact values are off by 6e-3 in the
    logits at 73 tokens).
    """
    exponent = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    frequencies = 1.0 / (base**exponent)
    return frequencies.half().float() if half_rounded else frequencies


def rotation_table(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``positions`` (batch, length): two float32 (batch, 1, length, len(frequencies))."""
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate_interleaved(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the first ``2 * cos.shape[-1]`` channels; the rest passes (v2, v3).

    ``states``: (batch, heads, length, head_size). Computed in float32, returned in the dtype of ``states``.
    """
    width = 2 * cos.shape[-1]
    first, second = states[..., :width].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((rotated.to(states.dtype), states[..., width:]), dim=-1)


def rotate_halves(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + width/2) of all channels (v1). Shapes and dtypes as in ``rotate_interleaved``."""
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(states.dtype)
