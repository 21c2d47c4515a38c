"""One composed tree through Hydra's own loader, with the file or override behind every key.

Hydra is asked directly, without ``hydra.main``: no logging is configured, no folder made, none changed to.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.default_element import GroupDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from glmexp.config.arguments import HYDRA_KEYS, Arguments, Given
from glmexp.config.errors import ConfigError, Problem, first_line
from glmexp.config.load import BROKEN, MISSING, flatten
from glmexp.config.nearest import choice, conf_folder, shipped_options, unknown_key, unknown_option
from glmexp.config.yaml_files import Repository, is_shared

PRIMARY = "config"
COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Origin:
    """Who set a key."""

    words: str
    """``the command line``, ``conf/zero/stage2.yaml``, or the path of a user's file."""
    default: bool
    """By a file of this project, not by the user."""


class RecordingLoader(ConfigLoaderImpl):
    """Hydra's loader, which also notes the file behind each key and the groups there are."""

    def __init__(self, config_search_path: Any) -> None:
        super().__init__(config_search_path)
        self.repository = Repository(config_search_path)
        self.origins: dict[str, Origin] = {}
        self.hydra_keys: dict[str, Origin] = {}
        self.empty: dict[str, Origin] = {}
        """Keys that a user's file sets to an empty mapping; not a file that is empty as a whole, which may be one with
        a defaults list alone."""

    def _load_single_config(self, default: Any, repo: Any) -> Any:
        loaded = super()._load_single_config(default, repo)
        if is_shared(loaded.config):
            loaded = replace(loaded, config=copy.deepcopy(loaded.config))
        if default.config_path is not None and not default.config_path.startswith("hydra/"):
            origin = _origin(default.config_path, loaded)
            for key in _keys(loaded.config):
                if not key.startswith("hydra."):
                    self.origins[key] = origin
                    if not origin.default and key != default.package and _is_empty(loaded.config, key):
                        self.empty[key] = origin
                elif not origin.default:
                    self.hydra_keys[key] = origin
        return loaded

    def groups(self, searchpath: Sequence[str]) -> Groups:
        """Groups and options on the whole search path. Raises ConfigError where the primary file is broken."""
        with hydra_mistakes():
            _, repo = self._parse_overrides_and_create_caching_repo(PRIMARY, list(searchpath))
            primary = repo.load_config(PRIMARY)
            defaults = primary.defaults_list if primary is not None else []
            chosen = {str(one.group): one.value for one in defaults or [] if isinstance(one, GroupDefault)}
            return Groups(repo, chosen)


@dataclass
class Groups:
    """What can be chosen."""

    repo: Any
    defaults: dict[str, Any]
    """Group to option in the defaults list of config.yaml."""

    def exists(self, name: str) -> bool:
        """Whether ``name`` is a group with options."""
        return bool(name) and "." not in name and bool(self.options(name))

    def options(self, name: str) -> list[str]:
        """All options of a group, the user's own too."""
        return sorted(set(self.repo.get_group_options(name, ObjectType.CONFIG)))


@dataclass
class Tree:
    """A composed configuration as plain Python, with what is wrong in it so far."""

    values: dict[str, Any]
    origins: dict[str, Origin]
    choices: dict[str, Any]
    """Group to chosen option."""
    in_files: frozenset[str] = frozenset()
    """Dotted keys that some file sets, whether or not the command line replaces their values."""
    params: dict[str, Any] = field(default_factory=dict)
    """``hydra.sweeper.params``: the grid that a study brings."""
    sweep: Any = None
    """``hydra.sweep``, unresolved: its folder's name may need keys that are missing outside of a sweep."""
    interpolated: dict[str, str] = field(default_factory=dict)
    """Dotted key to the ``${...}`` that it was."""
    problems: list[Problem] = field(default_factory=list)


@contextmanager
def hydra_for(arguments: Arguments) -> Iterator[Hydra]:
    """Hydra's main object over conf/, the user's --config-dir and ``hydra.searchpath``."""
    path = create_config_search_path(f"file://{conf_folder()}")
    if arguments.config_dir is not None:
        anchor = SearchPathQuery(provider="schema")
        path.prepend(provider="command-line", path=f"file://{arguments.config_dir}", anchor=anchor)
    GlobalHydra.instance().clear()
    try:
        hydra = Hydra.create_main_hydra2(task_name="glmexp", config_search_path=path)
        hydra.config_loader = RecordingLoader(path)
        yield hydra
    finally:
        GlobalHydra.instance().clear()


def missing_folders(searchpaths: Iterable[Given]) -> Iterator[Problem]:
    """Places that ``hydra.searchpath`` names and that are not there: Hydra would only pass them by."""
    for given in searchpaths:
        value = given.override.value()
        for place in value if isinstance(value, list) else [value]:
            folder = str(place).removeprefix("file://")
            if "://" not in folder and not Path(folder).is_dir():
                yield Problem(given.key, f"{folder} is no folder", "hydra.searchpath=[DIR], a folder with YAML files")


@contextmanager
def hydra_mistakes() -> Iterator[None]:
    """What Hydra, OmegaConf or the YAML reader refuse becomes a ConfigError with their words."""
    import yaml

    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{mark.name}:{mark.line + 1}" if mark is not None else "a YAML file"
        raise ConfigError(Problem(where, f"is no valid YAML: {error.problem}", "correct that line")) from error
    except MissingConfigException as error:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if not error.options:
            raise ConfigError(Problem("composing", str(error))) from error
        raise ConfigError(unknown_option(group, option, sorted(error.options))) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        text = str(error).strip() or str(error.__cause__)
        raise ConfigError(Problem("composing", text.replace("\n", "\n      "))) from error


def canonical(given: Iterable[Given], groups: Groups) -> tuple[list[str], list[Problem]]:
    """Overrides in the form that Hydra accepts for keys it does not know: our own walk of the tree reports those."""
    handed: list[str] = []
    problems: list[Problem] = []
    for one in given:
        key, value = one.override.key_or_group, one.override.value()
        if key.startswith("hydra"):
            problems.extend(_hydra_key(one))
            handed.append(one.override.input_line or one.text)
        elif one.deletes:
            problems.extend(_deletion(one, groups))
            handed.append(one.text)
        elif groups.exists(key) and not isinstance(value, dict):
            problems.extend(_options_of(one, groups))
            plus = "" if key in groups.defaults or one.override.package is not None else "+"
            handed.append(f"{plus}{one.key}={one.value_text}")
        elif one.override.package is not None:
            problems.append(unknown_key(one.key, value))
        else:
            problems.extend(_name_of_option(one, groups))
            handed.append(f"++{key}={one.value_text}")
    return handed, problems


def _hydra_key(one: Given) -> Iterator[Problem]:
    key = one.override.key_or_group
    yield from _useless_hydra_key(key)
    if one.sweeps:
        yield Problem(key, "cannot be swept over", "give one value")


def _useless_hydra_key(key: str, origin: str = "") -> Iterator[Problem]:
    if not any(key == known or key.startswith(f"{known}.") for known in HYDRA_KEYS):
        better = {"hydra.run.dir": "run.dir=FOLDER", "hydra.mode": "-m"}.get(key, f"known: {', '.join(HYDRA_KEYS)}")
        yield Problem(key, f"has no effect here{origin}", better)


def _deletion(one: Given, groups: Groups) -> Iterator[Problem]:
    """Only what a mapping holds can be taken away: an eval hook, a variable of launcher.env."""
    key = one.override.key_or_group
    if groups.exists(key):
        yield Problem(one.text, f"a run needs the group {key}", f"{key}=... one of {', '.join(groups.options(key))}")
    elif not key.startswith("launcher.env.") and not (key.startswith("eval.") and key.count(".") == 1):
        yield Problem(one.text, "cannot be taken away: a run needs every key", f"{key}=null, where null is allowed")


def _name_of_option(one: Given, groups: Groups) -> Iterator[Problem]:
    """``method.name=full`` would rename an option without its values."""
    group, _, leaf = one.key.partition(".")
    if leaf == "name" and groups.exists(group):
        yield Problem(one.key, "is set by the chosen option", f"{group}={one.value_text}")


def _options_of(one: Given, groups: Groups) -> Iterator[Problem]:
    group, value = one.override.key_or_group, one.override.value()
    chosen: list[Any] = [value]
    if one.sweeps:
        chosen = list(one.override.sweep_iterator()) if one.override.is_discrete_sweep() else []
    options = groups.options(group)
    for option in chosen:
        for each in option if isinstance(option, list) else [option]:
            name = getattr(each, "text", each)
            if str(name) not in options:
                yield unknown_option(group, name, options)


def compose(hydra: Hydra, handed: Sequence[str], given: Iterable[Given], mode: RunMode) -> Tree:
    """Compose and resolve one tree. Raises ConfigError for what cannot be composed at all."""
    loader = hydra.config_loader
    assert isinstance(loader, RecordingLoader)
    loader.origins, loader.hydra_keys, loader.empty = {}, {}, {}
    with hydra_mistakes():
        config = hydra.compose_config(PRIMARY, list(handed), mode, validate_sweep_overrides=mode is RunMode.RUN)
    HydraConfig.instance().set_config(config)
    origins = {**loader.hydra_keys, **loader.origins}
    choices = dict(config.hydra.runtime.choices)
    typed = Origin(COMMAND_LINE, default=False)
    for one in given:
        value = None if one.sweeps else one.override.value()
        for key, leaf in flatten({one.key: value}).items():
            if key not in choices or key not in origins:  # a file that is empty as a whole says more than its choice
                origins[key] = typed
            if leaf == {}:
                loader.empty[key] = typed
    tree = Tree({}, origins, choices, in_files=frozenset(loader.origins.keys() - loader.empty.keys()))
    for name in map(str, config):
        if name != "hydra":
            tree.values[name] = _plain(config, name, name, tree)
    tree.problems.extend(_sets_nothing(tree, loader.empty))
    for key, origin in loader.hydra_keys.items():
        tree.problems.extend(_useless_hydra_key(key, f" (from {origin.words})"))
    with hydra_mistakes():
        tree.params = {str(key): value for key, value in dict(config.hydra.sweeper.get("params") or {}).items()}
    tree.sweep = config.hydra.sweep
    return tree


def _sets_nothing(tree: Tree, empty: dict[str, Origin]) -> Iterator[Problem]:
    """An empty mapping is laid over what is there, which takes nothing away and changes nothing."""
    leaves = [leaf for leaf in flatten(tree.values) if not leaf.endswith(".name")]
    for key, origin in empty.items():
        below = [leaf for leaf in leaves if leaf.startswith(f"{key}.")]
        if below:
            told = f"is an empty mapping and sets nothing (from {origin.words})"
            other = f"; {choice(key)}" if len(shipped_options().get(key, ())) > 1 else ""
            yield Problem(key, told, f"leave it out, or set keys below it, such as {below[0]}{other}")


def _plain(node: Any, name: Any, key: str, tree: Tree) -> Any:
    """A node's value as plain Python; an interpolation that fails is a problem and leaves BROKEN."""
    if OmegaConf.is_missing(node, name):
        return MISSING
    if OmegaConf.is_interpolation(node, name):
        tree.interpolated[key] = str(node._get_node(name)._value())
    try:
        value = node[name]
    except OmegaConfBaseException as error:
        origin = f" (from {tree.origins[key].words})" if key in tree.origins else ""
        tree.problems.append(Problem(key, f"{tree.interpolated[key]} cannot be resolved: {first_line(error)}{origin}"))
        return BROKEN
    if isinstance(value, DictConfig):
        return {
            name: _plain(value, part, f"{key}.{name}", tree) for part, name in zip(value, map(str, value), strict=True)
        }
    if isinstance(value, ListConfig):
        return [_plain(value, part, f"{key}[{part}]", tree) for part in range(len(value))]
    return value


def _is_empty(config: Any, key: str) -> bool:
    """Whether the value is an empty mapping; what a file's interpolations read may lie in another file."""
    return bool(OmegaConf.select(config, key, throw_on_resolution_failure=False) == {})


def _keys(config: Any, path: str = "") -> Iterator[str]:
    """Dotted keys of the leaves of a file, without resolving anything."""
    if not isinstance(config, DictConfig) or config._is_missing() or config._is_none() or config._is_interpolation():
        yield path
        return
    if path and not config:
        yield path
    for name, value in config.items_ex(resolve=False):
        key = f"{path}.{name!s}" if path else str(name)
        if key != "defaults":
            yield from _keys(value, key)


def _origin(config_path: str, loaded: Any) -> Origin:
    file = f"{config_path}.yaml"
    if loaded.provider == "main":
        if config_path.startswith("experiments/"):
            return Origin(file, default=False)
        return Origin(f"conf/{file}", default=True)
    source = str(loaded.path).removeprefix("file://")
    folder = Path(source)
    if not folder.suffix:
        folder = folder / file
    with suppress(ValueError):  # a file outside of this folder keeps its whole path
        folder = folder.relative_to(Path.cwd())
    return Origin(str(folder), default=False)
