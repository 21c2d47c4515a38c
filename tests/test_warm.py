"""A warm start is a start: its own variables, folder, files, exit code, signals; and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests import warm
from tests.cli import MARK, environment, forked, wait_until

PLUGIN = """
import os, sys, time
print(os.getcwd(), sys.argv[1:], os.environ["WORD"], os.getsid(0) == os.getpid(), file=sys.stderr, flush=True)
if os.environ["WORD"] == "wait":
    time.sleep(600)
os.kill(os.getpid(), int(os.environ["WORD"]))
"""


def start(folder: Path, word: str) -> subprocess.Popen[str]:
    """A command whose plugin stands in the caller's folder and ends it by the signal ``word``, or waits."""
    (folder / "ends.py").write_text(PLUGIN)
    variables = environment(GLMEXP_PLUGINS="ends", PYTHONPATH=str(folder), WORD=word, **{MARK: "warm"})
    command = [warm.python(), "-m", "glmexp", "train.max_steps=1"]
    return subprocess.Popen(command, cwd=folder, env=variables, stderr=subprocess.PIPE, text=True)


def test_variables_folder_arguments_and_ends_are_the_callers_own(tmp_path: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = start(tmp_path, str(int(number)))
        assert process.communicate(timeout=60)[1] == f"{tmp_path} ['train.max_steps=1'] {int(number)} True\n"
        assert process.returncode == -number
    wrong = forked("optim.lrr=1", folder=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "did you mean optim.lr?" in wrong.stderr


def test_a_signal_reaches_the_fork_and_the_death_of_the_stand_in_is_its_own(tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        process = start(tmp_path, "wait")
        assert process.stderr is not None
        assert process.stderr.readline()
        (fork,) = (pid for pid in _in(tmp_path) if pid != process.pid)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode != 0
        wait_until(lambda fork=fork: not Path(f"/proc/{fork}").exists(), 10, f"the fork ends by {number.name}")


def _in(folder: Path) -> list[int]:
    """Processes that stand in ``folder``."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(one / "cwd") == str(folder):
                found.append(int(one.name))
        except OSError:
            continue
    return found


def test_what_is_read_at_an_import_gets_a_real_start(tmp_path: Path) -> None:
    done = forked("--version", folder=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert "import time:" in done.stderr
