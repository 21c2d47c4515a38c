"""From the data section to examples: read, render with the model's chat template, cut to length, keep, hold out.

What was prepared once is used again while the file's contents, the tokenizer, the template, the settings and this
code are the same. Ranks take turns on a lock: the first one prepares, the others wait for a file and not inside of a
process group, whose time limit a large file would exceed.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import random
import shutil
import tempfile
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from glmexp.config.data_schema import DataSection
from glmexp.config.errors import ConfigError, DataError, Problem
from glmexp.data import forms, workers
from glmexp.data.encode import Encoding
from glmexp.data.files import DataFile, raise_all
from glmexp.data.opening import open_file, sample
from glmexp.data.progress import Preparing
from glmexp.data.readers import Outcome, places, refuse_all_held_out, refuse_nothing
from glmexp.data.store import IGNORED, Example, Examples, Store, Writer
from glmexp.data.template import Renderer

__all__ = ["IGNORED", "Example", "Examples", "Prepared", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """All rows of a run."""

    train: Examples
    eval: Examples
    report: list[str]
    """Lines for the log: what was read, used, dropped, cut and held out."""
    sha256: dict[str, str]
    """Fingerprint of each file that was read."""

    @staticmethod
    def nothing() -> Prepared:
        """No rows at all."""
        return Prepared(Examples.none(), Examples.none(), [], {})

    def record(self) -> dict[str, Any]:
        """What the run keeps in ``data.json``."""
        return {
            "files": self.sha256,
            "train_examples": len(self.train),
            "eval_examples": len(self.eval),
            "report": self.report,
        }


def prepare(config: DataSection, seed: int, renderer: Renderer, *, train: bool = True) -> Prepared:
    """Read, render and hold out. ``train=False`` (entry=evaluate) makes the held-out rows alone.

    Raises DataError for files that cannot be used and for files whose rows are all too long, ConfigError where no
    file is named.
    """
    if train and config.train_file is None:
        raise ConfigError(Problem("data.train_file", "is not set", "name a JSON array or JSON lines file"))
    assert config.eval_file is None or config.holdout is None, "data.eval_file and data.holdout are both set"
    if not train and config.eval_file is None and config.holdout is None:
        raise ConfigError(Problem("data.eval_file", "is not set: there are no held-out rows", "name a file with rows"))
    report: list[str] = []
    sha256: dict[str, str] = {}
    trained = held = Examples.none()
    if config.train_file is not None and (train or config.holdout is not None):
        store = _stored(config.train_file, config, renderer, report, sha256)
        trained = Examples(store, np.arange(len(store)))
        if config.holdout is not None:
            trained, held = _hold_out(store, config.holdout, seed, report)
    if config.eval_file is not None:
        store = _stored(config.eval_file, config, renderer, report, sha256)
        held = Examples(store, np.arange(len(store)))
    return Prepared(trained if train else Examples.none(), held, report, sha256)


def _hold_out(store: Store, count: int, seed: int, report: list[str]) -> tuple[Examples, Examples]:
    """Draw ``count`` rows by the seed; both parts keep the order of the file."""
    rows, path = store.about["rows"], store.about["path"]
    refuse_all_held_out(path, rows, count)
    drawn = random.Random(f"holdout {seed}").sample(range(rows), count)
    held = np.isin(store.columns["row"], drawn)
    report.append(f"{path}: {count} rows held out, {rows - count} left to train on")
    if held.all() or not held.any():
        which = "left to train on" if held.all() else "held out"
        raise DataError(Problem("data.holdout", f"the rows {which} are all too long", "raise data.max_length"))
    return Examples(store, np.flatnonzero(~held)), Examples(store, np.flatnonzero(held))


def _stored(path: str, config: DataSection, renderer: Renderer, report: list[str], sha256: dict[str, str]) -> Store:
    file = open_file(path, config.encoding)
    store = _open(file, config, renderer)
    report.extend(store.about["report"])
    sha256[file.path] = file.sha256
    return store


def _open(file: DataFile, config: DataSection, renderer: Renderer) -> Store:
    """The prepared file: from the cache, or made now."""
    if config.cache_dir is None:
        folder = Path(tempfile.mkdtemp(prefix="glmexp-data-"))
        try:
            _build(file, config, renderer, folder / "store")
        except BaseException:
            shutil.rmtree(folder)
            raise
        store = Store(folder / "store")
        weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
        return store
    name = key(file, config, renderer)
    cached = Path(config.cache_dir) / name
    cached.parent.mkdir(parents=True, exist_ok=True)
    with (cached.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process that holds it, however that ends
        if not Store.whole(cached):
            shutil.rmtree(cached, ignore_errors=True)
            unfinished = cached.with_name(f".{name}")
            shutil.rmtree(unfinished, ignore_errors=True)
            _build(file, config, renderer, unfinished)
            unfinished.rename(cached)
        return Store(cached)


def key(file: DataFile, config: DataSection, renderer: Renderer) -> str:
    """Name of the prepared file: changes with whatever could change its contents."""
    parts = {
        "file": [file.path, file.sha256, file.kind, file.encoding, file.separator],
        "format": config.format,
        "columns": dataclasses.asdict(config.columns),
        "on_error": config.on_error,
        "max_length": config.max_length,
        "supervise": config.supervise,
        "renderer": renderer.fingerprint,
        "code": code_version(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@cache
def code_version() -> str:
    """Digest of this room's source files."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _build(file: DataFile, config: DataSection, renderer: Renderer, folder: Path) -> None:
    """Read and encode the whole file into a store. Raises DataError with all problems of the file."""
    blocks, first = sample(file)
    found = forms.resolve(file.path, first, config.columns, config.format)
    encoding = Encoding(config.max_length, config.supervise)
    work = workers.Work(file, found, encoding, renderer, config.on_error)
    size = sum(one.stat().st_size for one in (file.place.glob("*") if file.place.is_dir() else [file.place]))
    processes = workers.workers_for(size, config.prepare_workers)
    outcome = Outcome(file.unit)
    cut: dict[str, list[str]] = {}
    too_long: list[str] = []
    done_bytes = 0
    writer = Writer(folder)
    try:
        total = size if file.kind == "JSON lines" else None
        large = size >= workers.LARGE_BYTES
        with Preparing(file.path, size, total, processes) if large else nullcontext() as progress:
            for part, more, read_bytes in workers.run(work, blocks, processes):
                writer.add(part, outcome.used)
                outcome.add(more)
                too_long += part.too_long
                for reason, labels in part.cut.items():
                    cut.setdefault(reason, []).extend(labels)
                done_bytes += read_bytes
                if progress is not None:
                    progress.show(outcome.read, done_bytes)
        raise_all(file.path, outcome.problems)
        lines = _report(file, outcome, config.max_length, cut, too_long)
        about = {
            "path": file.path,
            "sha256": file.sha256,
            "rows": outcome.used,
            "read": outcome.read,
            "dropped": {reason: len(labels) for reason, labels in outcome.dropped.items()},
            "repaired": {reason: len(labels) for reason, labels in outcome.repaired.items()},
            "cut": {reason: len(labels) for reason, labels in cut.items()},
            "too_long": len(too_long),
            "forms": outcome.forms,
            "report": lines,
        }
        writer.close(about)
    except BaseException:
        writer.discard()
        raise


def _report(
    file: DataFile, outcome: Outcome, max_length: int, cut: dict[str, list[str]], too_long: list[str]
) -> list[str]:
    """Lines for the log. Raises DataError where no row is left."""
    refuse_nothing(file, outcome)
    over = f"longer than data.max_length={max_length} tokens"
    if len(too_long) == outcome.used:
        raise DataError(
            Problem(
                file.path,
                f"all {outcome.used} rows are {over} by their answer",
                "raise data.max_length, or shorten them",
            )
        )
    lines = [f"{outcome.report(file.path)}; sha256 {file.sha256[:12]}"]
    for reason, found in cut.items():
        where = places(file.unit, found)
        lines.append(f"{file.path}: {len(found)} of {outcome.used} rows {over}: {reason} ({where})")
    if too_long:
        where = places(file.unit, too_long)
        lines.append(f"{file.path}: {len(too_long)} of {outcome.used} rows {over} by their answer: dropped ({where})")
    return lines
