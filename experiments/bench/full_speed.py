"""Full fine-tuning on one GPU at 32,768 tokens a step: ZeRO-2 through the product beside a plain loop.

    python experiments/bench/full_speed.py --work FOLDER [--layers 28]

Each side takes nearly the whole memory, so it is alone on the GPU and the sides take turns by restart (with fewer
layers, ``--together`` keeps them in memory side by side). See README.md and sides.py.
"""

from __future__ import annotations

import argparse

from alternate import measure, plan_of, write
from sides import add_job_arguments, job_of, side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=["product", "plain"], metavar="[NAME=]KIND[:...]")
    parser.add_argument("--accum", type=int, default=4, help="packed rows of a step")
    parser.add_argument("--together", action="store_true")
    add_job_arguments(parser)
    parser.set_defaults(steps=4, warm_up=2)
    asked = parser.parse_args()
    job = job_of(asked, full=True, accum=asked.accum)
    sides = [side(word, job, asked.steps, asked.set, alone=not asked.together) for word in asked.sides]
    case = f"full {job.model} {job.layers} layers, {job.accum} rows of {job.pack}"
    write(measure(case, sides, plan_of(asked), job.work / "logs"), asked.out)


if __name__ == "__main__":
    main()
