"""``--cfg``, ``--info``, ``--hydra-help`` and shell completion: what is composed, and from where. Runs nothing."""

from __future__ import annotations

import sys
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser

from glmexp.config import hydra_tree
from glmexp.config.arguments import Arguments, understand
from glmexp.config.compose import Machine, request
from glmexp.config.errors import EXIT_USER_MISTAKE, ConfigError, Problem
from glmexp.config.hydra_tree import PRIMARY, RecordingLoader
from glmexp.config.load import dump
from glmexp.config.redact import redacted


def show(arguments: Arguments, machine: Machine) -> int:
    """Print what a flag asks for; the exit code. Raises ConfigError where the overrides cannot be composed."""
    if arguments.show == "job":
        return _show_job(arguments, machine)
    with hydra_tree.hydra_for(arguments) as hydra:
        if arguments.shell_completion:
            hydra.shell_completion(config_name=PRIMARY, overrides=list(arguments.overrides))
        else:
            _show_with_hydra(hydra, arguments)
    return 0


def _show_with_hydra(hydra: Hydra, arguments: Arguments) -> None:
    handed = _handed(hydra, arguments)
    with hydra_tree.hydra_mistakes():
        if arguments.hydra_help:
            flags = get_args_parser().parse_args(["--hydra-help", *handed])
            hydra.hydra_help(config_name=PRIMARY, args_parser=get_args_parser(), args=flags)
        elif arguments.info is not None:
            hydra.show_info(arguments.info, config_name=PRIMARY, overrides=handed)
        else:
            hydra.show_cfg(PRIMARY, handed, arguments.show or "all", arguments.package, arguments.resolve)


def _show_job(arguments: Arguments, machine: Machine) -> int:
    """The composed tree, or with --resolve what config.yaml will hold. Mistakes in it are told on stderr as well."""
    try:
        config = request(arguments, machine).trials[0]
    except ConfigError as error:
        if arguments.resolve:
            raise
        with hydra_tree.hydra_for(arguments) as hydra, hydra_tree.hydra_mistakes():
            hydra.show_cfg(PRIMARY, _handed(hydra, arguments), "job", arguments.package)
        print(error.report(), file=sys.stderr)
        return EXIT_USER_MISTAKE
    if arguments.resolve:
        print(_yaml(_packaged(redacted(dump(config)), arguments.package)), end="")
        return 0
    with hydra_tree.hydra_for(arguments) as hydra, hydra_tree.hydra_mistakes():
        hydra.show_cfg(PRIMARY, _handed(hydra, arguments), "job", arguments.package)
    return 0


def _packaged(tree: Any, package: str | None) -> Any:
    for part in (package or "").split("."):
        if part and part != "_global_":
            if not isinstance(tree, dict) or part not in tree:
                raise ConfigError(Problem("--package", f"there is no {package}", "--package method"))
            tree = tree[part]
    return tree


def _yaml(tree: Any) -> str:
    import yaml

    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)).removesuffix("...\n")


def _handed(hydra: Hydra, arguments: Arguments) -> list[str]:
    loader = hydra.config_loader
    assert isinstance(loader, RecordingLoader)
    given, problems = understand(arguments.overrides, loader, multirun=False)
    groups = loader.groups([one.text for one in given if one.key == "hydra.searchpath"])
    handed, more = hydra_tree.canonical(given, groups)
    if problems or more:
        raise ConfigError(*problems, *more)
    return handed
