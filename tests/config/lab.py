"""Many configurations in one process: Hydra composes a few trees, which are changed and go through all checks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.types import RunMode

from glmexp.config import hydra_tree
from glmexp.config.arguments import parse, understand
from glmexp.config.compose import Machine, _Composer
from glmexp.config.errors import ConfigError
from glmexp.config.hydra_tree import COMMAND_LINE, Origin, Tree


@dataclass
class Composed:
    """One tree as Hydra made it, with the words it was made of."""

    lab: Lab
    words: tuple[str, ...]
    tree: Tree
    given: Any

    def changed(self, values: dict[str, Any]) -> Tree:
        """A copy in which these dotted keys have these values, as overrides on the command line would set them."""
        tree = copy.deepcopy(self.tree)
        for key, value in values.items():
            *folders, name = key.split(".")
            place = tree.values
            for folder in folders:
                inner = place.setdefault(folder, {})
                if not isinstance(inner, dict):
                    inner = place[folder] = {}
                place = inner
            place[name] = value
            tree.origins[key] = Origin(COMMAND_LINE, default=False)
            tree.interpolated.pop(key, None)
        return tree

    def report(self, values: dict[str, Any], gpus: int = 8, ranks: int = 2) -> str:
        """The report of a refusal, or nothing where the configuration passes every check."""
        composer = _Composer(self.lab.hydra, Machine(gpus, ranks), outside=False)
        try:
            composer.checked(self.changed(values), self.given, self.lab.groups)
            composer.stop_on_problems()
        except ConfigError as error:
            return error.report()
        return ""


class Lab:
    """Composes each list of words once."""

    def __init__(self, hydra: Hydra) -> None:
        self.hydra = hydra
        self.groups = hydra.config_loader.groups([])  # type: ignore[attr-defined]
        self.made: dict[tuple[str, ...], Composed] = {}

    def composed(self, *words: str) -> Composed:
        """The tree of these overrides; what they lack or contradict is found by ``Composed.report``."""
        if words not in self.made:
            given, problems = understand(words, self.hydra.config_loader, multirun=False)
            handed, more = hydra_tree.canonical(given, self.groups)
            assert not problems
            assert not more
            tree = hydra_tree.compose(self.hydra, handed, given, RunMode.RUN)
            self.made[words] = Composed(self, words, tree, given)
        return self.made[words]


@contextlib.contextmanager
def lab() -> Iterator[Lab]:
    """Hydra over the shipped configuration, kept open."""
    with hydra_tree.hydra_for(parse([])) as hydra:
        yield Lab(hydra)
