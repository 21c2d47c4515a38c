"""Ways to attend within the examples of a packed row, forward and backward, at true shapes on one GPU.

    python experiments/bench/attention_kernels.py [--tokens 8192] [--repeats 20] [--small]

The row is filled with examples of instruction_data.py's lengths. ``flash`` is what the network calls (FlashAttention 2
with the examples' ends), ``flex`` FlexAttention, compiled, with a block mask of whose making ``mask_ms`` tells;
``cudnn``, only where it is asked for, cuDNN's with the same ends: its gradients are wrong
(results/attention_h200.jsonl). One JSON line a case: median milliseconds, relative errors of the output and of the
three gradients against float32 by one call of sdpa an example, or why it could not run. A way gets ``--limit-s``
seconds, compiling included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from instruction_data import draw
from machine import keep, setting
from torch import Tensor

ROOT = Path(__file__).parents[2]
HEADS = {"chatglm3": (32, 2, 128), "qwen2": (28, 4, 128)}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens, heads, head_size) each, key and value with their own heads, to the same as the query."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["flash", "flex"])
    parser.add_argument("--limit-s", type=int, default=60, help="of a way")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="one way by the reference alone: a rehearsal on a CPU")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGALRM, _late)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ends, longest = filled(asked.tokens)
    for model in asked.models:
        heads, groups, size = (4, 2, 16) if asked.small else HEADS[model]
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        states = [
            torch.randn(asked.tokens, count, size, device=device, dtype=dtype, generator=generator).requires_grad_()
            for count in (heads, groups, groups, heads)
        ]
        exact = passed([one.detach().float().requires_grad_() for one in states], one_by_one(ends))
        for way in ["reference"] if asked.small else asked.ways:
            row = {"kind": "attention", "model": model, "way": way, "tokens": asked.tokens, "examples": len(ends) - 1}
            signal.alarm(asked.limit_s)
            try:
                row |= case(way, states, exact, torch.tensor(ends, dtype=torch.int32, device=device), longest, asked)
            except (RuntimeError, NotImplementedError, TypeError, ImportError, TimeoutError) as error:
                row["fault"] = str(error).splitlines()[0][:200]
            finally:
                signal.alarm(0)
            print(json.dumps(row), flush=True)
            keep(asked.out, [row | setting(ROOT)])


def _late(number: int, frame: object) -> None:
    raise TimeoutError("no result within --limit-s")


def filled(tokens: int) -> tuple[list[int], int]:
    """Ends of drawn examples that fill a row, the last one cut; the longest."""
    lengths, ends = iter(draw(4096)[0].tolist()), [0]
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + next(lengths)))
    return ends, max(last - first for first, last in itertools.pairwise(ends))


def case(
    way: str, states: list[Tensor], exact: list[Tensor], ends: Tensor, longest: int, asked: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds and errors of one way."""
    attend, extra = WAYS[way](ends, longest)
    found = passed(states, attend)
    errors = [
        round(float((one.float() - right).norm() / right.norm()), 5) for one, right in zip(found, exact, strict=True)
    ]
    row: dict[str, Any] = {"errors": dict(zip(("out", "query", "key", "value"), errors, strict=True))}
    if not ends.is_cuda:
        return row | extra
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(3 + asked.repeats):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        out = attend(*states[:3])
        marks[1].record()
        torch.autograd.grad(out, states[:3], states[3].detach())
        marks[2].record()
        torch.cuda.synchronize()
        times["forward"].append(marks[0].elapsed_time(marks[1]))
        times["backward"].append(marks[1].elapsed_time(marks[2]))
    return row | extra | {f"{name}_ms": round(statistics.median(ms[3:]), 4) for name, ms in times.items()}


def passed(states: list[Tensor], attend: Attention) -> list[Tensor]:
    """The output and the gradients of query, key, value for a given one of the output."""
    out = attend(*states[:3])
    return [out.detach(), *torch.autograd.grad(out, states[:3], states[3].detach())]


def one_by_one(ends: list[int]) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = []
        for first, last in itertools.pairwise(ends):
            one = (part[None, first:last].transpose(1, 2) for part in (query, key, value))
            parts.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(parts)

    return attend


def flash(ends: Tensor, longest: int) -> tuple[Attention, dict[str, Any]]:
    kernel = torch.ops.aten._flash_attention_forward
    return lambda q, k, v: kernel(q, k, v, ends, ends, longest, longest, 0.0, True, False)[0], {}


def cudnn(ends: Tensor, longest: int) -> tuple[Attention, dict[str, Any]]:
    kernel = torch.ops.aten._cudnn_attention_forward
    return lambda q, k, v: kernel(q, k, v, None, ends, ends, longest, longest, True, 0.0, True, False)[0], {}


def flex(ends: Tensor, longest: int) -> tuple[Attention, dict[str, Any]]:
    from torch.nn.attention.flex_attention import create_block_mask

    places = torch.arange(int(ends[-1]), device=ends.device)
    example = torch.searchsorted(ends, places, right=True)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (example[query] == example[key])

    make = torch.compile(create_block_mask)
    made = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(3):
        made[0].record()
        blocks = make(mask, None, None, len(places), len(places), device=ends.device)
        made[1].record()
    torch.cuda.synchronize()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        turned = (one.transpose(0, 1)[None] for one in (query, key, value))
        return compiled_flex()(*turned, block_mask=blocks, enable_gqa=True)[0].transpose(0, 1)

    return attend, {"mask_ms": round(made[0].elapsed_time(made[1]), 3)}


@cache
def compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def reference(ends: Tensor, longest: int) -> tuple[Attention, dict[str, Any]]:
    return one_by_one(ends.tolist()), {}


WAYS = {"flash": flash, "cudnn": cudnn, "flex": flex, "reference": reference}


if __name__ == "__main__":
    main()
