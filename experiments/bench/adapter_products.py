"""LoRA's products as PEFT makes them and as compiled training does (glmexp.engine.adapters): gradients, milliseconds.

    python experiments/bench/adapter_products.py [--layers 2] [--tokens 8192] [--small] [--out FILE]

A few compiled blocks of Qwen2-7B's width with random weights, adapters on the attention's four projections and on all
seven: one forward and backward pass of each kind in turns. One JSON line a case: milliseconds of a block (median of
``--repeats``, what lies around the blocks included) and how far the gradients of both are from those of plain blocks
with PEFT's layers in float32, over the same weights. Where ``thin`` is more than 1.2 times as far as ``peft`` it ends
with an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from fp8_gradients import adapted, compared, gradients
from machine import keep, setting
from sides import SEVEN

from glmexp.engine import compiled
from glmexp.engine.adapters import make_thin

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--backend", choices=["inductor", "aot_eager"], default="inductor")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.model = "qwen2"
    wrong = []
    for case, words in (("attention", ()), ("seven", (f"method.target_modules={SEVEN}",))):
        row = {"kind": "adapter_products", "case": case, "layers": asked.layers} | measured(asked, words)
        print(json.dumps(row), flush=True)
        keep(asked.out, [row | setting(ROOT)])
        if row["thin"]["relative"] > 1.2 * row["peft"]["relative"]:
            wrong.append(case)
    if wrong:
        sys.exit(f"gradients are farther from float32 than PEFT's: {', '.join(wrong)}")


def measured(asked: argparse.Namespace, words: tuple[str, ...]) -> dict[str, Any]:
    """Milliseconds a block and errors of gradients of both kinds."""
    tokens = 64 if asked.small else asked.tokens
    ids = torch.randint(3, 1000, (1, tokens), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()  # each case has as many graphs as it may
    models, found = {}, {}
    for kind in ("exact", "peft", "thin"):
        model, network = adapted(asked, *words)
        ids = ids.to(network.device)
        if kind == "thin":
            make_thin(model)
        if kind == "exact":
            model.float()
        else:
            compiled.compile_blocks(network, backend=asked.backend)
            models[kind] = model
        found[kind] = gradients(model, ids)[1]
    row: dict[str, Any] = {kind: compared(found[kind], found["exact"]) for kind in models}
    if not ids.is_cuda:
        return row
    times: dict[str, list[float]] = {kind: [] for kind in models}
    for number in range(2 + asked.repeats):
        for kind in list(models) if number % 2 else list(models)[::-1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            gradients_only(models[kind], ids)
            end.record()
            torch.cuda.synchronize()
            times[kind].append(begin.elapsed_time(end) / asked.layers)
    return row | {f"{kind}_ms": round(statistics.median(ms[2:]), 3) for kind, ms in times.items()}


def gradients_only(model: Any, ids: torch.Tensor) -> None:
    """Through the blocks alone: no output layer."""
    model.zero_grad()
    model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()


if __name__ == "__main__":
    main()
