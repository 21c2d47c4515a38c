"""Sweeps that survive: what has an outcome stays, what was interrupted goes on, what failed is retried on request."""

from __future__ import annotations

import csv
import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from glmexp.config.arguments import parse
from glmexp.config.compose import Machine, request
from glmexp.config.errors import ConfigError
from glmexp.launcher import failures, folder, trials
from glmexp.launcher.sweep import sweep
from tests.cli import SHORT, glmexp, metrics, started, wait_until
from tests.launcher.sweeps import outcomes, parent, run, run_rank, starts, state


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_outcomes_are_recorded_shown_and_kept_and_only_what_is_named_is_retried(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["optim.lr=1,2,3,4", "method.rank=2", f"hydra.sweep.dir={tmp_path}/s"]
    assert run(line) == 1, "one has crashed"
    ends = ["finished", "failed", "out_of_memory", "non_finite"]
    assert outcomes(tmp_path / "s") == ends
    out = capfd.readouterr().out
    assert "1 of 4 trials finished; 1 failed, 1 out of memory, 1 non finite" in out
    assert "trial 1 (optim.lr=2" in out
    assert "table: s/sweep.csv\ncompare: python -m glmexp.compare s\n" in out
    assert "failed: RuntimeError: broken" in out
    rows = list(csv.DictReader((tmp_path / "s" / "sweep.csv").open()))
    assert [row["trial"] for row in rows] == ["0", "1", "2", "3"]
    assert "method.rank" not in rows[0], "no trial differs in it"
    assert float(rows[0]["eval/loss/loss"]) == 2.7

    assert run(line) == 1
    assert [len(one) for one in starts(tmp_path / "s")] == [1, 1, 1, 1], "nothing is run again by itself"
    assert "sweep.retry=[failed,non_finite,out_of_memory] runs them once more" in capfd.readouterr().out

    (tmp_path / "repaired").touch()
    assert run([*line, "sweep.retry=failed"]) == 3, "every trial has a result, not all are usable"
    assert outcomes(tmp_path / "s") == ["finished", "finished", *ends[2:]]
    assert run([*line, "sweep.retry=[out_of_memory,non_finite]"]) == 0
    assert outcomes(tmp_path / "s") == ["finished"] * 4


def test_kill_9_of_the_parent_in_trial_3_of_8_then_the_same_line_runs_the_other_5_and_the_broken_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "s"
    line = ["method.rank=1,2,3,4,5,6,7,8", f"hydra.sweep.dir={root}"]
    with parent(*line, HANG_AT="3") as process:
        wait_until(lambda: (root / "2_method.rank-3" / "checkpoints" / "latest").exists(), 60, "trial 3 in step 3")
        with pytest.raises(ConfigError, match=rf"is in use by process {process.pid} on"):
            run(line)
        process.kill()
        process.communicate()
        assert outcomes(root) == ["finished", "finished", "running", *["waiting"] * 5]
        (root / "3_method.rank-4").mkdir()
        (root / "3_method.rank-4" / "half").touch()  # a trial that was killed before it had a checkpoint
        assert run(line) == 0
    assert outcomes(root) == ["finished"] * 8
    assert [len(one) for one in starts(root)] == [1, 1, 2, 1, 1, 1, 1, 1], "finished ones are kept"
    assert [one["first"] for one in starts(root)[2]] == [0, 2], "the broken one goes on from its checkpoint"
    assert not (root / "3_method.rank-4" / "half").exists(), "what has no checkpoint starts in a clean folder"
    assert "trial 0 (method.rank=1) kept: eval/loss/loss 1.2" in capfd.readouterr().out


@pytest.mark.kill
@pytest.mark.timeout(1200)
def test_the_same_with_eight_real_trainings(tmp_path: Path) -> None:
    root = tmp_path / "s"
    grid = ("method.rank=2,4", "optim.lr=1e-3,2e-3", "train.seed=1,2")
    # Long enough that the kill does not find a run that only has to end, which it then does.
    words = ("-m", *SHORT, *grid, "train.max_steps=40", "train.save_steps=1", f"hydra.sweep.dir={root}")
    with started(*words, folder=tmp_path) as process:
        wait_until(lambda: list(root.glob("2_*/checkpoints/latest")), 600, "trial 3 has a checkpoint")
        process.kill()
        process.communicate()
    first = [one.name for one in root.iterdir() if (one / "artifact").exists()]
    done = glmexp(*words, folder=tmp_path, timeout_s=1000)
    assert done.returncode == 0, done.stderr
    assert outcomes(root) == ["finished"] * 8
    events = [line.split(maxsplit=3) for line in done.stdout.splitlines() if line[2:3] == ":"]
    kept = [number for _, _, number, rest in events if ") kept" in rest]
    assert kept == ["0", "1"] == sorted(name[0] for name in first)
    assert [number for _, _, number, rest in events if ") goes on" in rest] == ["2"]
    assert [number for _, _, number, rest in events if ") starts" in rest] == ["3", "4", "5", "6", "7"]
    assert all(
        [line["step"] for line in metrics(root / one["folder"])] == [*range(1, 41)] for one in state(root)["trials"]
    )


def test_a_trial_that_finished_as_its_parent_was_killed_is_not_run_again(tmp_path: Path) -> None:
    line = ["method.rank=1,2", f"hydra.sweep.dir={tmp_path}/s"]
    assert run(line) == 0
    known = trials.read(tmp_path / "s")
    assert known is not None
    for trial in known.trials:
        trial.state, trial.metrics = "running", {}
    known.save()
    (tmp_path / "s" / "1_method.rank-2" / "status.json").write_text('{"state": "failed", "exit_code": 143}')
    assert run(line) == 0
    assert [len(one) for one in starts(tmp_path / "s")] == [1, 1], "the second is new: it started in a clean folder"
    assert state(tmp_path / "s")["trials"][0]["metrics"]["train/loss"] == pytest.approx(1.295)


def test_a_grid_grows_on_its_folder_and_another_one_is_refused(tmp_path: Path) -> None:
    root = f"hydra.sweep.dir={tmp_path}/s"
    assert run(["method.rank=2,4", root]) == 0
    assert run(["method.rank=1,4,2", root]) == 0
    assert [trial["folder"] for trial in state(tmp_path / "s")["trials"]] == [
        "0_method.rank-2",
        "1_method.rank-4",
        "2_method.rank-1",
    ]
    assert [len(one) for one in starts(tmp_path / "s")] == [1, 1, 1]
    with pytest.raises(ConfigError, match=r"holds another sweep[\s\S]*method.rank=1,4,2"):
        run(["method.rank=1,2,4", "train.max_steps=7", root])
    with pytest.raises(ConfigError, match=r"holds a sweep with name=grid, not search"):
        run(["sweep=search", "method.rank=1,2,4", root])


def test_a_folder_with_runs_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s" / "mine").mkdir(parents=True)
    (tmp_path / "s" / "mine" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"holds runs and no sweep.json"):
        run(["method.rank=1,2", f"hydra.sweep.dir={tmp_path}/s"])


def test_without_a_name_each_sweep_is_new_and_an_unfinished_one_of_the_same_line_is_only_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["method.rank=1,2", "run.name=x"]
    assert run(line) == 0
    assert "unfinished" not in capfd.readouterr().err
    (first,) = (tmp_path / "outputs" / "x").iterdir()
    known = trials.read(first)
    assert known is not None
    known.trials[1].state = "stopped"
    known.save()
    assert run(line) == 0
    again = capfd.readouterr().err
    assert f"outputs/x/{first.name} is an unfinished sweep of this line (1 of 2 trials left)" in again
    assert f"hydra.sweep.dir=outputs/x/{first.name} goes on with it" in again
    assert len(list((tmp_path / "outputs" / "x").iterdir())) == 2, "also within the same second"
    assert run([*line, f"hydra.sweep.dir=outputs/x/{first.name}"]) == 0
    assert outcomes(first) == ["finished", "finished"]


def test_trials_that_differ_in_what_a_runs_identity_leaves_out_are_all_run_and_true_twins_once(tmp_path: Path) -> None:
    assert run(["launcher.timeout_s=60,70", "optim.lr=0.001,1e-3", f"hydra.sweep.dir={tmp_path}/s"]) == 0
    assert [one["values"]["launcher.timeout_s"] for one in state(tmp_path / "s")["trials"]] == ["60", "70"]


def test_no_secret_of_the_command_line_is_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    secrets = ["hunter2a", "hunter2b", "hunter2c"]
    line = [f"+launcher.env.HUB_API_KEY={secrets[0]},{secrets[1]}", f"+launcher.env.MY_TOKEN={secrets[2]}"]
    assert run([*line, f"hydra.sweep.dir={tmp_path}/s"]) == 0
    assert outcomes(tmp_path / "s") == ["finished", "finished"], "two trials, though their identities leave that out"
    written = [path for path in (tmp_path / "s").rglob("*") if any(secret in path.name for secret in secrets)]
    texts = [path.read_text() for path in (tmp_path / "s").rglob("*") if path.is_file()] + list(capfd.readouterr())
    assert written == []
    assert [text for text in texts if any(secret in text for secret in secrets)] == []


def test_two_slots_share_the_cores_and_their_words_do_not_mix(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(os.sched_getaffinity(0)) != 2:
        pytest.skip("needs 2 cores")
    monkeypatch.setenv("STEP_S", "0.5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    root = tmp_path / "s"
    assert run(["optim.lr=1,2", "method.rank=1,2", "launcher.slots=2", f"hydra.sweep.dir={root}"]) == 1
    assert outcomes(root) == ["finished", "finished", "failed", "failed"], "a failed one does not stop the others"
    first, second = (one[0] for one in starts(root)[:2])
    assert sorted([first["cores"], second["cores"]]) == [[0], [1]]
    assert (first["threads"], second["threads"]) == ("1", "1")
    assert abs(first["time"] - second["time"]) < 2, "the second began before the first had taken its four steps"
    out = capfd.readouterr().out
    assert "words of rank" not in out
    assert (root / "1_optim.lr-1_method.rank-2" / "logs" / "trial.log").read_text() == "words of rank 2\n"
    lines = [line for line in out.splitlines() if line[2:3] == ":"]
    assert len(lines) == 8, "one line where a trial starts and one where it ends"
    assert "starts (core " in lines[0]


@pytest.mark.parametrize(("words", "slots"), [((), None), (("launcher.slots=8",), 8)], ids=["free", "eight"])
def test_an_array_of_slurm_is_as_wide_as_the_line_says(
    tmp_path: Path, words: tuple[str, ...], slots: int | None
) -> None:
    """However many cores the login node has."""
    line = ["method.rank=1,2", *words, f"hydra.sweep.dir={tmp_path}/s"]
    arguments, machine = parse(["-m", "launcher=slurm", "tracker=none", *line]), Machine(0, None, 2)
    with patch("glmexp.launcher.slurm.submit_sweep", return_value=0) as submit:
        assert sweep(request(arguments, machine), line, run_rank, lambda values: pytest.fail("no search")) == 0
    trials, root, wide = submit.call_args.args
    assert ([one.method.rank for one in trials], Path(root).name, wide) == ([1, 2], "s", slots)


CONFIG_ERROR = "2 config errors:\n  data.train_file: there is no x.jsonl\n    -> name a file"


@pytest.mark.parametrize(
    ("code", "state", "messages", "outcome", "reason"),
    [
        (0, "finished", {}, "finished", ""),
        (0, "stopped", {}, "stopped", "stopped where it can go on"),
        (75, "stopped", {}, "stopped", "stopped where it can go on"),
        (130, "running", {}, "stopped", "interrupted"),
        (-15, "running", {}, "stopped", "interrupted"),
        (1, "failed", {0: (143, "ended by signal 15 (SIGTERM)")}, "stopped", "ended by signal 15 (SIGTERM)"),
        (1, "failed", {1: (137, "ended by signal 9 (SIGKILL)")}, "failed", "ended by signal 9 (SIGKILL)"),
        (1, "failed", {0: (1, "Boom: a\nb"), 1: (143, "ended by signal 15 (SIGTERM)")}, "failed", "Boom: a"),
        (1, "failed", {0: (1, "OutOfMemoryError: CUDA out of memory. Tried")}, "out_of_memory", None),
        (1, "failed", {0: (1, "RuntimeError: DefaultCPUAllocator: can't allocate memory")}, "out_of_memory", None),
        (1, "failed", {0: (1, "NonFiniteError: loss of optimizer step 3 is nan")}, "non_finite", None),
        (1, "failed", {0: (1, "Exception: Current loss scale already at minimum - cannot")}, "non_finite", None),
        (2, "failed", {0: (2, CONFIG_ERROR)}, "failed", "data.train_file: there is no x.jsonl"),
        (-9, "running", {}, "failed", "ended with exit code -9 and left no message"),
    ],
)
def test_what_became_of_a_trial_is_read_from_its_exit_code_and_its_own_records(
    code: int, state: str, messages: dict[int, tuple[int, str]], outcome: str, reason: str | None, tmp_path: Path
) -> None:
    folder.write_status(tmp_path, state)
    for rank, (exit_code, message) in messages.items():
        failures.record(tmp_path, failures.Failure(rank, exit_code, message, "", float(rank)))
    found = trials.settle(tmp_path, code)
    assert found[0] == outcome
    assert reason is None or found[1] == reason


def test_slots_divide_the_gpus_that_are_visible_and_what_does_not_divide_is_refused() -> None:
    from glmexp.launcher import slots

    environ = {"CUDA_VISIBLE_DEVICES": "3,5,6,7"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slots, "gpu_count", lambda _: 4)
        assert [one.gpus for one in slots.divide(2, environ)] == [("3", "5"), ("6", "7")]
        assert [one.gpus for one in slots.divide(4, {})] == [("0",), ("1",), ("2",), ("3",)]
        assert slots.divide(1, environ) == [slots.Slot(0)], "one slot changes nothing"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_ctrl_c_ends_all_trials_and_the_same_line_goes_on(number: signal.Signals, code: int, tmp_path: Path) -> None:
    root = tmp_path / "s"
    line = ["method.rank=1,2", "launcher.slots=2", f"hydra.sweep.dir={root}"]
    with parent(*line, STEP_S="0.5") as process:
        wait_until(lambda: len(list(root.glob("*/starts"))) == 2, 60, "both trials run")
        start = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert process.returncode == code
    assert outcomes(root) == ["stopped", "stopped"]
    assert "0 of 2 trials finished; 2 stopped" in out
    assert f"hydra.sweep.dir={root}" in err
    assert run(line) == 0
    assert outcomes(root) == ["finished", "finished"]


def test_a_sweep_whose_folder_cannot_be_made_is_a_mistake_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        run(["method.rank=1,2", f"hydra.sweep.dir={tmp_path}/file/s"])
    assert f"hydra.sweep.dir: {tmp_path}/file/s cannot be made: Not a directory" in caught.value.report()
