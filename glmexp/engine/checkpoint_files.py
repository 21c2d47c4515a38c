"""Checkpoints as files: a folder that is either whole or not there.

    checkpoints/
      latest            name of the newest whole one
      best.json         name of the best one, with train.keep_best
      step-<n>/
        state.json      step, schedule, data position, configuration, versions; size and checksum of each file
        rank-<r>.safetensors    float32 masters and moments of what rank r holds, its random numbers

A folder is written under a name that begins with a dot and gets its own when every byte is on the disk, so that a kill
at any moment leaves the earlier ones as they were. Nothing in it is executed when it is read: safetensors and JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = "checkpoints"
STATE = "state.json"
LATEST = "latest"
BEST = "best.json"
LAYOUT = 1
_OLD = ".old"
"""Ends the name of a checkpoint that is being taken away."""
_BLOCK = 1 << 24
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "U8": np.dtype("u1")}


@dataclass(frozen=True)
class Entry:
    """One tensor of a rank's file: (length,), named ``<kind>:<parameter>@<offset>``."""

    name: str
    dtype: str
    length: int

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return self.length * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Written:
    """What a file must be to be whole."""

    bytes: int
    crc32: int


def step_name(step: int) -> str:
    """Folder of a step's checkpoint."""
    return f"step-{step}"


def rank_file(rank: int) -> str:
    """A rank's file in it."""
    return f"rank-{rank}.safetensors"


def steps(run_folder: Path) -> list[int]:
    """Steps of the finished checkpoints, rising."""
    names = [path.name for path in (run_folder / FOLDER).glob("step-*") if path.is_dir()]
    return sorted(int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdigit())


# -- writing ---------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, entries: Sequence[Entry], about: dict[str, str], data: Iterator[memoryview]) -> Written:
    """A safetensors file whose tensors' bytes come one after another from ``data``; on the disk when it returns.

    Written by hand: the library wants every tensor whole in memory once more. Format:
    https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": [entry.length],
            "data_offsets": [end, end + entry.bytes],
        }
        end += entry.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    size, crc = len(start), zlib.crc32(start)
    with path.open("wb") as file:
        file.write(start)
        for part in data:
            for begin in range(0, len(part), _BLOCK):
                block = part[begin : begin + _BLOCK]
                file.write(block)
                crc = zlib.crc32(block, crc)
                size += len(block)
        file.flush()
        os.fsync(file.fileno())
    assert size == len(start) + end, f"{size - len(start)} bytes of data for {end} that the header names"
    return Written(size, crc)


def write_json(path: Path, value: Any) -> None:
    """JSON that is on the disk when it returns, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """The same for any text."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Names in ``folder`` on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def unfinished(run_folder: Path) -> list[Path]:
    """Folders of saves that were cut off."""
    return [path for path in leftovers(run_folder) if path.suffix != _OLD]


def leftovers(run_folder: Path) -> list[Path]:
    """Those, and of checkpoints that were not taken away to the end."""
    return sorted(path for path in (run_folder / FOLDER).glob(".step-*") if path.is_dir())


def prune(run_folder: Path, keep: int) -> None:
    """Take away all but the newest ``keep`` checkpoints and the best."""
    best = read_best(run_folder)
    for step in steps(run_folder)[:-keep]:
        if best is None or step != best["step"]:
            remove(run_folder, step)


def remove(run_folder: Path, step: int) -> None:
    """Take a checkpoint away: first its name, so that no half of it is ever found."""
    folder = run_folder / FOLDER / step_name(step)
    gone = folder.with_name(f".{folder.name}{_OLD}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone)


def read_best(run_folder: Path) -> dict[str, Any] | None:
    """``best.json``: step, metric, value."""
    path = run_folder / FOLDER / BEST
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


# -- reading ---------------------------------------------------------------------------------------------------------


def read_state(folder: Path) -> dict[str, Any]:
    """``state.json``. Raises ValueError, in words, where it is absent or broken."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{STATE} is not there") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{STATE} is broken: {error}") from error
    if not isinstance(state, dict) or state.get("layout") != LAYOUT:
        found = state.get("layout") if isinstance(state, dict) else None
        raise ValueError(f"{STATE} has layout {found}, this version reads {LAYOUT}")
    return state


def faults(folder: Path, share: int | None = 0, shares: int = 1) -> list[str]:
    """What is wrong with a checkpoint, in words. All sizes are looked at, and of every ``shares``-th file, from number
    ``share`` on, each byte; share None: sizes alone."""
    try:
        state = read_state(folder)
    except ValueError as error:
        return [str(error)]
    found = []
    for number, (name, written) in enumerate(sorted(state["files"].items())):
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is not there")
        elif path.stat().st_size != written["bytes"]:
            found.append(f"{name} has {path.stat().st_size:,} bytes, {written['bytes']:,} were written")
        elif number % shares == share and _crc(path) != written["crc32"]:
            found.append(f"{name} holds other bytes than were written")
    return found


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


class RankFile:
    """One rank's file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(self._map[:8], "little")
        header = json.loads(self._map[8 : 8 + length])
        self._start = 8 + length
        self.about: dict[str, str] = header.pop("__metadata__", {})
        self._entries: dict[str, dict[str, Any]] = header

    @property
    def names(self) -> list[str]:
        """Entries."""
        return list(self._entries)

    def length(self, name: str) -> int:
        """Elements of an entry."""
        return int(self._entries[name]["shape"][0])

    def tensor(self, name: str, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Elements of an entry, copied out of the file."""
        entry = self._entries[name]
        dtype = _DTYPES[entry["dtype"]]
        count = self.length(name) - start if length is None else length
        begin = self._start + entry["data_offsets"][0] + start * dtype.itemsize
        return torch.from_numpy(np.frombuffer(self._map, dtype, count, begin).copy())


class Pieces:
    """The pieces of all ranks' files as the parameters that they are together."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self._files = [RankFile(folder / name) for name in files]
        self._places: dict[tuple[str, str], list[tuple[int, int, RankFile, str]]] = {}
        self.steps: dict[str, float] = {}
        """Adam's count of steps by parameter; none where only weights were written."""
        for file in self._files:
            self.steps |= json.loads(file.about.get("steps", "{}"))
            for entry in file.names:
                kind, _, rest = entry.partition(":")
                name, at, offset = rest.rpartition("@")
                if at:
                    place = (int(offset), file.length(entry), file, entry)
                    self._places.setdefault((kind, name), []).append(place)
        for places in self._places.values():
            places.sort(key=lambda place: place[0])

    def fill(self, kind: str, name: str, offset: int, into: torch.Tensor) -> None:
        """Copy the elements from ``offset`` on into the flat tensor ``into``."""
        end, filled = offset + into.numel(), 0
        for start, length, file, entry in self._places.get((kind, name), []):
            begin, stop = max(start, offset), min(start + length, end)
            if begin < stop:
                into[begin - offset : stop - offset].copy_(file.tensor(entry, begin - start, stop - begin))
                filled += stop - begin
        assert filled == into.numel(), f"the checkpoint has {filled} of {into.numel()} elements of {kind} of {name}"


def masters(folder: Path) -> dict[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]]:
    """What was trained, whole, in float32: name to the shape and to what reads the tensor."""
    state = read_state(folder)
    pieces = Pieces(folder, sorted(state["files"]))

    def reader(name: str, shape: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            flat = torch.empty(math.prod(shape))
            pieces.fill("master", name, 0, flat)
            return flat.view(shape)

        return read

    shapes = {name: tuple(shape) for name, shape in state["shapes"].items()}
    return {name: (shape, reader(name, shape)) for name, shape in shapes.items()}


def discard(folder: Path) -> None:
    """Take away what a save has left."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
