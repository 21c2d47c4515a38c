"""The sides of the training speed tables: the product by options that a user can set, and its rivals.

A side is a word ``[NAME=]KIND[:KEY=VALUE;KEY=VALUE...]``. KIND is ``product``, whose further options follow the colon,
or one of RIVALS, whose flags do (``plain:--compile;no``).
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from alternate import add_arguments
from running import ROOT, Side

BENCH = Path(__file__).parent
RIVALS = {
    "plain": "plain_loop.py",
    "tutorial": "tutorial_recipe.py",
    "dynamic": "tutorial_recipe.py --dynamic --no-checkpointing",
    "dynamic_checkpointing": "tutorial_recipe.py --dynamic",
}
SECONDS_A_STEP = {"tutorial": 3.0, "dynamic": 0.9, "dynamic_checkpointing": 1.8}
"""Of those slower than half a second at true size: their windows have fewer steps."""
MEAN_TOKENS = 283
"""Of a row of instruction_data.py: ``--examples 16`` is packed rows with room for so many of them."""
SMALL = [
    "model.sizes.hidden_size=64", "model.sizes.intermediate_size=96", "model.sizes.num_attention_heads=4",
    "model.sizes.num_key_value_heads=2", "model.sizes.head_size=16", "model.sizes.vocab_size=1408",
]  # fmt: skip
SEVEN = "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"


@dataclass(frozen=True)
class Job:
    """What all sides of a table train."""

    model: str
    layers: int
    small: bool
    full: bool
    pack: int
    """Tokens of a packed row."""
    accum: int
    seven: bool
    work: Path
    """Data, run folders and logs."""

    @property
    def data(self) -> Path:
        return self.work / f"{self.model}-data"


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=["chatglm3", "qwen2"], default="chatglm3")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--pack", type=int, default=8192, help="tokens of a packed row")
    parser.add_argument("--small", action="store_true", help="two narrow layers: a rehearsal on a CPU")
    parser.add_argument("--rows", type=int, default=4096, help="examples in the data")
    parser.add_argument("--work", type=Path, required=True, help="folder for data, runs and logs")
    parser.add_argument("--steps", type=int, default=8, help="of a window")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more options of every product side")
    add_arguments(parser)


def job_of(asked: argparse.Namespace, full: bool = False, accum: int = 1, seven: bool = False) -> Job:
    """The job, with its data written where there is none yet."""
    layers = 2 if asked.small else asked.layers
    job = Job(asked.model, layers, asked.small, full, asked.pack, accum, seven, asked.work.resolve())
    if not (job.data / "ids.npz").exists():
        from instruction_data import write

        print(write(asked.model, job.data, asked.rows), flush=True)
    return job


def side(word: str, job: Job, steps: int, common: list[str], alone: bool = False) -> Side:
    """The side that a word means."""
    head, _, rest = word.partition(":")
    name, _, kind = head.rpartition("=")
    name = name or kind
    further = rest.split(";") if rest else []
    if kind == "product":
        return product(name, job, [*common, *further], steps, alone)
    if kind not in RIVALS:
        raise SystemExit(f"{word}: no side of that kind; there are product, {', '.join(RIVALS)}")
    script, *flags = RIVALS[kind].split()
    metrics = job.work / name / "metrics.jsonl"
    command = [sys.executable, str(BENCH / "rivals" / script), "--model", job.model, "--ids", str(job.data / "ids.npz")]
    command += ["--metrics", str(metrics), "--layers", str(job.layers), *flags, *further]
    command += ["--small"] * job.small + ["--seven"] * job.seven
    if kind == "plain":
        command += ["--pack", str(job.pack), "--accum", str(job.accum), *["--full"] * job.full]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    steps = max(2, min(steps, round(6 / SECONDS_A_STEP.get(kind, 0.5))))
    return Side(name, command, metrics, steps, alone, {"PYTHONPATH": path})


def product(name: str, job: Job, overrides: list[str], steps: int, alone: bool = False, ranks: int = 1) -> Side:
    """``python -m glmexp`` over packed rows of the job's data; an override stands in for the option that it names."""
    run = job.work / name
    words = {
        "model": job.model,
        "model.init": "random",
        "model.sizes.num_layers": str(job.layers),
        "method": "full" if job.full else "lora",
        **({"method.dropout": "0"} if not job.full else {}),
        "method.lr": "1e-5" if job.full else "1e-4",
        **({"method.target_modules": SEVEN} if job.seven else {}),
        "precision": "bf16",
        "zero": "stage2",
        "data": "alpaca",
        "data.train_file": str(job.data / "rows.jsonl"),
        "data.max_length": str(job.pack),
        "data.packing": "true",
        "data.cache_dir": str(job.work / "prepared"),
        "train.micro_batch_size": "1",
        "train.grad_accum": str(job.accum),
        "train.max_steps": "100000",
        "eval": "none",
        "tracker": "none",
        "launcher.nproc": str(ranks),
        "launcher.timeout_s": "3600",
        "run.dir": str(run),
        "run.overwrite": "true",
    }
    small = [word for word in SMALL if job.model == "chatglm3" or "head_size" not in word] if job.small else []
    for override in [*small, *overrides]:
        key, found, value = override.partition("=")
        if not found:
            raise SystemExit(f"{override}: an option of the product is KEY=VALUE")
        words[key] = value
    command = [sys.executable, "-m", "glmexp", *(f"{key}={value}" for key, value in words.items())]
    return Side(name, command, run / "metrics.jsonl", steps, alone, ranks=int(words["launcher.nproc"]))
