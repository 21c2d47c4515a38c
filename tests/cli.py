"""The command line as a user types it: a process of its own, with a time limit and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import warm

# Short and quiet: what a test of something else than training wants.
MARK = "GLMEXP_TEST_MARK"
_marks: dict[int, str] = {}
SHORT = ("train.max_steps=2", "eval=none", "tracker=none", "precision=fp32")


def environment(**more: str) -> dict[str, str]:
    """This process's variables without a rank's, so that a test under a launcher is no rank itself."""
    world = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WANDB_API_KEY", "WANDB_MODE")
    kept = {name: value for name, value in os.environ.items() if name not in world}
    bin_folder = str(Path(sys.executable).parent)
    return {**kept, "PATH": f"{bin_folder}:{kept['PATH']}", "WANDB_SILENT": "true", **more}


def glmexp(
    *words: str, folder: Path, before: tuple[str, ...] = (sys.executable, "-m"), timeout_s: float = 240, **more: str
) -> subprocess.CompletedProcess[str]:
    """``python -m glmexp WORDS`` in ``folder``; ``before`` is the launcher in place of ``python -m``."""
    with started(*words, folder=folder, before=before, **more) as process:
        out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def forked(*words: str, folder: Path, timeout_s: float = 240, **more: str) -> subprocess.CompletedProcess[str]:
    """The same in forks of a process that has imported everything: where the start itself is not what is tested."""
    return glmexp(*words, folder=folder, before=(warm.python(), "-m"), timeout_s=timeout_s, **more)


@contextmanager
def started(
    *words: str, folder: Path, before: tuple[str, ...] = (sys.executable, "-m"), **more: str
) -> Iterator[subprocess.Popen[str]]:
    """The same while it runs. All that it has started is ended on the way out."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*before, "glmexp", *_last_wins(words)],
        cwd=folder,
        env=environment(**{MARK: mark}, **more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _marks[process.pid] = mark
    try:
        yield process
    finally:
        for pid in alive(process):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _last_wins(words: tuple[str, ...]) -> list[str]:
    """A test's own values replace those of SHORT; twice on one line would be refused."""
    by_key = {word.split("=")[0] if "=" in word and not word.startswith("-") else word: word for word in words}
    return list(by_key.values())


def alive(process: subprocess.Popen[str]) -> list[int]:
    """Living processes that ``process`` has started, itself among them, whatever session they are in (no zombies).

    Launchers put ranks into sessions of their own; what all inherit is the environment.
    """
    mark = f"{MARK}={_marks[process.pid]}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z":
                    found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def wait_until(condition: Any, timeout_s: float, what: str) -> float:
    """Seconds until ``condition()`` is true; AssertionError after ``timeout_s``."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - start


def runs(folder: Path) -> list[Path]:
    """Run folders below ``folder``/outputs, by age."""
    return sorted(
        (path.parent for path in (folder / "outputs").rglob("config.yaml")), key=lambda run: run.stat().st_mtime
    )


def metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def status(run: Path) -> dict[str, Any]:
    """status.json."""
    return json.loads((run / "status.json").read_text())
