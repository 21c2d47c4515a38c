"""However the ranks are started, it is one run in one folder; and when one rank ends, all do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from glmexp.config.errors import EXIT_STOPPED
from tests import warm
from tests.cli import SHORT, alive, environment, forked, glmexp, metrics, runs, started, status, wait_until

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m")
LONG = ("train.max_steps=100000", "eval=none", "tracker=none", "precision=fp32")


def test_torchrun_ranks_share_one_folder_and_one_training(tmp_path: Path) -> None:
    done = glmexp(*SHORT, folder=tmp_path, before=TORCHRUN)
    assert done.returncode == 0, done.stderr
    (run,) = runs(tmp_path)
    assert status(run)["state"] == "finished"
    assert sorted(path.name for path in (run / "logs").glob("*.log")) == ["rank0.log", "rank1.log"]
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
    assert sorted(path.name for path in (run / "logs").glob("*.log")) == ["rank0.log", "rank1.log"]


def test_accelerate_launch(tmp_path: Path) -> None:
    before = ("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
    before += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(_free_port()), "-m")
    done = glmexp(*SHORT, folder=tmp_path, before=before)
    assert done.returncode == 0, done.stderr
    (run,) = runs(tmp_path)
    assert sorted(path.name for path in (run / "logs").glob("*.log")) == ["rank0.log", "rank1.log"]


def test_two_machines_by_hand_are_one_run(tmp_path: Path) -> None:
    """Two parents on the loopback; the second one's folder is another, as on a machine with a disk of its own."""
    port = _free_port()
    nodes = ("launcher.nnodes=2", "launcher.nproc=1", "launcher.master_addr=127.0.0.1", f"launcher.master_port={port}")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with started(*SHORT, *nodes, "launcher.node_rank=1", folder=tmp_path / "two") as second:
        first = glmexp(*SHORT, *nodes, "launcher.node_rank=0", folder=tmp_path / "one")
        _, err = second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + err
    (run,) = runs(tmp_path / "one")
    assert not (tmp_path / "two" / "outputs").exists()
    assert [line["step"] for line in metrics(run)] == [1, 2]
    assert "2 on cpu" in first.stdout
    assert sorted(path.name for path in (run / "logs").glob("*.log")) == ["rank0.log", "rank1.log"]


def _as_srun(rank: int) -> dict[str, str]:
    """Variables of a task of ``srun --ntasks 2``, with a number of the job that no other test run has."""
    own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": str(os.getpid())}
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "0"}
    return {**own, **step, "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "2"}


def test_tasks_of_srun_are_ranks_and_a_mistake_ends_them_all_at_once(tmp_path: Path) -> None:
    """No launcher ends the others here: rank 0 has to tell them."""
    begun = time.monotonic()
    with started("optim.lrr=1", folder=tmp_path, **_as_srun(1)) as second:
        first = glmexp("optim.lrr=1", folder=tmp_path, **_as_srun(0))
        _, err = second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (2, 2), first.stderr + err
    assert first.stderr.count("did you mean optim.lr?") == 1
    assert "Traceback" not in first.stderr + err
    assert time.monotonic() - begun < 60, "and not after a time limit"


def test_inprocess_is_the_same_run(tmp_path: Path) -> None:
    own = glmexp(*SHORT, "launcher=inprocess", f"run.dir={tmp_path}/in", folder=tmp_path)
    other = forked(*SHORT, "launcher.nproc=1", f"run.dir={tmp_path}/out", folder=tmp_path)
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


def test_an_own_port_that_is_taken_is_named_and_leaves_no_folder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = glmexp(*SHORT, f"launcher.master_port={port}", folder=tmp_path)
    assert done.returncode == 2
    assert f"launcher.master_port: port {port} is in use by another process" in done.stderr
    assert not [*tmp_path.iterdir()]


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
    assert not (run / "checkpoints").exists(), "the SIGTERM that follows a dead rank saves nothing"


def test_a_hang_is_named_while_it_lasts_and_ends_at_the_time_limit(tmp_path: Path) -> None:
    words = ("launcher.nproc=2", "launcher.timeout_s=15", "launcher.watch_s=3")
    with started(*LONG, *words, folder=tmp_path) as process:
        wait_until(lambda: _first_step(tmp_path), 120, "first step")
        os.kill(_rank_pid(process, 1), signal.SIGSTOP)
        took = wait_until(lambda: not alive(process), 90, "the time limit, and all processes gone")
        _, err = process.communicate()
    assert process.returncode == 1
    assert took > 10, "not before"
    assert "rank 1 has given no sign for" in err, "while rank 0 waits"
    assert "rank 0 of 2 failed" in err
    assert "imed out" in err
    places = err.split("where each rank was last:")[1].splitlines()[1:3]
    assert "rank 0  step " in places[0]
    assert "no sign for" not in places[0]
    assert "no sign for" in places[1]
    (run,) = runs(tmp_path)
    assert "Thread" in (run / "logs" / "rank1.stack").read_text()
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
    done = forked(*LONG[1:], *words, "launcher.nproc=2", folder=tmp_path)
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


def test_a_users_mistake_found_in_the_ranks_exits_2_without_traceback_or_folder(tmp_path: Path) -> None:
    """Behind the first block of the file, which the parent has looked at."""
    rows = '{"prompt": "a", "response": "b"}\n' * 40_000
    (tmp_path / "broken.jsonl").write_text(rows + '{"prompt": \n', encoding="utf-8")
    done = forked(*SHORT, "data.train_file=broken.jsonl", "launcher.nproc=2", folder=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("broken.jsonl:40001") == 1, "said once, not by every rank"
    assert not runs(tmp_path)
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [".prepared"], "the cache of prepared rows"


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_six_launches_of_four_ranks_give_six_folders(tmp_path: Path) -> None:
    """Two at a time: they start within the same second. (Twenty of them passed as well: the parent holds its port.)"""

    def launch(_: int) -> int:
        return forked(*SHORT, "train.max_steps=1", "launcher.nproc=4", folder=tmp_path, timeout_s=300).returncode

    with ThreadPoolExecutor(2) as two:
        codes = Counter(two.map(launch, range(6)))
    assert codes == {0: 6}
    assert len(runs(tmp_path)) == 6
    assert all(status(run)["state"] == "finished" for run in runs(tmp_path))


def test_two_runs_of_the_same_second_have_two_folders(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [warm.python(), "-m", "glmexp", *SHORT, f"optim.lr={lr}"],
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
