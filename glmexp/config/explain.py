"""One option told in full: meaning, unit, range, the value of each option of its group, and who set it."""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import yaml

from glmexp.config import registry
from glmexp.config.ds_config import TABLE
from glmexp.config.errors import ConfigError, Problem
from glmexp.config.help import field_docs
from glmexp.config.load import describe, dump
from glmexp.config.memory import BYTES
from glmexp.config.nearest import conf_folder, keys, shipped_options, unknown_key
from glmexp.config.schema import Bound, EvalSection, RunConfig

_UNITS = {
    r"_s$": "seconds",
    r"_bytes$": "bytes",
    r"(_steps|\.every)$": "optimizer steps",
    r"batch_size$": "rows",
    r"(max_length|_tokens|max_positions)$": "tokens",
    r"epochs$": "passes over the data",
    r"grad_accum$": "micro batches",
    r"(nproc|partition_size)$": "ranks",
    r"(_workers|threads)$": "processes or threads",
}
"""End of a key to the unit of its number, where the field's range does not name one."""


def explain(key: str, config: RunConfig, origins: Mapping[str, str]) -> str:
    """The text for a dotted key, or a list of keys for a section. Raises ConfigError with the nearest key.

    ``origins``: dotted key to the file or override that set it, as ``compose.Request`` has it.
    """
    known = keys()
    below = [one for one in known if one.startswith(f"{key}.")]
    if key not in known and below:
        return "\n".join([f"{key}:", *(f"  {one:<46} {hint_of(one, config)[1].splitlines()[0]}" for one in below)])
    if key not in known:
        problem = unknown_key(key, "...")
        raise ConfigError(Problem("doctor.explain", f"{key}: {problem.message}", problem.fix))
    hint, doc = hint_of(key, config)
    value = _at(dump(config), key)
    head = f"{key} = {_shown(value)}" if value is not _ABSENT else f"{key}   (only with {' or '.join(known[key])})"
    rows = {
        "meaning": " ".join(doc.split()),
        "unit": _unit(key, hint, value, config),
        "allowed": describe(hint),
        "default": _defaults(key),
        "set by": _set_by(key, value, origins),
        "DeepSpeed": ", ".join(row.path for row in TABLE if row.key == key),
    }
    return "\n".join([head, *(f"  {name:<10}{text}" for name, text in rows.items() if text)])


_ABSENT = object()


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return _ABSENT
        tree = tree[part]
    return tree


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)


def hint_of(key: str, config: RunConfig) -> tuple[Any, str]:
    """Annotation and docstring of a key's field; of the chosen option's, where several options have the key."""
    section, *path = key.split(".")
    if section in ("method", "tracker"):
        options = keys()[key]
        chosen = f"{section}={getattr(config, section).name}"
        cls: Any = registry.option(section, (chosen if chosen in options else options[0]).partition("=")[2])
    elif section == "eval" and len(path) > 1:
        cls = registry.option("eval", path.pop(0))
    else:
        cls = EvalSection if section == "eval" else typing.get_type_hints(RunConfig)[section]
    for part in path[:-1]:
        cls = typing.get_type_hints(cls)[part]
    return typing.get_type_hints(cls, include_extras=True)[path[-1]], field_docs(cls)[path[-1]]


def unit_of(key: str, hint: Any) -> str:
    """The unit of an option's number; empty for what is no number."""
    unit = next((bound.unit for bound in _bounds(hint) if bound.unit), "")
    if not unit and any(kind in (int, float) for kind in _kinds(hint)):
        unit = next((words for pattern, words in _UNITS.items() if re.search(pattern, key)), "a plain number")
    return unit


def _unit(key: str, hint: Any, value: Any, config: RunConfig) -> str:
    """The unit, and for elements what the value is in bytes."""
    unit = unit_of(key, hint)
    if unit != "elements":
        return unit or "none"
    dtype = config.precision.dtype
    if key == "zero.reduce_bucket_size":
        dtype = config.zero.communication_data_type or dtype
    elif key == "zero.sub_group_size":
        dtype = "fp32"  # the optimizer's masters
    size = BYTES[dtype]
    if not isinstance(value, int):
        return f"elements of {size} bytes ({dtype})"
    return f"elements; here {value:,} x {size} bytes ({dtype}) = {value * size:,} bytes = {_rounded(value * size)}"


def _rounded(number: int) -> str:
    size, words = float(number), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(words) > 1:
        size, words = size / 1024, words[1:]
    return f"{size:.4g} {words[0]}"


def _arms(hint: Any) -> Iterator[Any]:
    """An annotation without its unions."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for arm in typing.get_args(hint):
            yield from _arms(arm)
    else:
        yield hint


def _bounds(hint: Any) -> Iterator[Bound]:
    for arm in _arms(hint):
        if typing.get_origin(arm) is Annotated:
            yield from (one for one in typing.get_args(arm)[1:] if isinstance(one, Bound))


def _kinds(hint: Any) -> Iterator[Any]:
    for arm in _arms(hint):
        yield typing.get_args(arm)[0] if typing.get_origin(arm) is Annotated else arm


def defaults_of(key: str) -> dict[str, str]:
    """Option of the key's group -> the value that its file gives the key; under ``config`` that of conf/config.yaml."""
    section, *_ = key.split(".")
    found = {}
    for option in shipped_options().get(section, ()):
        tree = _parsed((conf_folder() / section / f"{option}.yaml").read_text(encoding="utf-8")) or {}
        for candidate in ({section: tree}, tree):  # eval hooks stand under their own name
            value = _at(candidate, key)
            if value is not _ABSENT:
                found[option] = _shown(value)
                break
    if not found:
        value = _at(_parsed((conf_folder() / "config.yaml").read_text(encoding="utf-8")), key)
        return {} if value is _ABSENT else {"config": _shown(value)}
    return found


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """A file of options, which is read once for each of its keys."""
    return yaml.safe_load(text)


def _defaults(key: str) -> str:
    """The value in each file of the key's group: ``stage0 null, stage1 200000000``."""
    section, *_ = key.split(".")
    found = defaults_of(key)
    if not found:
        return "set by no file under conf/"
    if list(found) == ["config"]:
        return f"{found['config']} (conf/config.yaml)"
    if len(set(found.values())) == 1:
        return f"{next(iter(found.values()))} (conf/{section}/{','.join(found)}.yaml)"
    return ", ".join(f"{option} {value}" for option, value in found.items())


def _set_by(key: str, value: Any, origins: Mapping[str, str]) -> str:
    if value is _ABSENT:
        return ""
    below = sorted({words for one, words in origins.items() if one.startswith(f"{key}.")})
    words = origins.get(key) or ", ".join(below)
    return words or "derived from other options"
