"""The products of a frozen linear layer in fp8: error against float32 and speed, with bf16 beside it.

    python experiments/bench/fp8_products.py [--models chatglm3 qwen2] [--rows 8192] [--out FILE] [--small]

One JSON line a weight of the true shape. ``forward`` is x W^T, ``backward`` is dy W. Kinds:

    bf16        torch's own product
    rows        what glmexp.engine.fp8 does: a scale a row of x (or dy) and of W
    rows_turn   (backward) the same, with W turned round in the pass instead of kept twice
    rows_e5m2   (backward) the same with dy in e5m2
    tensor      one scale for all of x (or dy), one for W

``ms`` includes putting x or dy into fp8 by a compiled kernel, ``product_ms`` does not; ``error`` is ||a - b|| / ||b||
against float32. x is normal with a few channels twenty times larger, dy lognormal from row to row and within each. A
kind that the device refuses has its reason. ``--small`` is a rehearsal on a CPU, without the kinds that exist on GPUs
alone; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import keep, setting
from torch import Tensor

from glmexp.engine import fp8

ROOT = Path(__file__).parents[2]
SHAPES = {
    "chatglm3": {"qkv": (4096, 4608), "dense": (4096, 4096), "h_to_4h": (4096, 27392), "4h_to_h": (13696, 4096)},
    "qwen2": {"q": (3584, 3584), "gate": (3584, 18944), "down": (18944, 3584)},
}
REPEATS, WARM_UP = 10, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
compiled: Any = torch.compile(dynamic=False) if DEVICE == "cuda" else lambda function: function


@compiled
def rows(states: Tensor) -> tuple[Tensor, Tensor]:
    return fp8.quantised(states)


@compiled
def scaled_rows(states: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return fp8.quantised(states.float() * scales)


@compiled
def scaled_rows_e5m2(states: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    exact = states.float() * scales
    largest = exact.abs().amax(1, keepdim=True).clamp(min=1e-30)
    return (exact * (57344.0 / largest)).to(torch.float8_e5m2), largest / 57344.0


@compiled
def whole(states: Tensor) -> tuple[Tensor, Tensor]:
    exact = states.float()
    largest = exact.abs().amax()
    return (exact * (448.0 / largest)).to(fp8.FORMAT), largest / 448.0


@compiled
def turned(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, help="rows are appended here")
    asked = parser.parse_args()
    about = setting(ROOT)
    for model in asked.models:
        for name, (wide, high) in SHAPES[model].items():
            torch._dynamo.reset()  # else the ninth shape of a function is not compiled any more
            sizes = (64, 96, 128) if asked.small else (asked.rows, wide, high)
            row = {"kind": "product", "weight": f"{model} {name}", "rows": sizes[0], "in": sizes[1], "out": sizes[2]}
            row |= measured(*sizes) | about
            print(json.dumps({key: value for key, value in row.items() if key not in about}), flush=True)
            keep(asked.out, [row])


def measured(count: int, wide: int, high: int) -> dict[str, Any]:
    """All kinds for ``count`` rows and a weight (high, wide)."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator)

    x = (normal(count, wide) * (1 + 19 * (torch.arange(wide, device=DEVICE) % 512 == 0))).bfloat16()
    dy = (normal(count, high) * normal(count, high).exp() * normal(count, 1).mul(2).exp() * 1e-5).bfloat16()
    weight = (normal(high, wide) * 0.02).bfloat16()
    bits, scale_bits = fp8.quantised_weight(weight)
    values, scales = bits.view(fp8.FORMAT), scale_bits.view(torch.float32)
    turned_values, ones = bits.t().contiguous(), torch.ones(1, wide, device=DEVICE)

    def back(quantised: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], keep: bool) -> Kind:
        return Kind(
            lambda: quantised(dy, scales),
            lambda q, s: fp8.product(
                q, s, (turned_values if keep else turned(bits)).view(fp8.FORMAT), ones, torch.bfloat16
            ),
        )

    forward = {
        "bf16": Kind(lambda: (x, None), lambda q, _: q @ weight.t()),
        "rows": Kind(lambda: rows(x), lambda q, s: fp8.product(q, s, values, scales, torch.bfloat16)),
    }
    backward = {
        "bf16": Kind(lambda: (dy, None), lambda q, _: q @ weight),
        "rows": back(scaled_rows, keep=True),
        "rows_turn": back(scaled_rows, keep=False),
        "rows_e5m2": back(scaled_rows_e5m2, keep=True),
    }
    if DEVICE == "cuda":
        one, one_scale = whole(weight)
        one_turned = one.view(torch.uint8).t().contiguous().view(fp8.FORMAT)
        forward["tensor"] = Kind(lambda: whole(x), lambda q, s: one_product(q, s, one, one_scale))
        backward["tensor"] = Kind(lambda: whole(dy), lambda q, s: one_product(q, s, one_turned, one_scale))
    result: dict[str, Any] = {}
    for way, kinds, exact in (
        ("forward", forward, x.float() @ weight.float().t()),
        ("backward", backward, dy.float() @ weight.float()),
    ):
        result[way] = {name: kind.measured(exact) for name, kind in kinds.items()}
    return result


def one_product(values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return torch._scaled_mm(
        values,
        weight.t(),
        scale_a=scale,
        scale_b=weight_scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


class Kind:
    """A way to take the product, in its two parts."""

    def __init__(self, prepare: Callable[[], Any], multiply: Callable[[Any, Any], Tensor]) -> None:
        self._prepare, self._multiply = prepare, multiply

    def measured(self, exact: Tensor) -> dict[str, Any]:
        try:
            ready = self._prepare()
            error = (self._multiply(*ready).float() - exact).norm() / exact.norm()
            whole_ms = timed(lambda: self._multiply(*self._prepare()))
            product_ms = timed(lambda: self._multiply(*ready))
        except (RuntimeError, ValueError) as refusal:
            return {"refused": str(refusal).splitlines()[0][:200]}
        return {"ms": round(whole_ms, 3), "product_ms": round(product_ms, 3), "error": round(float(error), 5)}


def timed(function: Callable[[], Any]) -> float:
    """Median milliseconds."""
    for _ in range(WARM_UP):
        function()
    found = []
    for _ in range(REPEATS):
        if DEVICE == "cpu":
            began = time.perf_counter()
            function()
            found.append(1000 * (time.perf_counter() - began))
            continue
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


if __name__ == "__main__":
    main()
