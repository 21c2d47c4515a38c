"""Hydra's YAML files read by libyaml, ten times faster than by Python, which took a third of composing."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

_results: dict[tuple[str, ...], ConfigResult] = {}
_MOST_RESULTS = 512


def is_shared(config: Any) -> bool:
    """Whether these nodes are those that others load too (``Repository``)."""
    return any(kept.config is config for kept in _results.values())


class Repository(ConfigRepository):
    """Hydra's, whose files are read by ``Files`` and made into nodes once a process, as long as their text is the same.

    ``config`` of a result is shared by all that load it: who merges it as it is, without copying, copies it first.
    """

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        self.sources = [
            Files(source.provider, source.path) if source.scheme() == Files.scheme() else source
            for source in self.sources
        ]

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if not isinstance(source, Files):
            return super().load_config(config_path)
        key = (source.provider, source.path, config_path, source.text(config_path))
        if key not in _results:
            if len(_results) >= _MOST_RESULTS:
                _results.clear()
            loaded = super().load_config(config_path)
            assert loaded is not None, "the source has it"
            _results[key] = loaded
        result = copy.copy(_results[key])
        result.defaults_list = copy.deepcopy(result.defaults_list)  # is written to while the list is expanded
        return result


class Files(FileConfigSource):
    """A folder of YAML files."""

    def text(self, config_path: str) -> str:
        """A file's content; empty where it is not there, which Hydra says in its own words."""
        file = Path(self.path, self._normalize_file_name(config_path))
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    def load_config(self, config_path: str) -> ConfigResult:
        text = self.text(config_path)
        values = _parsed(text)
        if not isinstance(values, dict):
            return super().load_config(config_path)
        path = f"{self.scheme()}://{self.path}"
        return ConfigResult(self.provider, path, OmegaConf.create(values), ConfigSource._get_header_dict(text[:512]))


def _parsed(text: str) -> Any:
    """What ``OmegaConf.create`` makes its nodes of; None where Python's parser has to say what is wrong."""
    loader = _loader()
    try:
        return None if loader is None else yaml.load(text, loader)
    except yaml.YAMLError:
        return None


@functools.cache
def _loader() -> Any:
    """OmegaConf's rules (what a number is, no key twice) over libyaml, which not every build of PyYAML has."""
    base: Any = getattr(yaml, "CSafeLoader", None)
    if base is None:
        return None
    rules = get_yaml_loader()

    class Loader(base):
        yaml_implicit_resolvers = rules.yaml_implicit_resolvers
        yaml_constructors = rules.yaml_constructors

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if key.tag == yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG]
            if len(names) != len(set(names)):
                raise yaml.constructor.ConstructorError
            return super().construct_mapping(node, deep=deep)

    return Loader
