"""However the ranks are started, it is one run in one folder; and when one rank ends, all do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from glmexp.config.errors import EXIT_STOPPED
from tests.cli import SHORT, alive, environment, glmexp, metrics, runs, started, status, wait_until

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m")
LONG = ("train.max_steps=100000", "eval=none", "tracker=none", "precision=fp32")


def test_torchrun_ranks_share_one_folder_and_one_training(tmp_path: Path) -> None:
    done = glmexp(*SHORT, folder=tmp_path, before=TORCHRUN)
    assert done.returncode == 0, done.stderr
    (run,) = runs(tmp_path)
    assert status(run)["state"] == "finished"
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank0.log", "rank1.log"]
    assert [line["step"] for line in metrics(run)] == [1, 2]


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("words", [("--local_rank=0",), ("--local-rank", "0")])
def test_local_rank_is_no_override(where: str, words: tuple[str, ...], tmp_path: Path) -> None:
    line = (*words, "--cfg", "job") if where == "first" else ("--cfg", "job", *words)
    done = glmexp(*line, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_deepspeed_launcher(tmp_path: Path) -> None:
    before = ("deepspeed", "--num_gpus", "2", "--master_port", str(_free_port()), "--module")
    done = glmexp(*SHORT, folder=tmp_path, before=before, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    (run,) = runs(tmp_path)
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank0.log", "rank1.log"]


def test_inprocess_is_the_same_run(tmp_path: Path) -> None:
    own = glmexp(*SHORT, "launcher=inprocess", f"run.dir={tmp_path}/in", folder=tmp_path)
    other = glmexp(*SHORT, "launcher.nproc=1", f"run.dir={tmp_path}/out", folder=tmp_path)
    assert (own.returncode, other.returncode) == (0, 0), own.stderr + other.stderr
    losses = [[line["train/loss"] for line in metrics(tmp_path / name)] for name in ("in", "out")]
    assert losses[0] == losses[1]


def test_a_taken_port_ends_at_once_with_its_number(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        before = (*TORCHRUN[:-1], "--master_port", port, "-m")
        done = glmexp(*SHORT, folder=tmp_path, before=before, timeout_s=90)
    assert done.returncode != 0
    assert port in done.stderr
    assert "in use" in done.stderr


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


def _rank_pid(process: subprocess.Popen[str], rank: int) -> int:
    for pid in alive(process):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if f"RANK={rank}".encode() in variables and b"glmexp" in command and b"torch.distributed.run" not in command:
            return pid
    raise AssertionError(f"no rank {rank}")


def _first_step(folder: Path) -> bool:
    return any((run / "metrics.jsonl").exists() for run in runs(folder))


@pytest.mark.parametrize("before", [(sys.executable, "-m"), TORCHRUN], ids=["local", "torchrun"])
def test_a_killed_rank_ends_all_within_30_s_and_is_named(before: tuple[str, ...], tmp_path: Path) -> None:
    nproc = () if before == TORCHRUN else ("launcher.nproc=2",)
    with started(*LONG, *nproc, folder=tmp_path, before=before) as process:
        wait_until(lambda: _first_step(tmp_path), 90, "first step")
        os.kill(_rank_pid(process, 1), signal.SIGKILL)
        wait_until(lambda: not alive(process), 30, "all processes gone")
        _, err = process.communicate()
    assert process.returncode not in (0, None)
    assert "rank" in err
    assert "1" in err
    assert "SIGKILL" in err
    (run,) = runs(tmp_path)
    assert status(run)["state"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_parent_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    with started(*LONG, "launcher.nproc=2", folder=tmp_path) as process:
        wait_until(lambda: _first_step(tmp_path), 90, "first step")
        os.kill(process.pid, number)
        wait_until(lambda: not alive(process), 30, "all processes gone")
        process.communicate()
    (run,) = runs(tmp_path)
    if number == signal.SIGTERM:  # asked politely: it saves, and can go on
        assert process.returncode == EXIT_STOPPED
        assert status(run)["state"] == "stopped"
        (saved,) = (run / "checkpoints").glob("step-*")
        assert saved.name == f"step-{metrics(run)[-1]['step']}"
    else:
        assert process.returncode != 0
        assert status(run)["state"] == "failed"


def test_the_failing_rank_speaks_first(tmp_path: Path) -> None:
    """numerics: a rank's own error, not the broken connections that follow from it; status says failed."""
    words = ("method=full", "optim.lr=1e30", "optim.max_grad_norm=null", "train.max_steps=30", "train.save_steps=1")
    done = glmexp(*LONG[1:], *words, "launcher.nproc=2", folder=tmp_path)
    assert done.returncode == 1
    first_line = done.stderr.strip().splitlines()[0]
    assert "NonFiniteError" in first_line, done.stderr
    assert "last finite loss" in first_line
    (run,) = runs(tmp_path)
    assert status(run)["state"] == "failed"
    finite = [line["step"] for line in metrics(run)]
    assert len(finite) <= 3
    saved = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")]
    assert max(saved, default=0) <= max(finite, default=0)


def test_a_users_mistake_found_in_the_ranks_exits_2_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt": \n', encoding="utf-8")
    done = glmexp(*SHORT, "data.train_file=broken.jsonl", "launcher.nproc=2", folder=tmp_path)
    assert done.returncode == 2
    assert "broken.jsonl:2" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("broken.jsonl:2") == 1, "said once, not by every rank"


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_twenty_launches_of_four_ranks_give_twenty_folders(tmp_path: Path) -> None:
    """Two at a time: many of them start within the same second."""

    def launch(_: int) -> int:
        return glmexp(*SHORT, "train.max_steps=1", "launcher.nproc=4", folder=tmp_path, timeout_s=300).returncode

    with ThreadPoolExecutor(2) as two:
        codes = Counter(two.map(launch, range(20)))
    assert codes == {0: 20}
    assert len(runs(tmp_path)) == 20
    assert all(status(run)["state"] == "finished" for run in runs(tmp_path))


def test_two_runs_of_the_same_second_have_two_folders(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "glmexp", *SHORT, f"optim.lr={lr}"],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.DEVNULL,
        )
        for lr in ("1e-3", "2e-3")
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    texts = [(run / "config.yaml").read_text() for run in runs(tmp_path)]
    assert len(texts) == 2
    assert sorted("lr: 0.002" in text for text in texts) == [False, True]
    assert all((run / "artifact" / "adapter_model.safetensors").exists() for run in runs(tmp_path))
