"""What answers on GPUs: entry=bench to its end, entry=generate, placement=layers, tensor parallel; through the product.

    python experiments/bench/serving.py --part bench generate [--work outputs/serving] [--out results.jsonl]
    python experiments/bench/serving.py --part layers tensor_parallel        (two GPUs)

``bench``: ChatGLM3-6B's shape with random weights in bf16, batch 1, 16 and 64, 64 tokens after 128, ten generations,
transformers' generate in turns with ours: a row a cell. ``generate``: the same network answers the shipped prompts, 8
at a time. ``layers``: eight blocks of Qwen2-7B's widths, whole on one GPU and block by block over all: greedy answers
of both, which have to be the same; its vocabulary is the small tokenizer's, so that every token is a text.
``tensor_parallel``: the bench on one GPU and on two by turns, batch 1, and how many times as fast two are:
the ratio of the medians' means, and from the least of one to the most of the other. One JSON line each with hardware,
versions, commit and the command; what the product says goes to the terminal. ``--small``: narrow networks on the CPU,
for a rehearsal. Measured: results/serving_h200.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # also where only the package's root is on the path
from machine import keep, setting

ROOT = Path(__file__).resolve().parents[2]
COMMON = ["model.init=random", "precision=bf16", "tracker=none"]
NARROW = [
    f"model.sizes.{name}={size}"
    for name, size in {"hidden_size": 64, "intermediate_size": 96, "num_layers": 4, "num_attention_heads": 4}.items()
]
NARROW += ["model.sizes.num_key_value_heads=2"]
SMALL = {"chatglm3": [*NARROW, "model.sizes.head_size=16"], "qwen2": NARROW}
QWEN2_WORDS = 1280
"""Ids of the shipped Qwen2 tokenizer, which speaks for random weights."""


def main() -> None:
    """All parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"bench": bench, "generate": generate, "layers": layers, "tensor_parallel": tensor_parallel}
    parser.add_argument("--part", nargs="+", choices=[*parts], required=True)
    parser.add_argument("--work", type=Path, default=Path("outputs/serving"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=170.0, help="seconds of one command; a bench keeps its rows")
    parser.add_argument("--turns", type=int, default=2, help="of one GPU and two: about 65 s each")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    failed = []
    for part in args.part:
        try:
            for row in parts[part](args):
                keep(args.out, [{"part": part, **row, **setting(ROOT)}])
                print(json.dumps(row), flush=True)
        except subprocess.CalledProcessError as error:  # the other parts are still worth their numbers
            failed.append(f"{part}: exit code {error.returncode}")
        except subprocess.TimeoutExpired:
            failed.append(f"{part}: longer than {args.limit:.0f} s")
    sys.exit("; ".join(failed) or 0)


def glmexp(args: argparse.Namespace, name: str, model: str, *words: str) -> tuple[Path, str, float]:
    """Run the product; its folder, the command line, seconds. A bench that is cut off has left rows, which are taken.
    Raises CalledProcessError, TimeoutExpired."""
    folder = args.work.absolute() / name
    sizes = [*SMALL[model], "precision=fp32"] if args.small else []
    own = {word.partition("=")[0] for word in (*sizes, *words)}
    options = [word for word in (f"model={model}", *COMMON) if word.partition("=")[0] not in own]
    command = ["python", "-m", "glmexp", *options, *sizes, *words]
    began = time.monotonic()
    line = [sys.executable, *command[1:], f"run.dir={folder}", "run.overwrite=true"]
    try:
        subprocess.run(line, check=True, timeout=args.limit)
    except subprocess.TimeoutExpired:
        if not (folder / "bench.json").is_file():
            raise
    return folder, " ".join(command), time.monotonic() - began


def cells(folder: Path, command: str, seconds: float) -> Iterator[dict[str, Any]]:
    """The rows of a bench, each with what the whole run was."""
    report = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    names = ("finished", "copy_bytes_per_s", "weight_bytes_read", "ranks", "placement")
    whole = {name: report[name] for name in names}
    for cell in report["cells"]:
        yield {**cell, **whole, "whole_s": round(seconds, 1), "command": command}


def bench(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Three batch sizes, two sides."""
    runs = "3" if args.small else "10"
    way = ["decoding.way=static"] if args.small else []
    words = ["bench.plain=true", "bench.batch_sizes=[1,16,64]", "bench.prompt_lengths=[128]", "bench.new_tokens=64"]
    found = glmexp(args, "bench", "chatglm3", "entry=bench", *words, f"bench.runs={runs}", "bench.warm_up=1", *way)
    yield from cells(*found)


def tensor_parallel(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One network on one rank and shared by two, by turns."""
    way = ["decoding.way=static"] if args.small else []
    words = ["bench.batch_sizes=[1]", "bench.prompt_lengths=[128]", "bench.new_tokens=64", "bench.runs=10"]
    words += ["bench.warm_up=1", *way]
    sides = {"single": ["launcher.nproc=1"], "tensor_parallel": ["launcher.nproc=2"]}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(1, args.turns + 1):
        for name, ranks in sides.items():
            done = glmexp(args, f"{name}_{turn}", "chatglm3", "entry=bench", f"placement={name}", *ranks, *words)
            for row in cells(*done):
                found[name].append(row)
                yield {"turn": turn, **row}
        yield {"turns": turn, **faster(*found.values())}


def faster(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times as fast the benches ``two`` were as the benches ``one``."""
    medians, least, most = zip(
        *(
            (
                sum(row["tpot_s"] for row in rows) / len(rows),
                min(row["tpot_s_min"] for row in rows),
                max(row["tpot_s_max"] for row in rows),
            )
            for rows in (one, two)
        ),
        strict=True,
    )
    return {
        "times_as_fast": round(medians[0] / medians[1], 3),
        "times_as_fast_min": round(least[0] / most[1], 3),
        "times_as_fast_max": round(most[0] / least[1], 3),
        "tpot_s_one": medians[0],
        "tpot_s_two": medians[1],
    }


def answers(folder: Path) -> list[dict[str, Any]]:
    """What entry=generate wrote."""
    text = (folder / "answers.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]  # an answer may hold what splitlines splits at


def generate(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The shipped prompts, 8 at a time."""
    words = ["generate.prompts_file=builtin:prompts.jsonl", "generate.batch_size=8", "generate.max_new_tokens=64"]
    folder, command, seconds = glmexp(args, "generate", "chatglm3", "entry=generate", *words, "launcher=inprocess")
    rows = answers(folder)
    yield {
        "answers": len(rows),
        "new_tokens": sum(row["new_tokens"] for row in rows),
        "whole_s": round(seconds, 1),
        "command": command,
    }


def layers(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Greedy answers of one network on one GPU and over all."""
    words = [f"model.sizes.vocab_size={QWEN2_WORDS}", "generate.prompts_file=builtin:prompts.jsonl"]
    words += ["generate.batch_size=8", "generate.max_new_tokens=32", "decoding.way=plain", "launcher.nproc=1"]
    words += [] if args.small else ["model.sizes.num_layers=8"]
    found = {}
    for placement in ("single", "layers"):
        folder, command, seconds = glmexp(
            args, placement, "qwen2", "entry=generate", f"placement={placement}", *words, "launcher=inprocess"
        )
        found[placement] = [row["answer"] for row in answers(folder)]
        yield {"placement": placement, "whole_s": round(seconds, 1), "command": command}
    pairs = list(zip(found["single"], found["layers"], strict=True))
    yield {
        "answers": len(pairs),
        "same": sum(one == other for one, other in pairs),
        "signs": sum(len(one) for one, _ in pairs),
        "different_answers": len(set(found["single"])),
    }


if __name__ == "__main__":
    main()
