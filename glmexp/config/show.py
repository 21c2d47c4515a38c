"""``--cfg``, ``--info``, ``--hydra-help`` and shell completion: what is composed, and from where. Runs nothing."""

from __future__ import annotations

from hydra._internal.utils import get_args_parser
from hydra.types import RunMode

from glmexp.config import hydra_tree
from glmexp.config.arguments import Arguments, understand
from glmexp.config.errors import ConfigError
from glmexp.config.hydra_tree import PRIMARY, RecordingLoader


def show(arguments: Arguments) -> int:
    """Print what a flag asks for. Raises ConfigError where the overrides cannot be composed."""
    with hydra_tree.hydra_for(arguments) as hydra:
        loader = hydra.config_loader
        assert isinstance(loader, RecordingLoader)
        if arguments.shell_completion:
            hydra.shell_completion(config_name=PRIMARY, overrides=list(arguments.overrides))
            return 0
        given, problems = understand(arguments.overrides, loader, multirun=False)
        groups = loader.groups([one.text for one in given if one.key == "hydra.searchpath"])
        handed, more = hydra_tree.canonical(given, groups)
        if problems or more:
            raise ConfigError(*problems, *more)
        with hydra_tree.hydra_mistakes():
            if arguments.hydra_help:
                flags = get_args_parser().parse_args(["--hydra-help", *handed])
                hydra.hydra_help(config_name=PRIMARY, args_parser=get_args_parser(), args=flags)
            elif arguments.info is not None:
                hydra.show_info(arguments.info, config_name=PRIMARY, overrides=handed)
            else:
                hydra_tree.compose(hydra, handed, given, RunMode.RUN)
                hydra.show_cfg(PRIMARY, handed, arguments.show or "job", arguments.package, arguments.resolve)
    return 0
