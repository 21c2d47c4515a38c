"""Rules about the data section and entry=inspect (see ``rules``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glmexp.config.entries import TRAINS
from glmexp.config.errors import Problem
from glmexp.config.facts import Facts
from glmexp.config.families import FAMILIES
from glmexp.config.schema import EvalSection, RunConfig

BUILTIN = "builtin:"
HUB = "hub:"
SHIPPED_PROMPTS = "builtin:prompts.jsonl"
COLUMN_USERS: dict[str, tuple[str, ...]] = {
    "prompt": ("alpaca", "adgen"),
    "input": ("alpaca", "adgen"),
    "answer": ("alpaca", "adgen"),
    "system": ("alpaca", "adgen", "sharegpt", "messages"),
    "history": ("alpaca", "adgen"),
    "messages": ("sharegpt", "messages"),
    "tools": ("sharegpt", "messages"),
}
"""Key of data.columns to the formats in which it is read."""


def files(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Files that an entry needs and that are not named or not there; an encoding that does not exist."""
    data, entry = config.data, config.entry.name
    if data.holdout is not None and data.eval_file is not None:
        yield Problem(
            "data.holdout",
            f"{data.holdout} rows and eval_file={data.eval_file} both say what is held out",
            "give one of them; the other one null",
        )
    if entry in TRAINS and data.train_file is None:
        yield Problem("data.train_file", f"is null, and entry={entry} needs rows", "data.train_file=FILE")
    if entry == "evaluate" and needs_rows(config.eval) and data.eval_file is None and data.holdout is None:
        asking = ", ".join(name for name, hook in config.eval.hooks.items() if not brings_prompts(hook))
        yield Problem("data.eval_file", f"is null, and eval={asking} needs held-out rows", "data.eval_file=FILE")
    if entry == "inspect" and data.eval_file is None and data.train_file is None:
        yield Problem("data.train_file", "is null, and entry=inspect needs rows", "data.train_file=FILE")
    scored = ("eval_file",) if needs_rows(config.eval) else ()
    needed = {"evaluate": scored, "export": (), "bench": (), "generate": ()}.get(entry, ("train_file", "eval_file"))
    for name in needed:
        path = getattr(data, name)
        given = path is not None and not path.startswith((BUILTIN, HUB))
        if given and not Path(path).expanduser().exists():
            yield Problem(
                f"data.{name}",
                f"{Path(path).expanduser().absolute()} is not there",
                "check the path; it is relative to this folder",
            )
    if data.encoding is not None and not _known_encoding(data.encoding):
        yield Problem("data.encoding", f"{data.encoding!r} is no text encoding", "gb18030, big5, utf-16, latin-1, ...")


def brings_prompts(hook: Any) -> bool:
    """The eval hook answers a file of its own and needs no held-out rows."""
    return getattr(hook, "prompts_file", None) is not None


def needs_rows(section: EvalSection) -> bool:
    """Some hook scores held-out rows."""
    return not all(brings_prompts(hook) for hook in section.hooks.values())


def prompts(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """A prompts file that is not there."""
    for name, hook in config.eval.hooks.items():
        path = getattr(hook, "prompts_file", None)
        shipped = path is not None and path.startswith(BUILTIN)
        if path is not None and path != SHIPPED_PROMPTS and (shipped or not Path(path).expanduser().is_file()):
            key = f"eval.{name}.prompts_file"
            yield Problem(key, f"{path} is no file", f"name a JSON lines file, or {SHIPPED_PROMPTS}")


def _known_encoding(name: str) -> bool:
    try:
        "a".encode(name)  # codecs.lookup alone also finds base64 and the like
    except LookupError:
        return False
    return True


def without_effect(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Keys that this format, batch form or entry does not read."""
    data = config.data
    for key, formats in COLUMN_USERS.items():
        name = getattr(data.columns, key)
        if name is not None and data.format is not None and data.format not in formats:
            yield Problem(
                f"data.columns.{key}",
                f"{name!r} without effect: data.format={data.format} has no such column",
                f"leave it out, or data.format={formats[0]}",
            )
    if data.packing and data.group_by_length:
        yield Problem(
            "data.group_by_length", "without effect: data.packing fills all rows up", "data.group_by_length=false"
        )
    if data.packing and config.method.name == "ptuning" and not FAMILIES[config.model.family].native_prefix:
        yield Problem(
            "data.packing",
            f"method=ptuning on {config.model.family} puts its prefix into the key-value cache, and with a cache "
            "packed examples would see each other",
            "data.packing=false, or method=lora",
        )
    if data.num_workers == 0 and "data.prefetch" in facts.explicit:
        yield Problem("data.prefetch", "without effect: data.num_workers is 0", "data.num_workers=1")
    if config.entry.name == "evaluate" and config.eval.hooks and not needs_rows(config.eval):
        for key in ("eval_file", "holdout"):
            if f"data.{key}" in facts.explicit and getattr(data, key) is not None:
                found = f"{getattr(data, key)} without effect: no hook of eval={','.join(config.eval.hooks)} reads rows"
                yield Problem(f"data.{key}", found, "leave it out, or eval=[loss,...]")
    html = config.inspect.html
    if config.entry.name == "inspect" and html is not None and not Path(html).expanduser().absolute().parent.is_dir():
        folder = Path(html).expanduser().absolute().parent
        yield Problem("inspect.html", f"{folder} is no folder", "a file in a folder that is there")
