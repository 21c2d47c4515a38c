"""What a frozen base in fp8 does to LoRA's losses, with bf16 beside it and several seeds.

    python experiments/bench/fp8_loss.py --work FOLDER [--seeds 1 2 3] [--out FILE]
    python experiments/bench/fp8_loss.py --work FOLDER --model chatglm3 --steps 40 [--layers 28]

Each run is ``python -m glmexp`` on the shipped demo rows: the shipped tiny model from its weights, or a network of true
size from random ones (packed rows of 2,048). All seeds of both kinds run at the same time and are ended when their last
held-out loss is written: artifacts and their proofs are not asked about and would need the memory again. One JSON line:
the loss on the 96 held-out rows and the mean training loss of the last five steps, by kind and seed; the largest
difference of a seed's pair, the difference of the means, and the spread between seeds of bf16 (most minus least).
Wanted: the held-out losses within 0.02 of each other, and that below twice the spread.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from machine import keep, setting
from processes import Family

ROOT = Path(__file__).parents[2]
POLL_S = 0.2
KINDS = {"bf16": [], "fp8": ["precision.base=fp8"]}
LARGE = [
    "model.init=random", "method.lr=1e-3", "data.packing=true", "data.max_length=2048", "train.micro_batch_size=1",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=["tiny", "tiny_qwen2", "chatglm3", "qwen2"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more options of every run")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="the row is appended here")
    asked = parser.parse_args()
    began = time.monotonic()
    runs = {(kind, seed): start(asked, kind, seed) for seed in asked.seeds for kind in KINDS}
    found: dict[str, dict[int, dict[str, float]]] = {kind: {} for kind in KINDS}
    try:
        while waiting := [one for one in runs if one[1] not in found[one[0]]]:
            for kind, seed in waiting:
                code = runs[kind, seed].exit_code  # before the file is read: all that it wrote is there then
                if numbers := losses(place(asked, kind, seed), asked.steps):
                    found[kind][seed] = numbers
                    runs[kind, seed].end()
                    print(f"{time.monotonic() - began:.0f} s: {kind} seed {seed}: {numbers}", flush=True)
                elif code is not None or time.monotonic() - began > asked.limit_s:
                    why = "has not ended in time" if code is None else f"ended with {code}"
                    raise SystemExit(f"{kind} seed {seed} {why}:\n{runs[kind, seed].last_lines()}")
            time.sleep(POLL_S)
    finally:
        for family in runs.values():
            family.end()
    row: dict[str, Any] = {"kind": "fp8_loss", "model": asked.model, "steps": asked.steps, "options": asked.set}
    row |= {"losses": found, **compared(found)}
    row["wall_s"] = round(time.monotonic() - began, 1)
    print(json.dumps(row), flush=True)
    keep(asked.out, [row | setting(ROOT)])


def place(asked: argparse.Namespace, kind: str, seed: int) -> Path:
    return (asked.work / f"{asked.model}-{kind}-{seed}").resolve()


def start(asked: argparse.Namespace, kind: str, seed: int) -> Family:
    folder = place(asked, kind, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)  # of an earlier call
    words = [
        f"model={asked.model}", "method=lora", "precision=bf16", "zero=stage2", "eval=loss", "tracker=none",
        "launcher.nproc=1", f"train.max_steps={asked.steps}", "train.epochs=1000", f"train.seed={seed}",
        f"data.cache_dir={asked.work.resolve() / 'prepared'}", f"run.dir={folder}", "run.overwrite=true",
    ]  # fmt: skip
    if not asked.model.startswith("tiny"):
        words += [*LARGE, f"model.sizes.num_layers={asked.layers}"]
    command = [sys.executable, "-m", "glmexp", *words, *KINDS[kind], *asked.set]
    environment = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "HF_HUB_OFFLINE": "1"}
    return Family(command, ROOT, folder.with_suffix(".log"), environment)


def losses(folder: Path, steps: int) -> dict[str, float] | None:
    """None before the held-out loss behind the last step is written."""
    file = folder / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    held_out = {line["step"]: line["eval/loss/loss"] for line in lines if "eval/loss/loss" in line}
    if steps not in held_out:
        return None
    last = [line["train/loss"] for line in lines if "train/loss" in line][-5:]
    return {"before": held_out[min(held_out)], "held_out": held_out[steps], "train": sum(last) / len(last)}


def compared(found: dict[str, dict[int, dict[str, float]]]) -> dict[str, float]:
    """The numbers that decide."""
    result = {}
    for name in ("held_out", "train"):
        plain, low = ([found[kind][seed][name] for seed in sorted(found[kind])] for kind in KINDS)
        result[f"{name}_difference_of_means"] = sum(low) / len(low) - sum(plain) / len(plain)
        result[f"{name}_largest_difference"] = max(abs(a - b) for a, b in zip(low, plain, strict=True))
        result[f"{name}_spread_of_seeds"] = max(plain) - min(plain)
    return result


if __name__ == "__main__":
    main()
