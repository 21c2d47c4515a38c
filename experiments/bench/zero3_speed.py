"""Two GPUs: ZeRO-3 beside ZeRO-2, and one GPU beside two.

    python experiments/bench/zero3_speed.py --work FOLDER [--model qwen2] [--full --layers 14] [--sides stage2 stage3]

Sides: stage2, stage3, blocks, leaf and tensors on two GPUs, stage2_one and so on on one; ``NAME=SIDE:KEY=VALUE;...``
adds options, as ``tuned=stage3:zero.stage3_param_persistence_threshold=1000000``. stage3 is what it is by itself, which
blocks asks for (zero.whole_blocks); in leaf DeepSpeed gathers blocks (zero.leaf_modules), in tensors tensor by tensor.
Speeds count all GPUs together: perfect scaling is a ratio of 2.
phases_s in the rows have forward and backward apart from the optimizer step. See README.md and sides.py.
"""

from __future__ import annotations

import argparse

from alternate import measure, plan_of, write
from running import Side
from sides import Job, add_job_arguments, job_of, product

BLOCKS = {"chatglm3": "Block", "qwen2": "Qwen2DecoderLayer"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=["stage2", "stage3"], metavar="[NAME=]KIND[:...]")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--accum", type=int, default=1, help="packed rows of a step and rank")
    parser.add_argument("--alone", action="store_true", help="where the sides do not fit into memory together")
    add_job_arguments(parser)
    asked = parser.parse_args()
    job = job_of(asked, full=asked.full, accum=asked.accum)
    sides = [two(word, job, asked.steps, asked.set, asked.alone) for word in asked.sides]
    case = f"{'full' if job.full else 'lora'} {job.model} {job.layers} layers, {job.accum} rows of {job.pack} a rank"
    write(measure(case, sides, plan_of(asked), job.work / "logs"), asked.out)


def two(word: str, job: Job, steps: int, common: list[str], alone: bool = False) -> Side:
    """The side that a word means; ``_one`` behind its kind: on one GPU."""
    head, _, rest = word.partition(":")
    name, _, kind = head.rpartition("=")
    options = {
        "stage2": ["zero=stage2"],
        "stage3": ["zero=stage3"],
        "blocks": ["zero=stage3", "zero.whole_blocks=true"],
        "leaf": ["zero=stage3", f"zero.leaf_modules=[{BLOCKS[job.model]}]"],
        "tensors": ["zero=stage3", "zero.whole_blocks=false"],
    }
    shape, alone_on_it = kind.removesuffix("_one"), kind.endswith("_one")
    if shape not in options:
        raise SystemExit(f"{word}: no side of that kind; there are {', '.join(options)}")
    ranks = 1 if alone_on_it else 2
    further = rest.split(";") if rest else []
    return product(name or kind, job, [*options[shape], *common, *further], steps, alone, ranks)


if __name__ == "__main__":
    main()
