"""A resumed run and an artifact bring their own configuration: it stands wherever the user says nothing.

``train.resume`` goes on with the run's ``config.yaml``; ``artifact.path`` brings the model and the method of its
``glmexp.json``. What the user says must agree where it decides what is trained, and wins elsewhere.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmexp.config.entries import GOES_ON, SERVES, TRAINS
from glmexp.config.errors import ConfigError, Problem
from glmexp.config.hydra_tree import Origin, Tree
from glmexp.config.load import REGISTERED, flatten, shown
from glmexp.config.redact import HIDDEN
from glmexp.config.schema import PrecisionSection, TrainSection

CONFIG = "config.yaml"
CARD = "glmexp.json"
CARD_SECTIONS = ("model", "method")
CHECKPOINTS = "checkpoints"
SWEEP_TABLE = "sweep.csv"
WHOLE = ("full16", "exported")
"""Kinds of artifacts that hold a whole model."""
MOVABLE = "model.path"
"""May be named anew beside ``artifact.path``: whether it is the same base its weights tell."""
IDENTITY = {"model": "name", "method": "name", "precision": "dtype", "data": "name", "zero": "stage"}
"""Section to the key that tells its options apart."""
RESUMED = (
    "run",
    "model",
    "method",
    "zero",
    "offload",
    "precision",
    "data",
    "optim",
    "train",
    "gather",
    "eval",
    "tracker",
)
"""Sections that a resumed run brings; the launcher belongs to the machine, and deepspeed.config_file is in them."""
FIXED = ("model", "method", "precision", "data", "optim")
"""Sections that decide what is trained."""
FIXED_KEYS = ("train.batch_size", "train.seed")
FREE_KEYS = (
    "data.num_workers",
    "data.prefetch",
    "data.prepare_workers",
    "data.cache_dir",
    "data.eval_file",
    "data.on_error",
    "data.encoding",
    "data.train_file",
    "model.path",
)
"""Keys of the fixed sections that do not change the training rows or the base, only where they are read: what lies
there is held against the checkpoint by its fingerprint."""
OWN_KEYS = ("run.dir", "run.overwrite", "train.resume", "train.stop_after", "train.stop_after_s", "train.grad_accum")
"""Keys that a resumed run does not bring: the folder is its own, a planned stop is over, and the accumulation follows
from the batch, which stays, and the number of ranks, which may change."""
AUTO = "auto"
"""``train.resume``: look for the run."""


@dataclass(frozen=True)
class Saved:
    """A configuration in a file."""

    file: Path
    sections: dict[str, Any]
    words: str
    """What it is: ``the resumed run`` or ``the artifact``."""
    way_out: str
    free: tuple[str, ...] = ()
    """Sections in which the user's choice stands."""

    @property
    def ranks(self) -> int | None:
        """Ranks that a run was trained with, from its batch arithmetic."""
        train = self.sections.get("train", {})
        micro, accum, batch = (train.get(key) for key in ("micro_batch_size", "grad_accum", "batch_size"))
        return batch // (micro * accum) if micro and accum and batch else None


def saved_by(values: Mapping[str, Any]) -> Saved | None:
    """What ``train.resume`` or ``artifact.path`` brings. Paths without such a file are left to the rules."""
    resume = _text(values, "train", "resume")
    if resume not in (None, AUTO) and _text(values, "entry", "name") in GOES_ON:
        start = Path(str(resume)).expanduser().absolute()
        for folder in (start, *start.parents):
            if (folder / CONFIG).is_file():
                sections = {name: section for name, section in _mapping(folder / CONFIG).items() if name in RESUMED}
                return Saved(folder / CONFIG, sections, "the resumed run", "or a new run without train.resume")
    artifact, entry = _text(values, "artifact", "path"), _text(values, "entry", "name")
    free = ("precision",) if entry in SERVES else ()
    if artifact is not None and entry not in TRAINS:
        start = Path(artifact).expanduser().absolute()
        for folder in (start, start / "artifact"):
            if (folder / CARD).is_file():
                card = _mapping(folder / CARD)
                sections = card_sections(card)
                if "model" in sections and card.get("gather") in WHOLE:  # its base may be gone: it needs none
                    sections["model"] = {**sections["model"], **own_weights(folder)}
                if free and isinstance(card.get("dtype"), str):
                    names = [field.name for field in dataclasses.fields(PrecisionSection)]
                    sections["precision"] = {**dict.fromkeys(names), "dtype": card["dtype"]}
                return Saved(folder / CARD, sections, "the artifact", "or name another artifact", free)
        run = run_of(start)
        if run is not None:
            saved = _mapping(run / CONFIG)
            sections = {name: saved[name] for name in ("model", "method", "precision") if name in saved}
            return Saved(run / CONFIG, sections, "the run of this checkpoint", "or name another checkpoint", free)
    return None


def card_sections(card: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of an artifact's card that say of which option they are: a whole card has model and method."""
    named = {name: card[name] for name in CARD_SECTIONS if isinstance(card.get(name), dict)}
    return {name: section for name, section in named.items() if isinstance(section.get(IDENTITY[name]), str)}


def entry_of(path: Path) -> str | None:
    """What the run that a path lies in did: its ``entry.name``; None where it lies in no run."""
    start = path.expanduser().absolute()
    for folder in (start, *start.parents):
        if (folder / CONFIG).is_file():
            return _text(_mapping(folder / CONFIG), "entry", "name")
    return None


def best_trial(path: Path) -> Path | None:
    """The first trial in the table of a sweep, which is its best; None where the path is no sweep's folder."""
    table = path.expanduser() / SWEEP_TABLE
    if not table.is_file():
        return None
    with table.open(encoding="utf-8", newline="") as file:
        first = next(csv.DictReader(file), None)
    return None if first is None else path / first["folder"]


def run_of(path: Path) -> Path | None:
    """The run folder of a checkpoint or of a run with checkpoints; None where the path is neither."""
    for run in (path, path.parent, path.parent.parent):
        if (run / CONFIG).is_file() and (run / CHECKPOINTS).is_dir():
            inside = path == run or path.is_relative_to(run / CHECKPOINTS)
            return run if inside else None
    return None


def own_weights(folder: Path) -> dict[str, Any]:
    """Keys of the model section for a folder that holds a whole model with its tokenizer."""
    return {"path": str(folder), "init": "pretrained", "add_tokens": []}


def _text(values: Mapping[str, Any], section: str, name: str) -> str | None:
    part = values.get(section)
    value = part.get(name) if isinstance(part, dict) else None
    return value if isinstance(value, str) else None


def _mapping(path: Path) -> dict[str, Any]:
    """What a run wrote as YAML or JSON, by the suffix."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        kind = path.suffix.lstrip(".").upper()
        raise ConfigError(Problem(str(path), f"is no valid {kind}: {error}", "restore what the run wrote")) from error
    return tree if isinstance(tree, dict) else {}


def inherit(tree: Tree, saved: Saved, explicit: Collection[str], chosen: Mapping[str, str]) -> list[Problem]:
    """Put the saved sections into ``tree`` below the user's own words; what contradicts them is a problem."""
    problems: list[Problem] = []
    for section, values in saved.sections.items():
        now = tree.values.get(section)
        if not isinstance(now, dict) or not isinstance(values, dict):
            continue
        if section in chosen and _other_option(section, now, values):
            if section in IDENTITY and section in FIXED and section not in saved.free:
                problems.append(_contradiction(f"{section}.{IDENTITY[section]}", now, values, chosen[section], saved))
            continue
        leaves = flatten(now, section)
        own = {key: leaves[key] for key in explicit if key in leaves}
        problems.extend(_contradictions(own, flatten(values, section), tree, saved))
        problems.extend(
            Problem(key, f"is a secret that {saved.file} was written without", f"give it again: {key}=...")
            for key, value in flatten(values, section).items()
            if HIDDEN in str(value) and key not in own
        )
        _put(tree, section, values, own, saved)
    return problems


def _other_option(section: str, now: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether two sections come from different options; of sections without an identity that cannot be said."""
    key = IDENTITY.get(section, "name")
    return key not in now or now[key] != saved.get(key)


def _put(tree: Tree, section: str, values: Mapping[str, Any], own: Mapping[str, Any], saved: Saved) -> None:
    """The saved section with the user's leaves on top."""
    now = tree.values[section]
    merged = copy.deepcopy(dict(values))
    identity = IDENTITY.get(section, "name")
    same = now.get(identity) == values.get(identity)
    if section != "eval" and (same or section not in REGISTERED):
        merged = {**now, **merged}  # keys that are younger than the saved file
    before = flatten(now, section)
    for key in (key for key in OWN_KEYS if key in before):
        own = {key: before[key], **own}
    for key in flatten(merged, section):
        if key not in own:
            tree.origins[key] = Origin(str(saved.file), default=True)
            tree.interpolated.pop(key, None)
    for key, value in own.items():
        place = merged
        *folders, name = key.split(".")[1:]
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value
    tree.values[section] = merged


def _contradictions(
    own: Mapping[str, Any], saved_leaves: Mapping[str, Any], tree: Tree, saved: Saved
) -> Iterator[Problem]:
    for key, value in own.items():
        moved = (key == MOVABLE and saved.words != "the resumed run") or key.split(".")[0] in saved.free
        if _fixed(key) and not moved and key in saved_leaves and _plain(value) != _plain(saved_leaves[key]):
            origin = tree.origins[key].words if key in tree.origins else "the command line"
            yield Problem(
                key,
                f"{shown(value)} (from {origin}), but {saved.words} has {shown(saved_leaves[key])} (in {saved.file})",
                f"leave it out, {saved.way_out}",
            )


def _fixed(key: str) -> bool:
    """Another value would train something else."""
    return key in FIXED_KEYS or (key.split(".")[0] in FIXED and key not in FREE_KEYS)


def changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What decides the training and differs between two whole configurations: ``optim.lr: 0.001, it was 0.0003``."""
    before, after = flatten(saved), flatten(now)
    keys = [key for key in {**before, **after} if _fixed(key)]
    return [
        f"{key}: {shown(after.get(key))}, it was {shown(before.get(key))}"
        for key in keys
        if _plain(after.get(key)) != _plain(before.get(key))
    ]


def refitted(train: TrainSection, saved: Saved, ranks: int, explicit: Collection[str]) -> TrainSection:
    """The resumed run's batch on another number of ranks: the largest micro batch, up to the saved one, that fits."""
    micro, batch = train.micro_batch_size, train.batch_size
    said = "train.micro_batch_size" in explicit or "train.batch_size" in explicit
    if said or saved.ranks in (None, ranks) or micro is None or batch is None or batch % ranks:
        return train
    if train.grad_accum is not None:
        return dataclasses.replace(train, micro_batch_size=None)
    fitting = (size for size in range(micro, 0, -1) if batch % (size * ranks) == 0)
    return dataclasses.replace(train, micro_batch_size=next(fitting))


def _contradiction(key: str, now: Mapping[str, Any], other: Mapping[str, Any], where: str, saved: Saved) -> Problem:
    leaf = key.split(".")[1]
    return Problem(
        key,
        f"{shown(now.get(leaf))} (from {where}), but {saved.words} has {shown(other.get(leaf))} (in {saved.file})",
        f"leave it out, {saved.way_out}",
    )


def _plain(value: Any) -> Any:
    """For comparing: numbers in quotes as numbers, a lone item as its list, paths of files that are there as whole."""
    if isinstance(value, list):
        return [_plain(one) for one in value] if len(value) != 1 else _plain(value[0])
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return value
    try:
        return float(value)
    except ValueError:
        path = Path(str(value)).expanduser()
        return str(path.absolute()) if path.exists() else value
