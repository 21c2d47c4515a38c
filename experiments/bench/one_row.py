"""Products of one row with a layer's weights: cuBLAS and a reduction of our own, at ChatGLM3-6B's shapes.

    python experiments/bench/one_row.py

One JSON line a shape and way: microseconds of one call among 28 in a CUDA graph, each with its own weights, bytes a
second, and the largest error against float64 relative to cuBLAS's. ``half`` shapes are those of two ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

SHAPES = {
    "query_key_value": (4608, 4096, False),
    "dense": (4096, 4096, False),
    "dense_h_to_4h": (27392, 4096, True),
    "dense_4h_to_h": (4096, 13696, False),
    "query_key_value half": (2304, 4096, False),
    "dense half": (4096, 2048, False),
    "dense_h_to_4h half": (13696, 4096, True),
    "dense_4h_to_h half": (4096, 6848, False),
}
SIZES = ((8, 512, 4), (4, 1024, 4), (16, 256, 4), (2, 2048, 4), (4, 2048, 8), (8, 1024, 8))
LAYERS = 28


@triton.jit
def product(
    states, weight, out, rows, columns, GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    """``out`` (rows,) = ``weight`` (rows, columns) ``states`` (columns,); GATED: silu of one half by the other."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = row < rows
    place = weight + row.to(tl.int64)[:, None] * columns + column[None, :]
    value = place + rows.to(tl.int64) * columns
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    other = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, columns, BLOCK):
        if EVEN:
            inside = there[:, None]
            x = tl.load(states + start + column).to(tl.float32)
        else:
            inside = there[:, None] & (start + column < columns)[None, :]
            x = tl.load(states + start + column, mask=start + column < columns, other=0.0).to(tl.float32)
        w = tl.load(place + start, mask=inside, other=0.0, eviction_policy="evict_first")
        total += w.to(tl.float32) * x[None, :]
        if GATED:
            v = tl.load(value + start, mask=inside, other=0.0, eviction_policy="evict_first")
            other += v.to(tl.float32) * x[None, :]
    result = tl.sum(total, 1)
    if GATED:
        result = result * tl.sigmoid(result) * tl.sum(other, 1)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=there)


def main() -> None:
    """All shapes."""
    from decoding import timed

    for name, (rows, columns, gated) in SHAPES.items():
        weights = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(LAYERS)]
        states = torch.randn(1, columns, device="cuda", dtype=torch.bfloat16)

        def library(weight: Tensor, states: Tensor = states, gated: bool = gated) -> Tensor:
            whole = torch.nn.functional.linear(states, weight)
            if not gated:
                return whole
            gate, value = whole.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * value

        exact: Any = torch.nn.functional.linear(states.double(), weights[0].double())
        if gated:
            gate, value = exact.chunk(2, dim=-1)
            exact = torch.nn.functional.silu(gate) * value
        allowed = (library(weights[0]).double() - exact).abs().max().item()
        ways: dict[str, Any] = {"cublas": library}
        for size in SIZES:
            ways[f"own {size}"] = lambda weight, size=size, states=states, gated=gated: own(
                states, weight, gated, *size
            )
        for way, one in ways.items():
            try:
                error = (one(weights[0]).double() - exact).abs().max().item() / allowed
                turn = iter(weights * 1000)
                us = timed(lambda one=one, turn=turn: one(next(turn)), LAYERS)
                rate = 2 * rows * columns / us / 1e6
                print(json.dumps({"product": name, "way": way, "us": round(us, 2), "tb_per_s": round(rate, 2),
                                  "error": round(error, 3)}), flush=True)  # fmt: skip
            except Exception as error:  # noqa: BLE001 - the others are still worth their numbers
                print(json.dumps({"product": name, "way": way, "failed": f"{type(error).__name__}: {error}"[:300]}))


def own(states: Tensor, weight: Tensor, gated: bool, rows: int, block: int, warps: int) -> Tensor:
    """The reduction."""
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(1, outputs, device=weight.device, dtype=weight.dtype)
    grid = (-(-outputs // rows),)
    even = weight.shape[1] % block == 0
    product[grid](
        states, weight, out, outputs, weight.shape[1], GATED=gated, ROWS=rows, BLOCK=block, EVEN=even, num_warps=warps
    )
    return out


if __name__ == "__main__":
    main()
