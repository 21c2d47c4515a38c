"""What ``artifact.path`` may mean, and what is missing in such a folder, by the names of its files alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from glmexp.config.entries import TRAINS
from glmexp.config.errors import Problem
from glmexp.config.facts import Facts
from glmexp.config.families import FAMILIES
from glmexp.config.folders import WEIGHTS, read
from glmexp.config.inherit import CARD, CARD_SECTIONS, CHECKPOINTS, best_trial, card_sections, run_of
from glmexp.config.schema import RunConfig

ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LATEST, STATES = "latest", "*mp_rank_*_model_states.pt"
"""Of a DeepSpeed checkpoint: the file that names the newest one, and those with its parameters."""
RECOGNISED = (
    f"a folder with {CARD} (or its run folder), a run's {CHECKPOINTS}/, a DeepSpeed checkpoint (global_step*/ or "
    f"mp_rank_00_model_states.pt), a folder with model.safetensors or {ADAPTER}"
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def check(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """The folder is one of those, and whole as far as names tell."""
    named = config.artifact.path
    if named is None or config.entry.name in TRAINS or not Path(named).expanduser().is_dir():
        return
    path = Path(named).expanduser().absolute()
    card = next((one for one in (path, path / "artifact") if (one / CARD).is_file()), None)
    if best_trial(path) is not None:
        return  # a sweep, which is said elsewhere
    if card is not None:
        yield from _card(card)
    elif run_of(path) is not None or _of_deepspeed(path):
        return
    elif (path / ADAPTER).is_file():
        yield from _adapter(path, config)
    elif not any(any(path.glob(kind)) for kind in WEIGHTS):
        yield no_pickle(path, "holds nothing that can be loaded", RECOGNISED)


def no_pickle(path: Path, lack: str, way: str = "name a run folder or its artifact folder") -> Problem:
    """What to say of a folder that ``lack``s something; where its weights are pickles, that they were not loaded."""
    pickles = [file.name for kind in _PICKLES for file in sorted(path.glob(kind))]
    if not pickles:
        return Problem("artifact.path", f"{path} {lack}", way)
    return Problem(
        "artifact.path",
        f"{path} {lack}, and {pickles[0]} is a pickle, which could run code: it was not loaded",
        "safetensors is wanted: let the program that wrote it save as safetensors; or name an artifact folder",
    )


def _card(folder: Path) -> Iterator[Problem]:
    found = card_sections(read(folder / CARD) or {})
    lacking = [name for name in CARD_SECTIONS if name not in found]
    if lacking:
        yield Problem(str(folder / CARD), f"is no card: it names no {', '.join(lacking)}", "restore the file")
    elif (folder / ADAPTER).is_file() and not (folder / ADAPTER_WEIGHTS).is_file():
        yield Problem("artifact.path", f"{folder} holds no {ADAPTER_WEIGHTS}", "copy the whole folder of the artifact")


def _adapter(path: Path, config: RunConfig) -> Iterator[Problem]:
    """A folder of PEFT alone, on the base that ``model`` names."""
    if not (path / ADAPTER_WEIGHTS).is_file():
        yield no_pickle(path, f"holds no {ADAPTER_WEIGHTS}")
        return
    targets = (read(path / ADAPTER) or {}).get("target_modules")
    names = FAMILIES[config.model.family].linear_modules
    strange = [one for one in targets if one.rsplit(".", 1)[-1] not in names] if isinstance(targets, list) else []
    if strange:
        yield Problem(
            "artifact.path",
            f"{path} is an adapter of {', '.join(strange)}, which {config.model.family} has not",
            "model=OPTION and model.path=FOLDER of the base that it was trained on",
        )


def _of_deepspeed(path: Path) -> bool:
    return (path / LATEST).is_file() or any(path.glob(STATES)) or any(path.glob("global_step*"))
