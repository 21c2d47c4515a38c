"""The front door as a process: cold start, exit codes, one report and no traceback, from any folder."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from glmexp.config.compose import Request

HEAVY = ("torch", "transformers", "deepspeed", "peft", "datasets", "wandb", "accelerate", "numpy")
CPU_LIMIT_S = 1.0
"""A run with a mistake, a listing or a help text costs less than this: 0.1 s to 0.5 s here on two busy cores."""

QUICK = [["--help"], ["--cfg", "job"], ["--cfg", "job", "--resolve"], ["optim.lrr=1"], ["zero=stage2", "offload=all"]]
COLD = """
import sys
from glmexp.__main__ import main
code = main(sys.argv[1:])
print("loaded:", *sorted(name for name in sys.modules if name in {heavy!r}), file=sys.stderr)
sys.exit(code)
"""


def glmexp(*words: str, cwd: Path, python: tuple[str, ...] = ("-m", "glmexp")) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, *words], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_nothing_heavy_is_loaded(words: list[str], tmp_path: Path) -> None:
    done = glmexp(*words, cwd=tmp_path, python=("-c", COLD.format(heavy=HEAVY)))
    assert done.stderr.rstrip().endswith("loaded:"), done.stderr
    assert list(tmp_path.iterdir()) == [], "and no folder is made"


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_it_takes_less_than_a_second_of_cpu_time(words: list[str], tmp_path: Path) -> None:
    costs = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        glmexp(*words, cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert statistics.median(costs) < CPU_LIMIT_S, costs


def test_a_mistake_exits_2_with_the_report_alone_on_stderr(tmp_path: Path) -> None:
    done = glmexp("optim.lr=abc", "rank=4", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "2 config errors:\n"
        "  rank: there is no such key (from the command line)\n"
        "    -> did you mean method.rank?\n"
        "  optim.lr: 'abc' is not a number above 0 (from the command line)\n"
    )


def test_a_mistake_in_a_sweep_stops_before_the_first_trial(tmp_path: Path) -> None:
    done = glmexp("-m", "method.rank=2,a", cwd=tmp_path)
    assert done.returncode == 2
    assert "'a' is not a whole number" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_cfg_shows_the_tree_and_the_mistakes_in_it(tmp_path: Path) -> None:
    done = glmexp("--cfg", "job", "--package", "optim", "optim.lrr=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "lr: ${method.lr}" in done.stdout
    assert "did you mean optim.lr?" in done.stderr


def test_cfg_resolve_shows_what_a_run_will_save(tmp_path: Path) -> None:
    done = glmexp("train.batch_size=64", "--cfg", "job", "--resolve", "--package", "train", cwd=tmp_path)
    assert done.returncode == 0
    assert "micro_batch_size: 64" in done.stdout


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--version"], "hydra-core 1.3"),
        (["--info", "searchpath"], "main"),
        (["--hydra-help"], "Hydra"),
        (["--cfg", "hydra", "--package", "hydra.sweep"], "dir: outputs/${run.name}/sweep-"),
        (["-sc", "install=bash"], "hydra_bash_completion"),
    ],
)
def test_hydras_own_flags_work(words: list[str], part: str, tmp_path: Path) -> None:
    done = glmexp(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert part in done.stdout


def test_a_reader_that_closes_the_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m glmexp --hydra-help | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""


class Started:
    """Stands for the launcher: remembers what the front door hands over."""

    def __init__(self) -> None:
        self.runs: list = []

    def start(self, config: object, run_rank: object) -> int:
        self.runs.append(config)
        return 7

    def sweep(self, asked: Request, words: list[str], run_rank: object, compose: Callable) -> int:
        self.runs, self.words, self.compose = asked.trials, words, compose
        return 8


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    from glmexp.launcher import start, sweep

    stand_in = Started()
    monkeypatch.setattr(start, "start", stand_in.start)
    monkeypatch.setattr(sweep, "sweep", stand_in.sweep)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return stand_in


def test_one_run_is_handed_to_the_launcher_and_its_exit_code_comes_back(started: Started) -> None:
    from glmexp.__main__ import main

    assert main(["train.max_steps=3", "--local_rank=0"]) == 7
    assert started.runs[0].train.max_steps == 3
    assert started.runs[0].launcher.name == "local"


def test_a_sweep_is_handed_over_with_its_line_and_a_search_with_what_composes_its_trials(started: Started) -> None:
    from glmexp.__main__ import main

    words = ["-m", "method.rank=2,4"]
    assert main(words) == 8
    assert [one.method.rank for one in started.runs] == [2, 4]
    assert started.words == words
    assert main(["-m", "sweep=search", "method.rank=range(2,9)", "train.max_steps=5"]) == 8
    trial = started.compose({"method.rank": "3"})
    assert (trial.method.rank, trial.train.max_steps, trial.sweep.name) == (3, 5, "grid")


def test_ranks_of_an_outside_launcher_other_than_0_never_compose(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glmexp.__main__ import main
    from glmexp.launcher import handover, start

    told: list[int] = []
    monkeypatch.setattr(handover, "_give_up", told.append)
    monkeypatch.setattr(start, "follow", lambda outside, run_rank: 30 + outside.rank)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["this=is never read"]) == 31
    monkeypatch.setenv("RANK", "0")
    assert main(["train.batch_size=16"]) == 7
    assert started.runs[0].launcher.name == "env"
    assert started.runs[0].train.micro_batch_size == 8
    assert main(["-m", "method.rank=2,4"]) == 2
    assert told == [2], "the others end as well"
