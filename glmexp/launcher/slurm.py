"""launcher=slurm: a run becomes a job, a sweep one array. The folders are made here, the ranks start in the job.

The job's script runs ``srun python -m glmexp.worker --job FOLDER``: every task of it is a rank (see ``start.in_job``).
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from glmexp.config.errors import EXIT_USER_MISTAKE, ConfigError, Problem
from glmexp.config.schema import RunConfig
from glmexp.launcher import folder

SCRIPT, TRIALS = "job.sh", "trials.txt"


def submit(config: RunConfig, run_folder: Path) -> int:
    """Hand the job of this run in. Returns 0, or the job's exit code with slurm.wait."""
    out = run_folder / "slurm-%j.out"
    text = script(config, f"FOLDER={shlex.quote(str(run_folder))}", out, None)
    return _hand_in(config, text, run_folder, [run_folder], out)


def submit_sweep(trials: Sequence[RunConfig], sweep_folder: Path, slots: int | None) -> int:
    """The same for a sweep: one array, each trial a task of it; ``slots`` of them run at a time (None: no limit)."""
    check(trials)
    folders = [folder.make(trial) for trial in trials]
    sweep_folder = sweep_folder.absolute()
    (sweep_folder / TRIALS).write_text("".join(f"{one}\n" for one in folders), encoding="utf-8")
    line = f'FOLDER=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(sweep_folder / TRIALS))})'
    array = f"0-{len(trials) - 1}" + (f"%{slots}" if slots is not None else "")
    out = sweep_folder / "slurm-%A_%a.out"
    return _hand_in(trials[0], script(trials[0], line, out, array), sweep_folder, folders, out)


def is_queued(run_folder: Path) -> bool:
    """Whether a job for this folder was handed in and has not begun."""
    return (run_folder / folder.STATUS).exists() and folder.read_status(run_folder)["state"] == "queued"


def script(config: RunConfig, folder_line: str, out: Path, array: str | None) -> str:
    """The text of the job's script. ``folder_line`` sets the shell's FOLDER to the run's folder."""
    launcher, job = config.launcher, config.slurm
    assert launcher.nproc is not None, "composing decides the number of ranks"
    options = {
        "job-name": config.run.name,
        "nodes": launcher.nnodes,
        "ntasks-per-node": launcher.nproc,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "time": job.time_limit,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_rank,
        "mem": job.memory,
        "signal": None if job.signal_s is None else f"USR1@{job.signal_s}",
        "array": array,
        "output": out,
    }
    lines = [f"#SBATCH --{name}={_word(str(value))}" for name, value in options.items() if value is not None]
    lines += [f"#SBATCH {word}" for word in job.extra]
    srun = ["srun", "--kill-on-bad-exit=1"]
    if job.cpus_per_rank is not None:  # since 22.05 srun does not take this over from the job
        srun.append(f"--cpus-per-task={job.cpus_per_rank}")
    run = f'exec {shlex.join([*srun, sys.executable, "-m", "glmexp.worker", "--job"])} "$FOLDER"'
    return "\n".join(["#!/bin/bash", *lines, "set -e", *job.setup, folder_line, run, ""])


def _word(value: str) -> str:
    """sbatch reads quotes in its comment lines as a shell does."""
    return shlex.quote(value)


def check(trials: Sequence[RunConfig]) -> None:
    """Raises ConfigError where there is no Slurm, or no one shape for all trials."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            Problem("launcher.name", "slurm: sbatch is not on PATH", "run this on a login node of the cluster")
        )
    first = trials[0]
    for trial in trials[1:]:
        if (trial.launcher, trial.slurm) != (first.launcher, first.slurm):
            raise ConfigError(
                Problem("launcher", "differs between the trials, and one array has one shape", "a sweep for each shape")
            )


def _hand_in(config: RunConfig, text: str, place: Path, folders: Sequence[Path], out: Path) -> int:
    path = place / SCRIPT
    path.write_text(text, encoding="utf-8")
    for one in folders:
        folder.write_status(one, "queued")
    words = ["sbatch", "--parsable", *(["--wait"] if config.slurm.wait else []), str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as sbatch:
        assert sbatch.stdout is not None
        assert sbatch.stderr is not None
        job = sbatch.stdout.readline().strip().split(";")[0]
        if job:
            what = f"array of {len(folders)} trials" if len(folders) > 1 else "job"
            log = str(out).replace("%j", job).replace("%A", job)
            print(f"{what} {job} is handed in: {place}", flush=True)
            print(f"  squeue --job {job}; scancel {job}; tail -F {log}", flush=True)
        said = sbatch.stderr.read().strip()
        code = sbatch.wait()
    if not job:
        for one in folders:
            folder.write_status(one, "failed", exit_code=EXIT_USER_MISTAKE, reason=said)
        raise ConfigError(Problem("slurm", f"sbatch refuses the job: {said}", f"the job's script is {path}"))
    return code
