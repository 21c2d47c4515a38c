"""launcher=slurm. The script and its refusals everywhere; real jobs only inside of tests/launcher/slurm.sh."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from glmexp.config.errors import ConfigError
from glmexp.launcher import slurm
from tests.cli import SHORT, alive, glmexp, metrics, runs, started, status, wait_until
from tests.config.helpers import asked, config, refusal

JOB = (*SHORT, "launcher=slurm", "slurm.wait=true", "launcher.nproc=2", "launcher.timeout_s=120")


def _runs_slurm() -> bool:
    if shutil.which("scontrol") is None:
        return False
    return subprocess.run(["scontrol", "ping"], capture_output=True, check=False).returncode == 0


real = pytest.mark.skipif(not _runs_slurm(), reason="no Slurm here: tests/launcher/slurm.sh starts one")


def test_the_jobs_script_says_what_was_asked_for(tmp_path: Path) -> None:
    one = config(
        "launcher=slurm",
        "launcher.nnodes=2",
        "slurm.gpus_per_node=4",
        "slurm.time_limit='1-12:00:00'",
        "slurm.partition=gpu",
        "slurm.memory=64G",
        "slurm.cpus_per_rank=8",
        "slurm.signal_s=120",
        "slurm.extra=['--constraint=h200']",
        "slurm.setup=['module load cuda']",
        "run.name=study",
    )
    assert one.launcher.nproc == 4, "a rank for each GPU that the job asks for, whatever this machine has"
    assert one.train.batch_size == 8 * 4 * 2
    assert slurm.script(one, "FOLDER=/runs/a", tmp_path / "slurm-%j.out", "0-5%2") == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=study\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=4\n"
        "#SBATCH --partition=gpu\n"
        "#SBATCH --time=1-12:00:00\n"
        "#SBATCH --gpus-per-node=4\n"
        "#SBATCH --cpus-per-task=8\n"
        "#SBATCH --mem=64G\n"
        "#SBATCH --signal=USR1@120\n"
        "#SBATCH --array=0-5%2\n"
        f"#SBATCH --output={tmp_path}/slurm-%j.out\n"
        "#SBATCH --constraint=h200\n"
        "set -e\n"
        "module load cuda\n"
        "FOLDER=/runs/a\n"
        f'exec srun --kill-on-bad-exit=1 --cpus-per-task=8 {sys.executable} -m glmexp.worker --job "$FOLDER"\n'
    )


def test_what_cannot_be_a_job_is_refused() -> None:
    assert "slurm.partition: without effect with launcher=local" in refusal("slurm.partition=gpu")
    assert "'2 hours' is no duration" in refusal("launcher=slurm", "slurm.time_limit='2 hours'")
    assert "slurm.time_limit=60" in refusal("launcher=slurm", "slurm.signal_s=60")
    assert "4 ranks on 2 GPUs" in refusal("launcher=slurm", "launcher.nproc=4", "slurm.gpus_per_node=2")


def test_one_array_has_one_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(slurm.shutil, "which", lambda name: name)
    trials = asked("-m", "launcher=slurm", "launcher.nproc=1,2").trials
    with pytest.raises(ConfigError, match="one array has one shape"):
        slurm.submit_sweep(trials, tmp_path, None)


def test_without_sbatch_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="sbatch is not on PATH"):
        slurm.check([config("launcher=slurm")])


@real
def test_a_job_is_one_run(tmp_path: Path) -> None:
    done = glmexp(*JOB, folder=tmp_path)
    assert done.returncode == 0, done.stderr + _outputs(tmp_path)
    (run,) = runs(tmp_path)
    assert status(run)["state"] == "finished"
    assert [line["step"] for line in metrics(run)] == [1, 2]
    assert sorted(path.name for path in (run / "logs").glob("*.log")) == ["rank0.log", "rank1.log"]


@real
def test_a_job_on_two_nodes(tmp_path: Path) -> None:
    """Both nodes are this machine, whose names nobody resolves; hence the address."""
    setup = "slurm.setup=['export MASTER_ADDR=127.0.0.1']"
    done = glmexp(*JOB, "launcher.nproc=1", "launcher.nnodes=2", setup, folder=tmp_path)
    assert done.returncode == 0, done.stderr + _outputs(tmp_path)
    (run,) = runs(tmp_path)
    assert status(run)["state"] == "finished"
    assert "2 on cpu" in _outputs(tmp_path)


@real
def test_tasks_of_a_real_srun_share_one_run(tmp_path: Path) -> None:
    done = glmexp(*SHORT, folder=tmp_path, before=("srun", "-n", "2", sys.executable, "-m"))
    assert done.returncode == 0, done.stderr
    (run,) = runs(tmp_path)
    assert status(run)["state"] == "finished"
    wrong = glmexp("optim.lrr=1", folder=tmp_path, before=("srun", "-n", "2", sys.executable, "-m"), timeout_s=60)
    assert wrong.returncode == 2
    assert "did you mean optim.lr?" in wrong.stderr


@real
def test_a_sweep_is_an_array(tmp_path: Path) -> None:
    done = glmexp("-m", *JOB, "launcher.nproc=1", "method.rank=2,4", folder=tmp_path)
    assert done.returncode == 0, done.stderr + _outputs(tmp_path)
    assert "array of 2 trials" in done.stdout
    assert [status(run)["state"] for run in runs(tmp_path)] == ["finished", "finished"]


@real
def test_the_ranks_are_signalled_before_the_time_limit(tmp_path: Path) -> None:
    """Slurm may signal up to a minute early; a slow machine is asked to stop before it has begun."""
    words = ("train.max_steps=100000", "slurm.time_limit=2", "slurm.signal_s=45")
    done = glmexp(*JOB, *words, folder=tmp_path, timeout_s=240)
    assert done.returncode != 0
    (run,) = runs(tmp_path)
    assert status(run)["state"] == "stopped", _outputs(tmp_path)
    if (run / "metrics.jsonl").exists():
        assert [*(run / "checkpoints").glob("step-*")], "what was learned until then is on the disk"


@real
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    with started(*JOB, "train.max_steps=100000", folder=tmp_path) as process:
        wait_until(lambda: any((run / "metrics.jsonl").exists() for run in runs(tmp_path)), 200, "first step")
        (rank,) = [
            pid
            for pid in alive(process)  # the job inherits the environment that it was handed in with
            if b"SLURM_PROCID=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            and b"glmexp.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: not alive(process), 30, "all processes gone")
        process.communicate()
    assert process.returncode != 0
    (run,) = runs(tmp_path)
    assert status(run)["state"] == "failed"
    assert "task 1: Killed" in _outputs(tmp_path)


@real
def test_sbatchs_own_words_are_shown(tmp_path: Path) -> None:
    done = glmexp(*JOB, "slurm.partition=nosuch", folder=tmp_path)
    assert done.returncode == 2
    assert "sbatch refuses the job" in done.stderr
    assert "nvalid partition" in done.stderr
    assert "Traceback" not in done.stderr


def _outputs(folder: Path) -> str:
    files = [Path(base) / name for base, _, names in os.walk(folder) for name in names if name.startswith("slurm-")]
    return "\n".join(file.read_text() for file in files)
