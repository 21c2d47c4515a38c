"""Prepared examples on disk, mapped into memory: ranks and restarts share them, and no row is a Python object.

A store is a folder: ``tokens.bin`` and ``texts.bin`` (all examples one after another), ``columns.npz`` (one number an
example), ``about.json`` (report, counts, sizes). It appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from glmexp.data.encode import COLUMNS, Part
from glmexp.data.template import Message

IGNORED = -100
"""Label of a token that is not learned (the default ignore_index of torch's cross entropy)."""
ABOUT = "about.json"


@dataclass(frozen=True, eq=False)
class Example:
    """One example, ready for a batch."""

    input_ids: np.ndarray
    """Prompt, answer and end token, int32 (length,)."""
    labels: np.ndarray
    """The ids where they are to be learned, else -100. Not shifted: the loss shifts."""
    prompt_length: int
    line: int
    """Line of the source file."""
    text: bytes = b"{}"

    @property
    def prompt_ids(self) -> np.ndarray:
        """What a generation starts from."""
        return self.input_ids[: self.prompt_length]

    @property
    def supervised_tokens(self) -> int:
        """Tokens that count in the loss. The first token of a row has nothing before it to be predicted from."""
        return int((self.labels[1:] != IGNORED).sum())

    @cached_property
    def _content(self) -> dict[str, Any]:
        return json.loads(self.text)

    @property
    def messages(self) -> list[Message]:
        """The conversation as it was rendered."""
        return self._content["messages"]

    @property
    def prompt(self) -> str:
        """The last question."""
        return next(one["content"] for one in reversed(self.messages) if one["role"] != "assistant")

    @property
    def answer(self) -> str:
        """The last answer."""
        return self.messages[-1]["content"]

    @property
    def answers(self) -> list[str]:
        """All accepted answers."""
        return self._content.get("answers") or [self.answer]

    @property
    def label(self) -> str:
        """The place in the file as messages name it."""
        return self._content["label"]

    @property
    def id(self) -> str | None:
        """The row's own name in the file."""
        return self._content.get("id")

    def blank(self) -> Example:
        """The same row without anything to learn: it fills a place in a batch and has no weight."""
        return Example(self.input_ids, np.full_like(self.labels, IGNORED), self.prompt_length, self.line, self.text)


class Writer:
    """Appends parts to a store that is being made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._tokens = (folder / "tokens.bin").open("wb")
        self._texts = (folder / "texts.bin").open("wb")
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}

    def add(self, part: Part, first_row: int) -> None:
        """Append the examples of a block whose first row is ``first_row``."""
        self._tokens.write(part.tokens)
        self._texts.write(part.texts)
        for name in COLUMNS:
            self._columns[name].append(part.columns[name] + (first_row if name == "row" else 0))

    def close(self, about: dict[str, Any]) -> None:
        """Write the rest. ``about`` is kept as it is."""
        sizes = {}
        for stream in (self._tokens, self._texts):
            stream.close()
            path = Path(stream.name)
            sizes[path.name] = path.stat().st_size
        columns = {name: np.concatenate(parts or [np.zeros(0, np.int64)]) for name, parts in self._columns.items()}
        np.savez(self.folder / "columns.npz", **columns)  # type: ignore[arg-type]
        text = json.dumps({**about, "sizes": sizes}, ensure_ascii=False, indent=1)
        (self.folder / ABOUT).write_text(text + "\n", encoding="utf-8")

    def discard(self) -> None:
        """Leave nothing behind."""
        self._tokens.close()
        self._texts.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Store:
    """A finished store, read through memory maps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        with np.load(folder / "columns.npz") as columns:
            self.columns = {name: columns[name] for name in COLUMNS}
        self._token_ends = np.cumsum(self.columns["length"])
        self._text_ends = np.cumsum(self.columns["text_length"])
        self._tokens = self._map("tokens.bin", np.int32)
        self._texts = self._map("texts.bin", np.uint8)

    def _map(self, name: str, dtype: Any) -> np.ndarray:
        size = self.about["sizes"][name] // np.dtype(dtype).itemsize
        return np.memmap(self.folder / name, dtype, "r", shape=(size,)) if size else np.zeros(0, dtype)

    def __len__(self) -> int:
        return len(self._token_ends)

    def example(self, index: int) -> Example:
        """The example at ``index``; its arrays are copies."""
        end = int(self._token_ends[index])
        stored = np.array(self._tokens[end - int(self.columns["length"][index]) : end])
        learned = stored < 0
        ids = np.where(learned, ~stored, stored)
        text_end = int(self._text_ends[index])
        text = self._texts[text_end - int(self.columns["text_length"][index]) : text_end].tobytes()
        labels = np.where(learned, ids, IGNORED)
        return Example(ids, labels, int(self.columns["prompt_length"][index]), int(self.columns["line"][index]), text)

    @staticmethod
    def whole(folder: Path) -> bool:
        """Whether the folder holds a store whose files have the sizes that they were written with."""
        try:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            return all((folder / name).stat().st_size == size for name, size in about["sizes"].items())
        except (FileNotFoundError, ValueError, KeyError):
            return False


class Examples(Sequence[Example]):
    """Some examples of a store, made when they are asked for."""

    def __init__(self, store: Store | None, indices: np.ndarray) -> None:
        self._store = store
        self._indices = indices

    @staticmethod
    def none() -> Examples:
        """No examples."""
        return Examples(None, np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Examples: ...
    def __getitem__(self, index: int | slice) -> Example | Examples:
        if isinstance(index, slice):
            return Examples(self._store, self._indices[index])
        assert self._store is not None, "there are no examples"
        return self._store.example(int(self._indices[index]))

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    def column(self, name: str) -> np.ndarray:
        """One number an example: length, prompt_length, supervised, line or row."""
        return self._store.columns[name][self._indices] if self._store is not None else self._indices

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example."""
        return self.column("length")

    def shortest(self, count: int) -> list[list[int]]:
        """Ids of the shortest examples."""
        order = np.argsort(self.lengths, kind="stable")[:count]
        return [self[int(index)].input_ids.tolist() for index in order]
