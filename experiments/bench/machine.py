"""What a measurement was made on: hardware, versions, commit."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "accelerate", "triton")
SAMPLE_S = 1.0
"""The driver's utilization is a mean over up to this long."""


def setting(root: Path) -> dict[str, Any]:
    """Fields of a result row."""
    return {
        "device": _gpus(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "commit": _commit(root),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def keep(out: Path | None, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows to a file of results; None: they were only printed."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(root: Path) -> str:
    words = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _gpus() -> str:
    names = _ask("name")
    return f"{len(names)} x {names[0]}" if names else f"{platform.machine()} CPU"


def gpus_rest() -> bool:
    """Whether no GPU has had anything to do for a moment. True without one."""
    if shutil.which("nvidia-smi") is None:
        return True
    time.sleep(SAMPLE_S)
    return all(int(share) == 0 for share in _ask("utilization.gpu"))


def _ask(what: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")[:-1]
