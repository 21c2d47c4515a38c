"""A sweep whose trials are real processes and real run folders, with a few lines in place of a training.

``python -m tests.launcher.sweeps WORDS`` is the command line of a sweep with such trials, for tests that kill it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from glmexp.config.arguments import parse
from glmexp.config.compose import Machine, request, trial_of_search
from glmexp.config.load import read
from glmexp.config.schema import RunConfig
from glmexp.launcher import failures, folder
from glmexp.launcher.ranks import core_count
from glmexp.launcher.start import RunRank
from glmexp.launcher.sweep import sweep

STEPS = 4
REPOSITORY = Path(__file__).parents[2]


class NonFiniteError(RuntimeError):
    """Named as the engine's, which a trial of these few lines does not import."""


def run_rank(run_folder: Path, shows_failures: bool) -> int:
    """Writes what a rank writes. Learning rates 2, 3, 4: crashes, runs out of memory, is not finite, until a file
    ``repaired`` is there. The rank in HANG_AT waits in its third step, with a checkpoint of the second one."""
    config = read(run_folder / folder.CONFIG)
    first = 0 if config.train.resume is None else 2
    seen = {
        "first": first,
        "time": time.time(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    _append(run_folder / "starts", seen)
    print(f"words of rank {config.method.rank}")
    folder.write_status(run_folder, "running")
    errors = {2.0: RuntimeError("broken"), 3.0: MemoryError("no room"), 4.0: NonFiniteError("loss of step 1 is nan")}
    error = errors.get(config.optim.lr)
    if error is not None and not Path("repaired").exists():
        failure = failures.of_exception(0, error)
        failures.record(run_folder, failure)
        failures.report(run_folder, failure, 1)
        return failure.exit_code
    for step in range(first + 1, STEPS + 1):
        if step == 3 and os.environ.get("HANG_AT") == str(config.method.rank):
            (run_folder / "checkpoints").mkdir(exist_ok=True)
            (run_folder / "checkpoints" / "latest").write_text("step-2")
            time.sleep(60)
        loss = config.method.rank + abs(config.optim.lr - 0.3)
        _append(run_folder / "metrics.jsonl", {"step": step, "train/loss": loss, "eval/loss/loss": loss})
        time.sleep(float(os.environ.get("STEP_S", "0")))
    folder.write_status(run_folder, "finished", steps=STEPS)
    return 0


def _append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as opened:
        opened.write(json.dumps(line) + "\n")


def run(words: list[str], gpus: int = 0) -> int:
    """The command line of a sweep, its trials in this process's own forks. Raises ConfigError."""
    arguments, machine = parse(["-m", "launcher=inprocess", "tracker=none", *words]), Machine(gpus, None, core_count())
    asked = request(arguments, machine)
    with patch("glmexp.launcher.sweep.start", _start):
        return sweep(asked, words, run_rank, lambda values: trial_of_search(arguments, machine, values))


def _start(config: RunConfig, run_rank: RunRank) -> int:
    """Without a rendezvous, for which torch is loaded."""
    return run_rank(folder.make(config), True)


@contextmanager
def parent(*words: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """The same sweep as a process that can be killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.launcher.sweeps", *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def state(root: Path) -> dict[str, Any]:
    """sweep.json."""
    return json.loads((root / "sweep.json").read_text())


def outcomes(root: Path) -> list[str]:
    """State of each trial, by number."""
    return [trial["state"] for trial in state(root)["trials"]]


def starts(root: Path) -> list[list[dict[str, Any]]]:
    """What each trial, by number, noted when it was started; an empty list where it never was."""
    files = [root / trial["folder"] / "starts" for trial in state(root)["trials"]]
    return [[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
