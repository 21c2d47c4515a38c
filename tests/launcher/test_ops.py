"""Compiling DeepSpeed's ops: what a killed build leaves behind does not make the next one wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glmexp.launcher import ops


def _planted(folder: Path, age_s: float) -> Path:
    """torch's lock file, as a build leaves it that was killed."""
    lock = folder / "lock"
    lock.touch()
    then = time.time() - age_s
    os.utime(lock, (then, then))
    return lock


def test_the_lock_of_a_killed_build_is_removed_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    lock = _planted(tmp_path, age_s=ops.QUIET_S + 1)
    with ops.alone(tmp_path, said.append):
        assert not lock.exists()
    assert said == [f"removed {lock}: a killed build has left it behind, and the next would wait for it for ever"]
    with ops.alone(tmp_path, said.append):
        pass
    assert len(said) == 1, "nothing to say about a clean folder"


def test_a_fresh_lock_that_nobody_here_holds_is_refused_with_the_file_to_delete(tmp_path: Path) -> None:
    lock = _planted(tmp_path, age_s=5)
    text = f"error: {lock} says .*if none on another machine does, delete it"
    with pytest.raises(RuntimeError, match=text), ops.alone(tmp_path, print):
        pass
    assert lock.exists()


def test_a_lock_that_our_own_killed_build_has_left_is_removed_at_once(tmp_path: Path) -> None:
    """The build is a process that holds both locks and is killed."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom glmexp.launcher import ops\n"
        "with ops.alone(Path(sys.argv[1]), print):\n"
        "    lock = open(sys.argv[1] + '/lock', 'x')\n    print('building', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as build:
        assert build.stdout is not None
        assert build.stdout.readline() == "building\n"
        assert ops.holder_of(tmp_path / "lock") == build.pid
        build.kill()
    said: list[str] = []
    with ops.alone(tmp_path, said.append):
        assert not (tmp_path / "lock").exists()
    assert len(said) == 1


def test_a_build_of_another_program_is_waited_for(tmp_path: Path) -> None:
    """As long as a living process has the lock open; torch's own wait would go on after its death."""
    program = "import sys, time\nlock = open(sys.argv[1], 'x')\nprint('', flush=True)\ntime.sleep(0.5)\n"
    lock = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE, text=True) as build:
        assert build.stdout is not None
        build.stdout.readline()
        said: list[str] = []
        with pytest.raises(RuntimeError, match="no process of this machine holds it"):
            ops.remove_stale(tmp_path, False, said.append, pause_s=0.05)
    assert said == [f"process {build.pid} builds in {tmp_path}: waiting for it"]
