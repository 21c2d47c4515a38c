"""Checkpoints of a live run: copied to the host at once, written by a thread, whole or not there; and put back."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glmexp.config.errors import ArtifactError, Problem
from glmexp.config.quoting import typed
from glmexp.engine import checkpoint_files as files
from glmexp.engine import distributed, rng, states
from glmexp.engine.checkpoint_files import Entry
from glmexp.engine.host_copy import HostCopy, NoCopy
from glmexp.launcher import needs

log = logging.getLogger(__name__)

_POLL_S = 0.05


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The earlier ones are as they were."""


ROOM = 0.8
"""Share of the host's free memory that copies of all its ranks may take."""
_BESIDE = 1 << 16
"""Bytes of a copy that are no states: random numbers."""


@dataclass
class Saver:
    """Writes the checkpoints of one run. Every method but ``judge`` is collective, in the same order on all ranks."""

    engine: Any
    run_folder: Path
    keep: int
    """Newest checkpoints that are kept."""
    token: str
    """The same word on all ranks and another in each process: two lives of a run share no folder of a save."""
    lowest_is_best: bool = True
    _host: HostCopy | None = field(default=None, init=False)
    """Where states are copied to: decided by ``prepare``, else at the first save."""
    _thread: threading.Thread | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _step: int = field(default=0, init=False)
    _judged: dict[str, Any] | None = field(default=None, init=False)
    """What ``judge`` found of the checkpoint that is being written."""

    def prepare(self) -> None:
        """There will be saves: take the host memory that they need, beside training."""
        self._host = self._room(ahead=True)

    def save(self, step: int, about: dict[str, Any]) -> dict[str, float]:
        """Copy the state after ``step`` to the host and let a thread write it. Returns the seconds of waiting and
        copying.

        about: goes to ``state.json``. Raises CheckpointError where the save before failed, NonFiniteState where weights
        or moments are not finite: such a state is not kept.
        """
        begun = time.perf_counter()
        self.wait()
        waited = time.perf_counter()
        host = self._host = self._host or self._room(ahead=False)
        entries, extra = self._copy(step, host)
        folder = self.run_folder / files.FOLDER / f".{files.step_name(step)}.{self.token}"
        state = {
            "layout": files.LAYOUT,
            "step": step,
            "ranks": distributed.world_size(),
            "counters": states.counters(self.engine),
            "shapes": states.shapes(self.engine),
            **about,
        }
        self._step, self._error, self._judged = step, None, None
        arguments = (folder, distributed.rank(), distributed.world_size(), entries, extra, state, host)
        if isinstance(host, NoCopy):
            self._guarded(*arguments)
            self.wait()
        else:
            name = f"checkpoint {step}"
            self._thread = threading.Thread(target=self._guarded, args=arguments, name=name, daemon=True)
            self._thread.start()
        return {"wait": waited - begun, "copy": time.perf_counter() - waited}

    def check(self) -> None:
        """Raise CheckpointError where the thread has failed meanwhile; waits for nothing."""
        if self._error is not None:
            self.wait()

    def wait(self) -> None:
        """Until the last save is on the disk (on rank 0: under its name). Raises CheckpointError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(self._failure(error)) from error
        if self._judged is not None:
            self._crown(self._judged)
            self._judged = None

    def close(self) -> None:
        """Until the last save is whole for all ranks."""
        if self._host is not None:
            self._host.close()
        self.wait()
        distributed.barrier()

    def judge(self, step: int, metric: str, value: float) -> None:
        """On rank 0: the checkpoint of ``step``, where there is one, has this value of ``train.keep_best``."""
        found = {"step": step, "metric": metric, "value": value}
        if step == self._step and self._thread is not None and self._thread.is_alive():
            self._judged = found  # its folder may not have its name yet
        elif step in files.steps(self.run_folder):
            self._crown(found)

    def _crown(self, found: dict[str, Any]) -> None:
        best = files.read_best(self.run_folder)
        if not math.isfinite(found["value"]):
            return
        sign = 1 if self.lowest_is_best else -1
        if best is None or best["metric"] != found["metric"] or sign * found["value"] < sign * best["value"]:
            files.write_json(self.run_folder / files.FOLDER / files.BEST, found)

    def _room(self, ahead: bool) -> HostCopy:
        """A copy on the host where all its ranks' copies fit into the memory that is free there; on all ranks alike.

        ahead: a thread takes the memory from now on. The ranks of a host look at what is free before one takes any.
        """
        free, size = needs.available_memory_bytes(), states.size_bytes(self.engine)
        needed = size * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        fits = free is None or needed <= ROOM * free
        if all(distributed.gather_to_all(fits)):
            return HostCopy(size + _BESIDE if ahead else 0)
        if states.on_nvme(self.engine):
            return HostCopy()  # what is read goes back to the disk: there is nothing to read twice
        log.warning("%d bytes of states, %s of memory free: training waits while checkpoints are written", needed, free)
        return NoCopy()

    def _copy(self, step: int, host: HostCopy) -> tuple[list[Entry], dict[str, str]]:
        """This rank's pieces and random numbers into host memory. Collective: all ranks know if one is not finite."""
        entries: list[Entry] = []
        sums: list[torch.Tensor] = []
        adam_steps: dict[str, float] = {}
        host.clear()

        def take(piece: states.Piece) -> None:
            for kind in states.KINDS:
                tensor = piece.tensors.get(kind)
                if tensor is None:
                    tensor = torch.zeros(piece.length)
                entries.append(Entry(f"{kind}:{piece.name}@{piece.offset}", "F32", piece.length))
                host.append(tensor)
                sums.append(tensor.sum())
            adam_steps[piece.name] = piece.step

        states.read(self.engine, take)
        tensors, plain = rng.state()
        for name, tensor in tensors.items():
            entries.append(Entry(f"rng:{name}", "U8", len(tensor)))
            host.append(tensor)
        host.finish()
        _raise_if_spoiled(step, [entry.name for entry in entries], sums)
        return entries, {"format": "pt", "rng": json.dumps(plain), "steps": json.dumps(adam_steps)}

    def _guarded(self, folder: Path, *arguments: Any) -> None:
        try:
            self._write(folder, *arguments)
        except BaseException as error:  # noqa: BLE001 - handed to the training thread
            self._error = error
            files.discard(folder)  # a full disk has room for the run's last words again

    def _write(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        entries: list[Entry],
        extra: dict[str, str],
        state: dict[str, Any],
        host: HostCopy,
    ) -> None:
        """What the thread does: this rank's file; on rank 0, when all are there, the folder's name."""
        begun = time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        name = files.rank_file(rank)
        written = files.write_tensors(folder / name, entries, extra, host.parts())
        part = folder / f".{name}.json"
        files.write_json(part, {"bytes": written.bytes, "crc32": written.crc32})
        if rank == 0:
            state["files"] = {files.rank_file(one): _part(folder, one) for one in range(ranks)}
            files.write_json(folder / files.STATE, state)
            publish(self.run_folder, folder, state["step"])
            files.prune(self.run_folder, self.keep)
        log.info("checkpoint %s: %d bytes in %.2f s", folder.name, written.bytes, time.perf_counter() - begun)

    def _failure(self, error: BaseException) -> str:
        kept = files.steps(self.run_folder)
        rest = f"the last whole one is step {kept[-1]}" if kept else "there is none before"
        way = (
            typed("train.resume", self.run_folder)
            if kept
            else "the same line with run.overwrite=true or another run.dir"
        )
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        return (
            f"the checkpoint of step {self._step} could not be written to {self.run_folder / files.FOLDER}: {reason}; "
            f"{rest}. Make room there (train.keep_checkpoints is {self.keep}), then {way}"
        )


class NonFiniteState(RuntimeError):
    """Weights or moments are nan or inf; nothing of them is kept."""

    def __init__(self, step: int, names: list[str]) -> None:
        where = f" ({', '.join(names[:3])})" if names else " (on another rank)"
        super().__init__(f"weights or moments after optimizer step {step} are not finite{where}; nothing is saved")


def check_finite(engine: Any, step: int) -> None:
    """Raise NonFiniteState where masters or moments are not finite. Collective."""
    names: list[str] = []
    sums: list[torch.Tensor] = []

    def look(piece: states.Piece) -> None:
        names.extend(f"{kind}:{piece.name}" for kind in piece.tensors)
        sums.extend(tensor.sum() for tensor in piece.tensors.values())

    states.read(engine, look)
    _raise_if_spoiled(step, names, sums)


def _raise_if_spoiled(step: int, names: list[str], sums: list[torch.Tensor]) -> None:
    """A sum is finite where all of its terms are. Collective: all ranks raise if one must."""
    spoiled = [name for name, total in zip(names, sums, strict=False) if not math.isfinite(total)]
    if distributed.sum_over_ranks([float(len(spoiled))])[0]:
        raise NonFiniteState(step, spoiled)


def publish(run_folder: Path, folder: Path, step: int) -> None:
    """Give a written folder its name, and say that it is the newest."""
    for part in folder.glob(".rank-*.json"):
        part.unlink()
    files.sync_folder(folder)
    final = run_folder / files.FOLDER / files.step_name(step)
    if final.exists():
        files.remove(run_folder, step)
    folder.rename(final)
    files.sync_folder(final.parent)
    files.write_text(final.parent / files.LATEST, final.name + "\n")


def _part(folder: Path, rank: int) -> dict[str, int]:
    """Size and checksum of a rank's file, as soon as it is there: the ranks share this folder and nothing else in a
    thread."""
    part = folder / f".{files.rank_file(rank)}.json"
    while not part.exists():
        time.sleep(_POLL_S)
    return json.loads(part.read_text(encoding="utf-8"))


# -- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run goes on from."""

    folder: Path
    state: dict[str, Any]
    notes: list[str]
    """What a person should know: damaged ones that were passed over, saves that were cut off."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.state["step"])


def find(run_folder: Path, named: str | None) -> Found | None:
    """The checkpoint ``named``, else the newest whole one; None where there is none. Collective: ranks share the
    reading.

    Raises ArtifactError where the named one is damaged, or all are.
    """
    notes = [f"the save of {_cut_off(path)} was cut off and is not used" for path in files.unfinished(run_folder)]
    names = [named] if named is not None else [files.step_name(step) for step in reversed(files.steps(run_folder))]
    for name in names:
        folder = run_folder / files.FOLDER / name
        faults = _faults_of_all(folder)
        if not faults:
            return Found(folder, files.read_state(folder), notes)
        notes.append(f"{folder} is damaged: {'; '.join(faults)}")
    if not names:
        return None
    others = ", ".join(files.step_name(step) for step in files.steps(run_folder) if files.step_name(step) not in names)
    raise ArtifactError(
        *(Problem("train.resume", note, f"name another one: {others}" if others else "train anew") for note in notes)
    )


def _cut_off(path: Path) -> str:
    return path.name.split(".")[1].replace("-", " ")


def _faults_of_all(folder: Path) -> list[str]:
    rank, ranks = distributed.rank(), distributed.world_size()
    mine = files.faults(folder, rank, ranks)
    return list(dict.fromkeys(fault for found in distributed.gather_to_all(mine) for fault in found))


def load(engine: Any, found: Found, seed: int, grad_accum: int) -> None:
    """Put the state into the engine, whatever arrangement wrote it. Collective.

    Ranks that were there take their own random numbers, others begin some of their own. Raises ArtifactError where
    other parameters are trained now.
    """
    _check_shapes(found, states.shapes(engine))
    pieces = files.Pieces(found.folder, sorted(found.state["files"]))

    def fill(piece: states.Piece) -> float:
        for kind in states.KINDS:
            pieces.fill(kind, piece.name, piece.offset, piece.tensors[kind])
        return pieces.steps[piece.name]

    states.write(engine, fill)
    states.set_counters(engine, found.state["counters"], grad_accum)
    rank = distributed.rank()
    if found.state["ranks"] == distributed.world_size():
        own = files.RankFile(found.folder / files.rank_file(rank))
        names = [name for name in own.names if name.startswith("rng:")]
        tensors = {name.removeprefix("rng:"): own.tensor(name) for name in names}
        rng.set_state(tensors, json.loads(own.about["rng"]))
    else:
        torch.manual_seed(seed + 1_000_003 * found.step + rank)


def _check_shapes(found: Found, now: dict[str, tuple[int, ...]]) -> None:
    saved = {name: tuple(shape) for name, shape in found.state["shapes"].items()}
    other = [
        f"{name} {now.get(name, 'not trained')} now, {saved.get(name, 'not trained')} in the checkpoint"
        for name in sorted({*now, *saved})
        if now.get(name) != saved.get(name)
    ]
    if other:
        raise ArtifactError(
            Problem(
                "train.resume",
                f"{found.folder} trained other tensors: {'; '.join(other[:3])} ({len(other)} in all)",
                "resume with the model and the method of the run",
            )
        )


def forget_after(run_folder: Path, step: int) -> list[str]:
    """On rank 0, going on from ``step``: later checkpoints and cut-off saves belong to a life that is given up."""
    for path in files.leftovers(run_folder):
        files.discard(path)
    later = [one for one in files.steps(run_folder) if one > step]
    for one in later:
        files.remove(run_folder, one)
    best = files.read_best(run_folder)
    if best is not None and best["step"] > step:
        (run_folder / files.FOLDER / files.BEST).unlink()
    if not later:
        return []
    files.write_text(run_folder / files.FOLDER / files.LATEST, files.step_name(step) + "\n")
    return [f"checkpoints of later steps are taken away: {', '.join(map(str, later))}; the run goes on from {step}"]
