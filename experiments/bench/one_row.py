"""Products of one row with a layer's weights: cuBLAS and the reduction of ``step_kernels``, at ChatGLM3-6B's shapes.

    python experiments/bench/one_row.py

One JSON line a shape and way: microseconds of one call among 28 in a CUDA graph, each with its own weights, bytes a
second, and the largest error against float64 relative to cuBLAS's. ``half`` shapes are those of two ranks. A way of our
own is rows and columns that a program looks at together, its warps and its stages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

SHAPES = {
    "query_key_value": (4608, 4096),
    "dense": (4096, 4096),
    "dense_h_to_4h": (27392, 4096),
    "dense_4h_to_h": (4096, 13696),
    "query_key_value half": (2304, 4096),
    "dense half": (4096, 2048),
    "dense_h_to_4h half": (13696, 4096),
    "dense_4h_to_h half": (4096, 6848),
}
SIZES = (
    (4, 2048, 8, 1), (2, 2048, 4, 1), (4, 2048, 4, 1), (2, 4096, 8, 1), (1, 4096, 4, 1), (4, 1024, 4, 3),
    (2, 2048, 4, 3), (8, 512, 4, 4), (4, 2048, 8, 2),
)  # fmt: skip
LAYERS = 28


def main() -> None:
    """All shapes."""
    from decoding import timed

    from glmexp.model import step_kernels

    for name, (rows, columns) in SHAPES.items():
        weights = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(LAYERS)]
        states = torch.randn(1, columns, device="cuda", dtype=torch.bfloat16)
        exact = torch.nn.functional.linear(states.double(), weights[0].double())

        def library(weight: Tensor, states: Tensor = states) -> Tensor:
            return torch.nn.functional.linear(states, weight)

        def own(weight: Tensor, states: Tensor = states) -> Tensor:
            return step_kernels.row_product(states, weight, None)

        found: dict[Any, float] = {}
        allowed = (library(weights[0]).double() - exact).abs().max().item()
        for size in ("cublas", *SIZES):
            one: Any = library
            if isinstance(size, tuple):
                one, step_kernels.SIZE = own, size
            try:
                error = (one(weights[0]).double() - exact).abs().max().item() / allowed
                turn = iter(weights * 1000)
                found[size] = timed(lambda one=one, turn=turn: one(next(turn)), LAYERS)
                rate = 2 * rows * columns / found[size] / 1e6
                print(json.dumps({"product": name, "way": size, "us": round(found[size], 2),
                                  "tb_per_s": round(rate, 2), "error": round(error, 3)}), flush=True)  # fmt: skip
            except Exception as error:  # noqa: BLE001 - the others are still worth their numbers
                print(json.dumps({"product": name, "way": size, "failed": f"{type(error).__name__}: {error}"[:300]}))
        best = min((size for size in found if isinstance(size, tuple)), key=found.__getitem__)
        print(json.dumps({"product": name, "best": best, "of_cublas": round(found[best] / found["cublas"], 3)}))
        del weights


if __name__ == "__main__":
    main()
