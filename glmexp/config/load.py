"""From plain nested dicts to typed sections and back: every value is converted and checked, all problems at once."""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from glmexp.config import registry
from glmexp.config.errors import ConfigError, Problem
from glmexp.config.help import meaning
from glmexp.config.nearest import choice, unknown_key
from glmexp.config.redact import redacted, restored
from glmexp.config.schema import Bound, RunConfig

MISSING = "???"
"""Hydra's mark for a value that the user has to give."""
BROKEN = object()
"""Stands in a tree where a value could not be computed and a problem says so already."""
REGISTERED = ("method", "tracker")
"""Sections whose dataclass is chosen by their ``name``."""


class UnusableValueError(Exception):
    """A rule reads a value that is a problem already (see ``examine``)."""


class BadValueError(Exception):
    """The value does not fit its field; the text says what fits."""


@dataclasses.dataclass(frozen=True)
class Source:
    """What is known of where values came from, for messages and for text that looked like a number."""

    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Dotted key to words such as ``the command line`` or ``conf/zero/stage2.yaml``."""
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Dotted key to the characters that the user typed."""

    def suffix(self, key: str) -> str:
        """``" (from the command line)"``, or nothing where it is not known."""
        deeper = [one for one in self.origins if one.startswith(f"{key}.")]
        if key not in self.origins and not deeper:
            return ""
        return f" (from {self.origins[key if key in self.origins else deeper[0]]})"

    def files(self, path: str) -> str:
        """``" in method/mine.yaml"``: all that set keys below ``path``, or nothing where it is not known."""
        found = sorted({text for key, text in self.origins.items() if key.startswith(f"{path}.")})
        return f" in {', '.join(found)}" if found else ""


def load(tree: Mapping[str, Any]) -> RunConfig:
    """The typed configuration of a plain tree, such as ``config.yaml`` holds. Raises ConfigError with all problems."""
    config, problems = examine(tree)
    if problems:
        raise ConfigError(*problems)
    return config


def dump(config: RunConfig) -> dict[str, Any]:
    """Plain nested dict; ``load(dump(config)) == config``."""
    tree = dataclasses.asdict(config)
    tree["eval"] = {"batch_size": tree["eval"]["batch_size"], **tree["eval"]["hooks"]}
    return tree


def write(config: RunConfig, path: Path) -> None:
    """Write ``config.yaml`` without secrets: to a temporary name first, so that no reader sees half a file."""
    import yaml

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(yaml.safe_dump(redacted(dump(config)), sort_keys=False, allow_unicode=True), encoding="utf-8")
    temporary.replace(path)


def read(path: Path) -> RunConfig:
    """Read what ``write`` wrote, in a process of that run with its secrets. Raises ConfigError that names the file."""
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(Problem(str(path), "is not there", "name the folder of a run")) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            Problem(str(path), f"is no valid YAML: {error}", "restore the file that the run wrote")
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(Problem(str(path), "holds no configuration", "name the folder of a run"))
    config, problems = examine(restored(tree), Source(dict.fromkeys(flatten(tree), str(path))))
    if problems:
        raise ConfigError(*problems)
    return config


def flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted key to leaf. An empty dict is a leaf."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and value:
            leaves.update(flatten(value, key))
        else:
            leaves[key] = value
    return leaves


def examine(tree: Mapping[str, Any], source: Source | None = None) -> tuple[RunConfig, list[Problem]]:
    """The typed configuration and every problem in it.

    Where a value is a problem, reading it from the returned configuration raises UnusableValueError, so that the
    rules across groups can still be checked on all the others.
    """
    return _Walk(source or Source()).run(tree)


def examine_section(name: str, cls: type, tree: Any, source: Source) -> tuple[Any, list[Problem]]:
    """One section alone, as ``examine`` treats it: of a tree whose other values are not yet decided."""
    walk = _Walk(source)
    return walk.section(cls, tree, name), walk.problems


class _Walk:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems: list[Problem] = []

    def run(self, tree: Mapping[str, Any]) -> tuple[RunConfig, list[Problem]]:
        hints = typing.get_type_hints(RunConfig, include_extras=True)
        self.unknown(tree, hints, "")
        sections: dict[str, Any] = {}
        for name, hint in hints.items():
            if name not in tree:
                self.problems.append(Problem(name, "the whole section is missing", f"choose an option: {name}=..."))
                continue
            try:
                sections[name] = self.one_section(name, hint, tree[name])
            except ConfigError as error:
                self.problems.extend(error.problems)
        return _partial(RunConfig, sections), self.problems

    def one_section(self, name: str, hint: Any, tree: Any) -> Any:
        if name == "eval":
            return self.eval_section(hint, tree)
        if name in REGISTERED:
            option = tree.get("name") if isinstance(tree, dict) else None
            if not isinstance(option, str):
                raise ConfigError(self.without_name(name, tree))
            return self.section(registry.option(name, option), tree, name)
        return self.section(hint, tree, name)

    def without_name(self, name: str, tree: Any) -> Problem:
        """A section whose dataclass cannot be told: no option was chosen, or a file took its keys away."""
        if isinstance(tree, dict) and tree:
            return Problem(f"{name}.name", f"is missing{self.source.files(name)}", choice(name))
        found = "an empty mapping" if tree == {} else f"{shown(tree)}, which is no section"
        return Problem(name, f"is {found}{self.source.suffix(name)}", choice(name))

    def eval_section(self, cls: Any, tree: Any) -> Any:
        """``batch_size`` and one dict a hook, each typed by the hook's own dataclass."""
        if not isinstance(tree, dict):
            told = f"{shown(tree)} is no section{self.source.suffix('eval')}"
            raise ConfigError(Problem("eval", told, "eval=[loss,generate] or eval=none"))
        hooks: dict[str, Any] = {}
        for name, settings in tree.items():
            if name == "batch_size":
                continue
            if not registry.known("eval", name):
                self.report_unknown({name: settings}, "eval")
                continue
            hook = registry.option("eval", name)
            if isinstance(settings, dict) and any(field.name == "name" for field in dataclasses.fields(hook)):
                settings = {"name": name, **settings}
            hooks[name] = self.section(hook, settings, f"eval.{name}")
        return self.section(cls, {**{k: v for k, v in tree.items() if k == "batch_size"}, "hooks": hooks}, "eval")

    def section(self, cls: type, tree: Any, path: str) -> Any:
        if not isinstance(tree, dict):
            if tree is not BROKEN:
                way = f"leave it out, or set keys below it: {path}.{next(iter(typing.get_type_hints(cls)))}, ..."
                self.problems.append(Problem(path, f"{shown(tree)} is no section{self.source.suffix(path)}", way))
            return _partial(cls, {})
        hints = typing.get_type_hints(cls, include_extras=True)
        self.unknown(tree, hints, path)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            key = f"{path}.{field.name}"
            hint = hints[field.name]
            if field.name not in tree:
                self.problems.append(self.absent(key, path, hint))
            elif dataclasses.is_dataclass(hint):
                values[field.name] = self.section(typing.cast(type, hint), tree[field.name], key)
            else:
                self.field(values, field.name, hint, tree[field.name], key)
        return _partial(cls, values)

    def field(self, values: dict[str, Any], name: str, hint: Any, value: Any, key: str) -> None:
        if value is BROKEN:
            return
        if value == MISSING:
            self.problems.append(Problem(key, f"must be set ({meaning(key)})", f"{key}=..."))
            return
        if typing.get_origin(hint) is dict and isinstance(value, dict):
            values[name] = {}
            for part, one in value.items():
                self.field(values[name], str(part), typing.get_args(hint)[1], one, f"{key}.{part}")
            return
        try:
            values[name] = convert(value, hint, self.source.texts.get(key))
        except BadValueError as error:
            allowed = str(error) or describe(hint)
            self.problems.append(
                Problem(key, f"{shown(value)} is not {allowed}{self.source.suffix(key)}", _guess(key, value, hint))
            )

    def absent(self, key: str, path: str, hint: Any) -> Problem:
        return Problem(key, f"is missing{self.source.files(path)}", f"set it to {describe(hint)}")

    def unknown(self, tree: Mapping[str, Any], hints: Mapping[str, Any], path: str) -> None:
        for name in tree:
            if name not in hints:
                self.report_unknown({name: tree[name]}, path)

    def report_unknown(self, tree: Mapping[str, Any], path: str) -> None:
        for key, value in flatten(tree, path).items():
            self.problems.append(unknown_key(key, value, self.source.suffix(key)))


def _partial(cls: type, values: dict[str, Any]) -> Any:
    """An instance, or where values are lacking one that raises UnusableValueError when they are read."""
    if all(field.name in values for field in dataclasses.fields(cls)):
        return cls(**values)

    def unusable(self: Any, name: str) -> Any:
        raise UnusableValueError(name)

    instance: Any = object.__new__(type(cls.__name__, (cls,), {"__getattr__": unusable}))
    instance.__dict__.update(values)
    return instance


def convert(value: Any, hint: Any, text: str | None = None) -> Any:
    """``value`` as the annotation ``hint`` wants it. Numbers in quotes and whole floats for integers are numbers."""
    bounds, hint = _unwrap(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = next(arm for arm in typing.get_args(hint) if arm is not type(None))
        return None if value is None else convert(value, inner, text)
    if hint is Any:
        return value
    if origin is Literal:
        return _word(value, typing.get_args(hint), text)
    if origin is list:
        return [convert(one, typing.get_args(hint)[0]) for one in (value if isinstance(value, list) else [value])]
    if origin is dict:
        if not isinstance(value, dict):
            raise BadValueError
        return {str(name): convert(one, typing.get_args(hint)[1]) for name, one in value.items()}
    if hint is bool:
        return _switch(value)
    if hint is int or hint is float:
        return _within(_number(value, hint), bounds)
    if hint is str:
        return _text(value, text)
    raise AssertionError(f"no conversion for the annotation {hint!r}")


def _unwrap(hint: Any) -> tuple[Bound, Any]:
    if typing.get_origin(hint) is Annotated:
        hint, *marks = typing.get_args(hint)
        return next((mark for mark in marks if isinstance(mark, Bound)), Bound()), hint
    return Bound(), hint


def _word(value: Any, words: tuple[Any, ...], text: str | None) -> Any:
    for word in words:
        if word in (value, text):
            return word
    raise BadValueError


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return bool(value == "true")
    raise BadValueError


def _number(value: Any, kind: type) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise BadValueError
    try:
        number = int(value) if isinstance(value, str) and kind is int else float(value)
    except ValueError:
        try:
            number = float(value)
        except ValueError as error:
            raise BadValueError from error
    if not math.isfinite(number):
        raise BadValueError
    if kind is float:
        return float(number)
    if isinstance(value, int):
        return value
    if number != int(number):
        raise BadValueError
    return int(number)


def _within(number: int | float, bound: Bound) -> int | float:
    fits = (
        (bound.low is None or number >= bound.low)
        and (bound.high is None or number <= bound.high)
        and (bound.above is None or number > bound.above)
        and (bound.below is None or number < bound.below)
    )
    if not fits:
        raise BadValueError
    return number


def _text(value: Any, text: str | None) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, (list, dict)):
        raise BadValueError
    if text is not None:
        return text
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise BadValueError(f'text: write it in quotes, "{value}"')


def describe(hint: Any) -> str:
    """What an annotation allows, in words: ``a number above 0, or null``."""
    bound, hint = _unwrap(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = next(arm for arm in typing.get_args(hint) if arm is not type(None))
        return f"{describe(inner)}, or null"
    if origin is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if origin is list:
        return f"a list, each {describe(typing.get_args(hint)[0])}"
    if origin is dict:
        return "a mapping of names to values"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
    limits = " and ".join(_limits(bound))
    return f"{words} {limits}" if limits else words


def _limits(bound: Bound) -> Iterator[str]:
    for word, limit in (
        ("of at least", bound.low),
        ("above", bound.above),
        ("of at most", bound.high),
        ("below", bound.below),
    ):
        if limit is not None:
            yield f"{word} {limit:g}"


def shown(value: Any) -> str:
    """A value as the user would write it."""
    words: dict[Any, str] = {None: "null"}
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return words[value]
    return repr(value)


def _guess(key: str, value: Any, hint: Any) -> str:
    """The nearest allowed word, for fields with words."""
    import difflib

    inner: Callable[[Any], Any] = lambda one: next((arm for arm in typing.get_args(one) if arm is not type(None)), one)  # noqa: E731
    words = typing.get_args(hint) if typing.get_origin(hint) is Literal else typing.get_args(inner(hint))
    near = difflib.get_close_matches(str(value), [word for word in words if isinstance(word, str)], n=1, cutoff=0.5)
    return f"{key}={near[0]}" if near else ""
