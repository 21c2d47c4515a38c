"""The run folder: one per run, however many are started in the same second; its status and its failures."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from glmexp.config import redact
from glmexp.config.errors import ConfigError, Problem
from glmexp.config.identity import identity
from glmexp.config.inherit import AUTO
from glmexp.config.load import write
from glmexp.config.schema import RunConfig

CONFIG = "config.yaml"
STATUS = "status.json"
ENVIRONMENT = "environment.json"
MODEL = "model.json"
FAILURES = "failures"
_RECORDED = ("torch", "deepspeed", "transformers", "peft", "hydra-core", "omegaconf", "wandb", "glmexp")


def make(config: RunConfig, composed: str | None = None, unfinished: Path | None = None) -> Path:
    """Create the run folder, or take up the one that is resumed; write config.yaml and environment.json.

    composed: the identity of the configuration before the machine decided anything in it. unfinished: what
    ``train.resume=auto`` has found.

    ``mkdir`` decides between runs of the same second, so no two share a folder.
    """
    try:
        folder = _made(config, unfinished)
    except OSError as error:
        where = config.run.dir or "outputs"
        fix = "run.dir=FOLDER, where this user may write"
        raise ConfigError(Problem("run.dir", f"{where} cannot be made: {error.strerror}", fix)) from error
    config.run.dir = str(folder)
    shutil.rmtree(folder / FAILURES, ignore_errors=True)
    write(config, folder / CONFIG)
    write_json(folder / ENVIRONMENT, {"identity": composed or identity(config), **_environment(config)})
    write_status(folder, "starting")
    return folder


def _made(config: RunConfig, unfinished: Path | None) -> Path:
    if unfinished is not None:
        return unfinished
    if config.train.resume not in (None, AUTO):
        assert config.train.resume is not None
        return run_of_checkpoint(Path(config.train.resume))
    if config.run.dir is None:
        return _fresh(Path("outputs").absolute() / config.run.name)
    folder = Path(config.run.dir).absolute()
    if (folder / CONFIG).exists():
        if not config.run.overwrite:
            raise ConfigError(
                Problem(
                    "run.dir",
                    f"{folder} already holds a run",
                    "choose another folder, train.resume=FOLDER to go on with it, or run.overwrite=true",
                )
            )
        shutil.rmtree(folder)
        # Not on standard output, where entry=plan and doctor may write JSON alone.
        print(f"run.overwrite=true: the run in {folder} is gone, a new one takes its place", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_RECORDS = {CONFIG, ENVIRONMENT, STATUS, MODEL, FAILURES, "ds_config.json", "data.json", "logs", "positions", ".lock"}
"""What stands in the folder of a run before its first result."""


def take_back(folder: Path) -> None:
    """Remove a new run folder that holds no result, and the folders above it that only it was in: a mistake that the
    user was told of needs none. What else lies there stays, and so does the folder then."""
    if not {entry.name for entry in folder.iterdir()} <= _RECORDS:
        return
    shutil.rmtree(folder)
    if folder.parent.parent == Path("outputs").absolute():
        for above in (folder.parent, folder.parent.parent):
            if not any(above.iterdir()):
                above.rmdir()


def run_of_checkpoint(path: Path) -> Path:
    """The run folder that ``train.resume`` means: the folder itself, or the one above ``checkpoints/``."""
    for folder in (path, *path.parents):
        if (folder / CONFIG).exists():
            return folder.absolute()
    raise ConfigError(
        Problem("train.resume", f"{path} is no run folder and lies in none", f"name a folder that holds {CONFIG}")
    )


def _fresh(parent: Path) -> Path:
    return fresh(parent / time.strftime("%Y-%m-%d_%H-%M-%S"))


def fresh(wanted: Path) -> Path:
    """Make the folder, or one beside it with a number at its end: ``mkdir`` decides, so that no two share one."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for suffix in ["", *(f"-{number}" for number in range(2, 10_000))]:
        folder = wanted.with_name(f"{wanted.name}{suffix}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError(f"10,000 folders named {wanted}")


def _environment(config: RunConfig) -> dict[str, Any]:
    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {
        "versions": {package: version(package) for package in _RECORDED},
        "python": platform.python_version(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "seed": config.train.seed,
        "cpus": os.cpu_count(),
        "variables": recorded_variables({**os.environ, **config.launcher.env}, config.launcher.env),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_", "MASTER_", "OMP_", "DS_", "SLURM_JOB_ID", "TORCH_EXTENSIONS_DIR")


def recorded_variables(environ: Mapping[str, str], chosen: Collection[str] = ()) -> dict[str, str]:
    """The variables that decide how ranks talk and compute, and those in ``chosen``; nothing that may be a secret."""
    kept = {name: value for name, value in environ.items() if name.startswith(VARIABLES) or name in chosen}
    return {name: redact.text(value) for name, value in sorted(kept.items()) if not redact.is_secret(name)}


def _git(*words: str) -> str | None:
    """Output of git in the folder of the code; None outside of a checkout or without git."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists() or shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON; see ``write_text``."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name and rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_status(folder: Path, state: str, **more: Any) -> None:
    """``status.json``: state is starting, running, finished, stopped (can go on) or failed; the rest says why."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder / STATUS, {"state": state, "time": now, "pid": os.getpid(), **more})


def read_status(folder: Path) -> dict[str, Any]:
    """What ``write_status`` wrote last."""
    return json.loads((folder / STATUS).read_text(encoding="utf-8"))
