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

    try:
        lines = location(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        fix = "name a JSON lines file"
        raise DataError(Problem("eval.generate.prompts_file", f"{path}: {error.strerror}", fix)) from error
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
            ids = np.array(encode(messages), dtype=np.int32)
            prompts.append(Prompt(str(messages[-1]["content"]), str(row.get("answer") or ""), ids))
        except (ValueError, KeyError, TypeError) as error:
            problems.append(Problem(f"{path}:{number}", f"no prompt: {error!r}", 'write {"prompt": "..."}'))
    if problems:
        raise DataError(*problems[:5])
    if not prompts:
        raise DataError(Problem(path, "holds no prompt", 'write one {"prompt": "..."} a line'))
    return prompts
