"""Which Python file stands behind a group's option: found by name, extended by GLMEXP_PLUGINS.

An option is a dataclass of its settings, registered under (group, name) by the module ``glmexp/<group>/<name>.py``.
The modules are light to import (torch and the like only inside functions), so that the parent can check a
configuration with them. Nothing here imports another room by name: the module path is built from the option.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
from collections.abc import Callable
from typing import TypeVar

from glmexp.config.errors import ConfigError, Problem

T = TypeVar("T", bound=type)

PLUGINS_VARIABLE = "GLMEXP_PLUGINS"
_options: dict[tuple[str, str], type] = {}
_plugins_loaded: set[str] = set()


def register(group: str, name: str) -> Callable[[T], T]:
    """Class decorator: the dataclass under it holds the settings of ``group=name``."""

    def decorate(cls: T) -> T:
        known = _options.get((group, name))
        if known is not None and known.__module__ != cls.__module__:
            raise AssertionError(f"{group}={name} is registered by {known.__module__} and by {cls.__module__}")
        _options[(group, name)] = cls
        return cls

    return decorate


def known(group: str, name: str) -> bool:
    """Whether ``group=name`` has code; its module is imported to find out."""
    load_plugins()
    if (group, name) not in _options:
        module = f"glmexp.{group}.{name}"
        if name.isidentifier() and importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    return (group, name) in _options


def option(group: str, name: str) -> type:
    """The settings dataclass of ``group=name``. Raises ConfigError naming the known options."""
    if not known(group, name):
        raise ConfigError(
            Problem(
                f"{group}.name",
                f"no code is registered for {name!r}",
                f"use one of {', '.join(names(group))}, or name the module that registers it in {PLUGINS_VARIABLE}",
            )
        )
    return _options[(group, name)]


def names(group: str) -> list[str]:
    """All registered options of a group, built in and from plugins."""
    load_plugins()
    package = importlib.import_module(f"glmexp.{group}")
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"glmexp.{group}.{info.name}")
    return sorted(name for known_group, name in _options if known_group == group)


def load_plugins() -> None:
    """Import the modules that GLMEXP_PLUGINS names (comma separated), once each."""
    for module in filter(None, (part.strip() for part in os.environ.get(PLUGINS_VARIABLE, "").split(","))):
        if module in _plugins_loaded:
            continue
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ConfigError(
                Problem(PLUGINS_VARIABLE, f"cannot import {module!r}: {error}", "check the name and PYTHONPATH")
            ) from error
        _plugins_loaded.add(module)
