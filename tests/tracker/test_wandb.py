"""Real wandb, offline, read back with its own reader."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
from glmexp.tracker.base import Guard, RunInfo
from glmexp.tracker.wandb import Wandb

plan = json.loads(sys.argv[1])
group, mode = plan["group"], plan["mode"]
settings = Wandb(name="wandb", project="glmexp", group=group, tags=["a"], mode=mode, artifact=plan["artifact"])
guard = Guard("wandb", settings.build(), lambda line: print("WARNING", line))
folder = Path(plan["folder"])
told = {"method": {"name": "lora", "rank": 8}, "seed": 1}
for line in guard.start(RunInfo("run", folder, told, "sweep", "evaluate", ("tiny", "a"))):
    print("START", line)
for step in plan["steps"]:
    guard.log(step, {"train/loss": 1 / (step + 1), "bad": float("nan")})
rows = [{"prompt": "p", "exact": True}, {"prompt": "q", "exact": False}]
guard.table("eval/generate/samples", plan["steps"][-1], rows)
guard.summary({"best": 0.5})
guard.artifact(folder / "artifact")
for line in guard.finish(plan["status"]):
    print("FINISH", line)
print("FAILURE", guard.failure)
"""


def environment(home: Path, **more: str) -> dict[str, str]:
    """Nobody is logged in, and no WANDB_ variable of the machine is seen."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") and name != "NETRC"}
    root = str(Path(__file__).parents[2])
    return {**keep, "HOME": str(home), "PYTHONPATH": root, **more}


def arguments(folder: Path, **changed: Any) -> list[str]:
    folder.mkdir(exist_ok=True)
    plan = {"folder": str(folder), "group": None, "mode": None, "artifact": False, "steps": [1, 2, 3]}
    plan |= {"status": "finished", **changed}
    return [sys.executable, "-c", SCRIPT, json.dumps(plan)]


def track(folder: Path, variables: dict[str, str] | None = None, **changed: Any) -> str:
    """The whole output of a process that tracks one run."""
    done = subprocess.run(
        arguments(folder, **changed),
        env=environment(folder.parent, **(variables or {})),
        cwd=folder.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout


@cache
def all_records(path: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    shown = subprocess.run(
        command, env=environment(path.parent), capture_output=True, text=True, timeout=60, check=True
    )
    return [json.loads(line) for line in shown.stdout.splitlines()]


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in all_records(path) if record["type"] == kind]


def offline_runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def test_an_offline_run_is_whole_and_says_why_it_is_offline(tmp_path: Path) -> None:
    output = track(tmp_path / "run")
    (folder,) = offline_runs(tmp_path / "run")
    place = folder.relative_to(tmp_path)
    assert output.splitlines() == [
        "START wandb: the run is offline since nobody is logged in; `wandb login` or WANDB_API_KEY puts the next one "
        "online, tracker.mode=offline says that it is meant",
        f"FINISH read the metrics here: wandb leet run {place}",
        f"FINISH upload them: wandb sync {place}",
        "FAILURE None",
    ]
    (run,) = records(folder, "run")
    identity = json.loads((tmp_path / "run" / "tracker.json").read_text())
    assert (run["project"], run["display_name"], run["run_group"], run["run_id"], run["tags"]) == (
        "glmexp",
        "run",
        "sweep",
        identity["id"],
        ["a", "tiny"],
    )
    assert run["job_type"] == "evaluate"
    config = run["config"]["update"]
    assert config["method"] == {"name": "lora", "rank": 8}
    assert config["seed"] == 1
    metrics = records(folder, "metric")
    assert any(metric.get("glob_name") == "*" and metric.get("step_metric") == "step" for metric in metrics)
    history = [record["item"] for record in records(folder, "history")]
    assert [(item["step"], item["train/loss"]) for item in history[:-1]] == [(1, 1 / 2), (2, 1 / 3), (3, 1 / 4)]
    assert history[-1]["step"] == 3
    assert history[-1]["eval/generate/samples.nrows"] == 2
    (table,) = folder.glob("files/media/table/eval/generate/*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["step", "prompt", "exact"],
        "data": [[3, "p", True], [3, "q", False]],
    }
    assert records(folder, "artifact")[0]["type"] == "run_table"
    assert len(records(folder, "artifact")) == 1, "nobody asked for the model"
    assert any(record["update"].get("best") == 0.5 for record in records(folder, "summary"))
    assert [record["exit_code"] for record in records(folder, "exit")] == [0]  # a runtime stands beside it


def test_no_code_no_git_and_no_console_text_is_stored_and_the_artifact_where_asked_for(
    tmp_path: Path,
) -> None:
    trained = tmp_path / "run" / "artifact"
    trained.mkdir(parents=True)
    (trained / "adapter_model.safetensors").write_bytes(b"weights")
    track(tmp_path / "run", mode="offline", status="failed", group="mine", artifact=True)
    (folder,) = offline_runs(tmp_path / "run")
    (kept,) = (one for one in records(folder, "artifact") if one["type"] == "model")
    assert kept["name"] == f"run-{records(folder, 'run')[0]['run_id']}"
    (file,) = kept["manifest"]["contents"]
    assert Path(file["local_path"]) == trained / "adapter_model.safetensors", "named and not copied"
    stored = {path.name for path in (folder / "files").rglob("*") if path.is_file()}
    assert {name for name in stored if not name.endswith(".table.json")} == {"requirements.txt"}
    assert records(folder, "run")[0]["run_group"] == "mine"
    assert [record["exit_code"] for record in records(folder, "exit")] == [1]  # a runtime stands beside it


def test_a_resumed_run_keeps_its_id_and_logs_no_step_twice(tmp_path: Path) -> None:
    track(tmp_path / "run", mode="offline", steps=list(range(1, 9)))
    # Wandb names the folder by the second.
    time.sleep(1.1)
    output = track(tmp_path / "run", mode="offline", steps=list(range(6, 13)))
    first, second = offline_runs(tmp_path / "run")
    run_id = json.loads((tmp_path / "run" / "tracker.json").read_text())["id"]
    assert [records(folder, "run")[0]["run_id"] for folder in (first, second)] == [run_id, run_id]
    assert (
        f"START wandb: the run goes on under its id {run_id}; steps up to 8 are there already and are not tracked again"
    ) in output
    steps = [
        record["item"]["step"]
        for folder in (first, second)
        for record in records(folder, "history")
        if "train/loss" in record["item"]
    ]
    assert steps == list(range(1, 13))


@pytest.mark.parametrize("mode", [None, "online"])
def test_a_terminal_without_a_key_is_never_asked_anything(tmp_path: Path, mode: str | None) -> None:
    main, terminal = pty.openpty()
    child = subprocess.Popen(
        arguments(tmp_path / "run", mode=mode),
        env=environment(tmp_path),
        cwd=tmp_path,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    output, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([main], [], [], 0.1)[0]:
            continue
        try:
            part = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        output += part
    assert time.monotonic() < deadline, output.decode()
    assert child.wait(timeout=10) == 0
    os.close(main)
    text = output.decode()
    assert "the run is offline since nobody is logged in" in text
    assert ("tracker.mode=online, but " in text) == (mode == "online")
    assert re.findall(r"(?m)^(?!START|FINISH|FAILURE).+$", text.replace("\r", "")) == []
    assert len(offline_runs(tmp_path / "run")) == 1


class NoService(BaseHTTPRequestHandler):
    """A server that is there and knows nothing of wandb."""

    def do_POST(self) -> None:
        self.send_error(404)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), NoService) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.mark.parametrize(("key", "reason"), [("short", "AuthenticationError"), ("a" * 40, "CommError")])
def test_a_server_that_refuses_leaves_an_offline_run(tmp_path: Path, server: str, key: str, reason: str) -> None:
    """The second comes after wandb's service took the run's id: it must be free for the offline run."""
    output = track(tmp_path / "run", {"WANDB_API_KEY": key, "WANDB_BASE_URL": server, "no_proxy": "127.0.0.1"})
    assert f"START wandb: cannot go online ({reason}: " in output
    assert "FAILURE None" in output
    assert len([line for line in output.splitlines() if not line.startswith(("START", "FINISH", "FAILURE"))]) == 0
    (folder,) = offline_runs(tmp_path / "run")
    assert len(records(folder, "history")) == 4
    assert records(folder, "run")[0]["run_id"] == json.loads((tmp_path / "run" / "tracker.json").read_text())["id"]


def test_wandbs_own_variables_count(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    output = track(tmp_path / "run", {"WANDB_MODE": "offline", "WANDB_DIR": str(elsewhere)})
    assert "logged in" not in output
    assert len(offline_runs(elsewhere)) == 1
    assert not (tmp_path / "run" / "wandb").exists()


@pytest.mark.parametrize(
    ("variable", "mode", "line"),
    [
        ("disabled", None, "START wandb: WANDB_MODE=disabled, the run is not tracked\nFAILURE None\n"),
        ("", "disabled", "START wandb: tracker.mode=disabled, the run is not tracked\nFAILURE None\n"),
        ("", "offline", "FAILURE None\n"),
        ("of", None, "ValueError: WANDB_MODE=of is unknown: online, offline or disabled) and is switched off"),
    ],
)
def test_modes(tmp_path: Path, variable: str, mode: str | None, line: str) -> None:
    assert line in track(tmp_path / "run", {"WANDB_MODE": variable}, mode=mode)
    assert len(offline_runs(tmp_path / "run")) == (mode == "offline")


def test_a_key_in_netrc_or_in_wandbs_settings_counts_as_logged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from glmexp.tracker.wandb import _logged_in

    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def system(**changed: Any) -> SimpleNamespace:
        return SimpleNamespace(
            **{"api_key": None, "identity_token_file": None, "base_url": "https://api.wandb.ai", **changed}
        )

    assert not _logged_in(system())
    assert _logged_in(system(api_key="k"))
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    netrc.chmod(0o600)
    assert _logged_in(system())
    assert not _logged_in(system(base_url="https://wandb.example.org"))
    netrc.write_text("machine\n")
    assert not _logged_in(system())
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert _logged_in(system())
