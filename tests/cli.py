"""The command line as a user types it: a process of its own, with a time limit and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Short and quiet: what a test of something else than training wants.
SHORT = ("train.max_steps=2", "eval=none", "tracker=none", "precision=fp32")


def environment(**more: str) -> dict[str, str]:
    """This process's variables without a rank's, so that a test under a launcher is no rank itself."""
    world = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WANDB_API_KEY", "WANDB_MODE")
    kept = {name: value for name, value in os.environ.items() if name not in world}
    bin_folder = str(Path(sys.executable).parent)
    return {**kept, "PATH": f"{bin_folder}:{kept['PATH']}", "WANDB_SILENT": "true", **more}


def glmexp(
    *words: str, folder: Path, before: tuple[str, ...] = (sys.executable, "-m"), timeout_s: float = 120, **more: str
) -> subprocess.CompletedProcess[str]:
    """``python -m glmexp WORDS`` in ``folder``; ``before`` is the launcher in place of ``python -m``."""
    with started(*words, folder=folder, before=before, **more) as process:
        out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def started(
    *words: str, folder: Path, before: tuple[str, ...] = (sys.executable, "-m"), **more: str
) -> Iterator[subprocess.Popen[str]]:
    """The same while it runs. Its whole process group is ended on the way out."""
    process = subprocess.Popen(
        [*before, "glmexp", *_last_wins(words)],
        cwd=folder,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if group(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _last_wins(words: tuple[str, ...]) -> list[str]:
    """A test's own values replace those of SHORT; twice on one line would be refused."""
    by_key = {word.split("=")[0] if "=" in word and not word.startswith("-") else word: word for word in words}
    return list(by_key.values())


def group(session: int) -> list[int]:
    """Living processes of a session that ``started`` opened (zombies not counted)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, rest = stat.read_text().rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, session_id = rest.split()[:4]
        if int(session_id) == session and state != "Z":
            found.append(int(stat.parent.name))
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
