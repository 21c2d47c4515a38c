"""The command line: flags, and overrides in Hydra's grammar. Mistakes become Problems."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.nearest import keys, nearest, shipped_options
from glmexp.config.quoting import for_shell, quoted

_LOCAL_RANK = re.compile(r"--local[_-]rank(=.*)?")
_HARMLESS = re.compile(r"[^\x00-\x7f]|[~&;!^<>`]")
_KEY = re.compile(r"(\+\+|\+|~)?([A-Za-z_$][\w$-]*)([./@:][\w$-]+)*")
HYDRA_KEYS = ("hydra.searchpath", "hydra.sweep.dir", "hydra.sweeper.params")
"""What may be set of Hydra's own configuration: the rest has no effect here."""


@dataclass(frozen=True)
class Arguments:
    """What was asked for."""

    overrides: tuple[str, ...]
    """As typed, in order."""
    multirun: bool = False
    config_dir: Path | None = None
    show: str | None = None
    """``job``, ``hydra`` or ``all``: print that configuration and run nothing."""
    package: str | None = None
    resolve: bool = False
    info: str | None = None
    hydra_help: bool = False
    shell_completion: bool = False


@dataclass(frozen=True)
class Given:
    """One override, parsed."""

    override: Override
    text: str
    """As typed."""

    @property
    def key(self) -> str:
        """Group (with its package, where one is named) or dotted key, without ``+`` and ``~``."""
        package = self.override.package
        return self.override.key_or_group if package is None else f"{self.override.key_or_group}@{package}"

    @property
    def value_text(self) -> str:
        """What stands after the first ``=``, as Hydra has to read it."""
        line = self.override.input_line or ""
        return line.split("=", 1)[1] if "=" in line else ""

    @property
    def deletes(self) -> bool:
        """``~key``."""
        return self.override.type is OverrideType.DEL

    @property
    def sweeps(self) -> bool:
        """Holds several values, one a trial."""
        return bool(self.override.is_sweep_override())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(Problem("command line", message, "python -m glmexp --help shows flags and examples"))


def parse(argv: Sequence[str]) -> Arguments:
    """Flags and overrides of ``argv``. Raises ConfigError for flags that there are not."""
    parser = get_args_parser()
    parser.__class__ = _Parser
    flags, unknown = parser.parse_known_intermixed_args(list(_without_local_rank(argv)))
    problems = [_unknown_flag(flag) for flag in unknown]
    for name in ("config_path", "config_name", "experimental_rerun"):
        if getattr(flags, name) is not None:
            flag = "--" + name.replace("_", "-")
            problems.append(Problem(flag, "is not supported", "--config-dir DIR adds options and experiments"))
    folder = None if flags.config_dir is None else Path(flags.config_dir).expanduser().absolute()
    if folder is not None and not folder.is_dir():
        problems.append(Problem("--config-dir", f"{flags.config_dir} is no folder", "name a folder with YAML files"))
    if flags.resolve and flags.cfg is None:
        problems.append(Problem("--resolve", "has no effect without --cfg", "--cfg job --resolve"))
    if flags.multirun and (flags.cfg is not None or flags.info is not None):
        problems.append(Problem("-m", "--cfg and --info show one configuration, not a sweep", "leave out -m"))
    if flags.package is not None and flags.cfg is None:
        problems.append(Problem("--package", "has no effect without --cfg", "--cfg job --package method"))
    if problems:
        raise ConfigError(*problems)
    return Arguments(
        overrides=tuple(flags.overrides),
        multirun=flags.multirun,
        config_dir=folder,
        show=flags.cfg,
        package=flags.package,
        resolve=flags.resolve,
        info=flags.info,
        hydra_help=flags.hydra_help,
        shell_completion=flags.shell_completion,
    )


def _without_local_rank(argv: Iterable[str]) -> Iterable[str]:
    """Launchers add ``--local_rank=N`` or ``--local-rank N`` to the arguments; LOCAL_RANK says the same."""
    words = iter(argv)
    for word in words:
        match = _LOCAL_RANK.fullmatch(word)
        if match is None:
            yield word
        elif match[1] is None:
            next(words, None)


def _unknown_flag(flag: str) -> Problem:
    name, _, value = flag.lstrip("-").partition("=")
    guesses = nearest(name.replace("-", "_"), list(keys()))
    fix = f"options are written KEY=VALUE: {guesses[0]}={value or '...'}" if guesses else "python -m glmexp --help"
    return Problem(flag, "there is no such flag", fix)


def understand(overrides: Iterable[str], loader: Any, multirun: bool) -> tuple[list[Given], list[Problem]]:
    """Parse each override by itself, so that all mistakes are found, and none hides another."""
    parser = OverridesParser.create(config_loader=loader)
    given: list[Given] = []
    problems: list[Problem] = []
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not _KEY.fullmatch(key) or not (equals or text.startswith("~")):
            problems.append(_no_override(text))
            continue
        try:
            one = Given(_parsed(parser, text), text)
        except HydraException:
            problems.append(_grammar_problem(text))
            continue
        if one.sweeps and not multirun:
            problems.append(_sweep_without_multirun(one))
        else:
            given.append(one)
    return given, [*problems, *_twice(given)]


def _parsed(parser: OverridesParser, text: str) -> Override:
    """Outside of quotes Hydra's grammar knows few signs. Those that mean nothing in it (~ & ; letters beyond ASCII) are
    quoted here; text with # or with signs that do mean something is left to the user to quote."""
    try:
        return parser.parse_overrides([text])[0]
    except HydraException:
        key, equals, value = text.partition("=")
        harmless = _HARMLESS.sub("x", value)
        if not equals or harmless == value:
            raise
        shape = parser.parse_overrides([f"{key}={harmless}"])[0]
        found = shape.value() if shape.value_type is ValueType.ELEMENT else None
        if isinstance(found, str):
            return parser.parse_overrides([f"{key}={quoted(value)}"])[0]
        if isinstance(found, list) and all(isinstance(one, str) for one in found) and not re.search(r"['\"\\]", value):
            return parser.parse_overrides([f"{key}={_quoted_list(value)}"])[0]
        raise


def _quoted_list(value: str) -> str:
    """``[a,b]`` with its texts in quotes, those that have some put anew."""
    texts = [re.sub(r"(['\"])(.*)\1", r"\2", one.strip()) for one in value[1:-1].split(",")]
    return f"[{','.join(map(quoted, texts))}]"


def _grammar_problem(text: str) -> Problem:
    key, _, value = text.partition("=")
    inner = quoted(value)
    if value.startswith("[") and value.endswith("]"):
        inner = _quoted_list(value)
    return Problem(
        key.lstrip("+~"),
        f"the value {value} holds signs that Hydra's override grammar uses (= , ( ) [ ] {{ }} : # or quotes)",
        f"put quotes inside of the shell's: {for_shell(f'{key}={inner}')}",
    )


def _no_override(text: str) -> Problem:
    key, equals, _ = text.partition("=")
    if equals:
        return Problem(text, f"{key!r} is no key", "write KEY=VALUE; keys are names with dots between them")
    options = [f"{group}={text}" for group, names in shipped_options().items() if text in names]
    fix = f"did you mean {' or '.join(options)}?" if options else "write KEY=VALUE; --help shows examples"
    return Problem(text, "is no override", fix)


def _sweep_without_multirun(one: Given) -> Problem:
    value = one.value_text
    ways = [f"add -m for one run each ({one.text} -m)"]
    if one.override.value_type is ValueType.SIMPLE_CHOICE_SWEEP:
        ways = [
            f"as text with commas in it: {for_shell(f'{one.key}={quoted(value)}')}",
            f"as a list: {for_shell(f'{one.key}=[{value}]')}",
            *ways,
        ]
    return Problem(one.key, f"{value} is several values, and this is one run", "; or ".join(ways))


def _twice(given: list[Given]) -> Iterable[Problem]:
    seen: dict[str, list[Given]] = {}
    for one in given:
        seen.setdefault(one.key, []).append(one)
    for key, several in seen.items():
        if len(several) > 1:
            words = " and ".join(one.text for one in several)
            joined = f", or as a list: eval=[{','.join(one.value_text for one in several)}]" if key == "eval" else ""
            yield Problem(key, f"is given {len(several)} times: {words}", f"leave one{joined}")
