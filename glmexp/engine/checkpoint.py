"""DeepSpeed checkpoints of a run: save, prune, find, load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from glmexp.config.errors import ArtifactError, Problem
from glmexp.engine import distributed

FOLDER = "checkpoints"
_LATEST = "latest"


def save(engine: Any, run_folder: Path, step: int, keep: int) -> None:
    """Write ``checkpoints/step-<n>`` (what is trained, optimizer, schedule, each rank's RNG). Collective.

    Frozen weights are left out: they come from the base again.
    """
    folder = run_folder / FOLDER
    tag = f"step-{step}"
    engine.save_checkpoint(
        folder, tag=tag, client_state={"step": step}, save_latest=True, exclude_frozen_parameters=True
    )
    torch.save(_rng_state(), folder / tag / f"rng-rank{distributed.rank()}.pt")
    distributed.barrier()
    if distributed.rank() == 0:
        steps = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
        for old in steps[:-keep]:
            shutil.rmtree(folder / f"step-{old}")


def tag_to_resume(resume: Path, run_folder: Path) -> str:
    """The checkpoint that ``train.resume`` means: the one it names, else the run's latest. Raises ArtifactError."""
    if resume.absolute() != run_folder and resume.parent.name == FOLDER:
        return resume.name
    latest = run_folder / FOLDER / _LATEST
    if not latest.exists():
        raise ArtifactError(
            Problem("train.resume", f"{run_folder} holds no checkpoint", "runs write them with train.save_steps=N")
        )
    return latest.read_text(encoding="utf-8").strip()


def load(engine: Any, run_folder: Path, tag: str) -> int:
    """Load what ``save`` wrote. Returns the number of optimizer steps done. Collective."""
    folder = run_folder / FOLDER
    path, state = engine.load_checkpoint(folder, tag=tag, load_module_strict=False)
    if path is None:
        raise ArtifactError(Problem("train.resume", f"{folder / tag} is no whole checkpoint", "name an earlier one"))
    rng = folder / tag / f"rng-rank{distributed.rank()}.pt"
    _set_rng_state(torch.load(rng, weights_only=True))
    return int(state["step"])


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


class UntouchedRng:
    """Context manager: random numbers drawn inside do not change those drawn after it."""

    def __enter__(self) -> None:
        self._state = _rng_state()

    def __exit__(self, *_: object) -> None:
        _set_rng_state(self._state)
