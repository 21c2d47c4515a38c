"""Attention of one new token over its slots: PyTorch's flash decoding and the kernel of ``step_kernels``.

    python experiments/bench/slots_attention.py [--splits 32 64]

One JSON line a shape and way: microseconds of one call among 28 in a CUDA graph, each over its own slots, and the
largest error against float64, relative to that of flash attention. ``--splits``: most parts of the slots.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

LAYERS = 28
SHAPES = (
    # batch, groups, heads, head_size, slots, used
    (1, 1, 16, 128, 256, 190),
    (1, 2, 32, 128, 256, 190),
    (16, 2, 32, 128, 768, 570),
    (1, 1, 16, 128, 4352, 4100),
    (1, 2, 32, 128, 32768, 32000),
    (64, 2, 32, 128, 768, 570),
    (1, 32, 32, 128, 256, 190),
    (2, 4, 28, 128, 1024, 700),
)


def main() -> None:
    """All shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", nargs="*", type=int, default=[32])
    args = parser.parse_args()
    from decoding import timed

    for shape in SHAPES:
        batch, groups, heads, size, slots, used = shape
        query = torch.randn(batch, heads, size, device="cuda", dtype=torch.bfloat16)
        one_layer = (2, batch, slots, groups, size)
        layers = [torch.randn(one_layer, device="cuda", dtype=torch.bfloat16).unbind() for _ in range(LAYERS)]
        lengths = torch.full((batch,), used, dtype=torch.int32, device="cuda")
        lengths[0] -= 7
        exact = reference(query, *layers[0], lengths)
        flash = flash_of(query, slots, lengths)
        allowed = (flash(*layers[0]).double() - exact).abs().max().item()
        for splits in (0, *args.splits):
            way = own_of(query, lengths, splits) if splits else flash
            name = f"own, {splits} parts at most" if splits else "flash"
            try:
                error = (way(*layers[0]).double() - exact).abs().max().item() / allowed
                turn = iter(layers * 1000)
                us = timed(lambda way=way, turn=turn: way(*next(turn)), LAYERS)
                print(
                    json.dumps({"shape": shape, "way": name, "us": round(us, 2), "error": round(error, 3)}), flush=True
                )
            except Exception as error:  # noqa: BLE001 - the others are still worth their numbers
                print(json.dumps({"shape": shape, "way": name, "failed": f"{type(error).__name__}: {error}"[:400]}))


def reference(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """In float64."""
    rows = []
    for row, length in enumerate(lengths.tolist()):
        repeats = query.shape[1] // keys.shape[2]
        key, value = (one[row, :length].double().repeat_interleave(repeats, dim=1) for one in (keys, values))
        scores = torch.einsum("hc,nhc->hn", query[row].double(), key) * query.shape[-1] ** -0.5
        rows.append(torch.einsum("hn,nhc->hc", scores.softmax(-1), value))
    return torch.stack(rows)


def flash_of(query: Tensor, slots: int, lengths: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """As ``slots_attention`` calls it."""
    ends = torch.arange(query.shape[0] + 1, dtype=torch.int32, device="cuda")

    def run(keys: Tensor, values: Tensor) -> Tensor:
        return torch.ops.aten._flash_attention_forward(
            query, keys.flatten(0, 1), values.flatten(0, 1), ends, ends * slots, 1, slots, 0.0, False, False,
            scale=query.shape[-1] ** -0.5, seqused_k=lengths,
        )[0]  # fmt: skip

    return run


def own_of(query: Tensor, lengths: Tensor, splits: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The kernel."""

    def run(keys: Tensor, values: Tensor) -> Tensor:
        from glmexp.model import step_kernels

        step_kernels.MOST_SPLITS = splits
        return step_kernels.attention(query, keys, values, lengths, query.shape[-1] ** -0.5)

    return run


if __name__ == "__main__":
    main()
