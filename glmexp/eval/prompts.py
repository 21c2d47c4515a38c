"""A file of prompts that stay the same over all runs, so that answers can be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glmexp.config.errors import DataError, Problem

if TYPE_CHECKING:
    import numpy as np

BUILTIN = "builtin:"


@dataclass(frozen=True)
class Prompt:
    """What generation needs of an example."""

    prompt: str
    answer: str
    """What is expected, or empty."""
    prompt_ids: np.ndarray

    @property
    def input_ids(self) -> np.ndarray:
        """A blank place in a batch is filled with the shortest row; here a row is its prompt."""
        return self.prompt_ids

    def blank(self) -> Prompt:
        """A prompt has nothing to learn."""
        return self


def location(path: str) -> Path:
    """``builtin:prompts.jsonl`` lies in this package."""
    return Path(__file__).parent / path.removeprefix(BUILTIN) if path.startswith(BUILTIN) else Path(path).expanduser()


def read_prompts(path: str, encode: Callable[[list[Any]], list[int]]) -> list[Prompt]:
    """Prompts of a JSON lines file, rendered with the chat template. Raises DataError with file and line."""
    import numpy as np  # here: the parent imports this module for the hook's settings

    return [
        Prompt(str(messages[-1]["content"]), answer, np.array(encode(messages), dtype=np.int32))
        for messages, answer in rows_of(path)
    ]


def rows_of(path: str) -> list[tuple[list[dict[str, Any]], str]]:
    """Messages and expected answer of each row. Raises DataError with the first rows that hold no prompt."""
    try:
        lines = location(path).read_text(encoding="utf-8-sig").split("\n")  # U+2028 may stand in JSON
    except OSError as error:
        fix = "name a JSON lines file"
        raise DataError(Problem("eval.generate.prompts_file", f"{path}: {error.strerror}", fix)) from error
    except UnicodeDecodeError as error:
        raise DataError(Problem(path, f"not UTF-8 (byte {error.start})", "save it as UTF-8")) from error
    rows: list[tuple[list[dict[str, Any]], str]] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line)))
        except json.JSONDecodeError as error:
            problems.append(Problem(f"{path}:{number}", f"broken JSON: {error.msg} (character {error.colno})", _FIX))
        except ValueError as error:
            problems.append(Problem(f"{path}:{number}", f"no prompt: {error}", _FIX))
    if problems:
        raise DataError(*problems[:5])
    if not rows:
        raise DataError(Problem(path, "holds no prompt", 'write one {"prompt": "..."} a line'))
    return rows


_FIX = 'write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


def _row(row: Any) -> tuple[list[dict[str, Any]], str]:
    if not isinstance(row, dict):
        raise ValueError("a row must be a JSON object")
    answer = str(row.get("answer") or "")
    if "messages" not in row:
        if not isinstance(row.get("prompt"), str):
            raise ValueError(f"no text 'prompt' and no 'messages' among its columns {', '.join(row) or '(none)'}")
        return [{"role": "user", "content": row["prompt"]}], answer
    messages = row["messages"]
    turns = messages if isinstance(messages, list) else []
    if not turns or not all(isinstance(one, dict) and {"role", "content"} <= set(one) for one in turns):
        raise ValueError("'messages' must be a list of objects with 'role' and 'content'")
    return messages, answer
