"""What the tests of the front door share: composing from a list of overrides, and reading the report of a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glmexp.config.arguments import parse
from glmexp.config.compose import Machine, Request, request
from glmexp.config.errors import ConfigError
from glmexp.config.schema import RunConfig


def asked(*words: str, gpus: int = 0, world_size: int | None = None) -> Request:
    return request(parse(words), Machine(gpus, world_size))


def config(*words: str, gpus: int = 0, world_size: int | None = None) -> RunConfig:
    (one,) = asked(*words, gpus=gpus, world_size=world_size).trials
    return one


def refusal(*words: str, gpus: int = 0, world_size: int | None = None) -> str:
    """The report of the ConfigError that these words raise."""
    with pytest.raises(ConfigError) as caught:
        asked(*words, gpus=gpus, world_size=world_size)
    return caught.value.report()


def rows_file(path: Path, count: int = 8) -> str:
    """A file of training rows; only its existence matters to the config room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": f"Lamp {number}?", "response": "red"}) for number in range(count)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def ds_file(path: Path, content: Any) -> str:
    """A DeepSpeed JSON."""
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)
