"""The random numbers of a rank: kept, put back, left alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class UntouchedRng:
    """Context manager: random numbers drawn inside do not change those drawn after it."""

    def __enter__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors of uint8 (length,), plain values) of torch on CPU and GPU, numpy and python."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    version, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(np.asarray(key, dtype="<u4").copy().view(np.uint8))
    plain = {
        "python": [version, list(words), gauss],
        "numpy": [kind, int(position), int(has_gauss), float(cached)],
    }
    return tensors, plain


def set_state(tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
    """Put back what ``state`` gave. A GPU's state is left alone where there was none."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    kind, position, has_gauss, cached = plain["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().view("<u4"), position, has_gauss, cached))
