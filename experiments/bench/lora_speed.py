"""LoRA on one GPU, true shapes, random weights: the product beside a hand-made loop and the tutorials' recipe.

    python experiments/bench/lora_speed.py --model chatglm3 --work FOLDER --sides product plain
    python experiments/bench/lora_speed.py --model chatglm3 --work FOLDER --examples 16 --sides product tutorial dynamic

The first side is what the others are compared with. ``--examples 16`` fills rows with 16 examples' tokens on the
average, the tutorials' global batch; ``--seven`` adapts all seven projections of Qwen2. See README.md and sides.py.
"""

from __future__ import annotations

import argparse

from alternate import measure, plan_of, write
from sides import MEAN_TOKENS, add_job_arguments, job_of, side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=["product", "plain"], metavar="[NAME=]KIND[:...]")
    parser.add_argument("--examples", type=int, help="examples of a row on the average, in place of --pack")
    parser.add_argument("--seven", action="store_true")
    add_job_arguments(parser)
    asked = parser.parse_args()
    if asked.examples is not None:
        asked.pack = asked.examples * MEAN_TOKENS
    job = job_of(asked, seven=asked.seven)
    sides = [side(word, job, asked.steps, asked.set) for word in asked.sides]
    case = f"lora {job.model} {job.layers} layers, rows of {job.pack}" + (", seven projections" if job.seven else "")
    write(measure(case, sides, plan_of(asked), job.work / "logs"), asked.out)


if __name__ == "__main__":
    main()
