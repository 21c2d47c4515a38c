"""Registration with transformers' Auto classes, and the tokenizer that a folder asks for.

Importing this is cheap: transformers' Auto classes and the networks bring all of torch along, and a tokenizer needs
neither. So each Auto class gets ours when its own module is loaded, and networks when a configuration of theirs is
made.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from glmexp.config.families import chatglm_release
from glmexp.model.tokenization_chatglm import ChatGLM1Tokenizer
from glmexp.model.tokenization_chatglm2 import ChatGLM2Tokenizer, ChatGLM3Tokenizer

TOKENIZERS: dict[str, Any] = {
    "chatglm": ChatGLM1Tokenizer,
    "chatglm2": ChatGLM2Tokenizer,
    "chatglm3": ChatGLM3Tokenizer,
}


class ChatGLMTokenizer:
    """The name that all three releases write in tokenizer_config.json; ``from_pretrained`` picks the right class.

    The folder's config.json decides when it is there and tells; then the released name in tokenizer_config.json; then
    the vocabulary file (``ice_text.model`` is v1's). Files of v2 and v3 are the same, and when nothing tells them
    apart it is ChatGLM3's tokenizer, whose ids for plain text are those of ChatGLM2's.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *inputs: Any, **kwargs: Any) -> Any:
        """The tokenizer of a folder (or hub name) in the released layout."""
        release = cls.release_of(str(pretrained_model_name_or_path), kwargs)
        return TOKENIZERS[release].from_pretrained(pretrained_model_name_or_path, *inputs, **kwargs)

    @staticmethod
    def release_of(place: str, kwargs: dict[str, Any]) -> str:
        """``chatglm``, ``chatglm2`` or ``chatglm3``."""
        where = {
            name: kwargs[name]
            for name in ("cache_dir", "revision", "token", "local_files_only", "subfolder")
            if kwargs.get(name) is not None
        }
        if not Path(place).is_dir() or Path(place, "config.json").is_file():
            release = chatglm_release(config_json(place, **where), default=None)
            if release is not None:
                return release
        own = _tokenizer_json(place, **where)
        name = str(own.get("name_or_path") or "").lower()
        for release in ("chatglm2", "chatglm3"):
            if release in name:
                return release
        if Path(place, "ice_text.model").is_file() or "num_image_tokens" in own:
            return "chatglm"
        return "chatglm3"


def config_json(place: str, **where: Any) -> dict[str, Any]:
    """config.json of a folder, or of a hub name through transformers. Raises OSError where it is not there."""
    if Path(place).is_dir() and "subfolder" not in where:
        return _json_object(Path(place, "config.json"))
    from transformers import PreTrainedConfig

    content, _ = PreTrainedConfig.get_config_dict(place, **where)
    return content


def _tokenizer_json(place: str, **where: Any) -> dict[str, Any]:
    """tokenizer_config.json in the same way; empty where it is not there."""
    if Path(place).is_dir() and "subfolder" not in where:
        file = Path(place, "tokenizer_config.json")
        return _json_object(file) if file.is_file() else {}
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    return get_tokenizer_config(place, **where)


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"{file} is not a valid JSON file: {error}") from error
    if not isinstance(content, dict):
        raise OSError(f"{file} holds no JSON object")
    return content


def known_tokenizer(place: str) -> Any | None:
    """The tokenizer of a local folder as AutoTokenizer gives it, without loading AutoTokenizer and torch with it (2 s);
    None where only AutoTokenizer can tell: a hub name, another family, a tokenizer that brings code."""
    if not Path(place).is_dir():
        return None
    own = _tokenizer_json(place)
    kind, name = config_json(place).get("model_type"), str(own.get("tokenizer_class")).removesuffix("Fast")
    if kind in ("chatglm", "glm"):  # glm: exported in the layout of transformers
        known = {one.__name__: one for one in (*TOKENIZERS.values(), ChatGLMTokenizer)}
        return known[name].from_pretrained(place) if name in known else None
    if kind == "qwen2" and name == "Qwen2Tokenizer" and "auto_map" not in own:
        from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

        return Qwen2Tokenizer.from_pretrained(place)
    return None


def register() -> None:
    """Make the Auto classes find ours for ``model_type: chatglm``. Local classes win over a folder's ``auto_map``, so
    nothing of the folder is run and nobody is asked."""
    auto = "transformers.models.auto"
    _when_loaded(f"{auto}.configuration_auto", _register_configurations)
    _when_loaded(f"{auto}.tokenization_auto", _register_tokenizers)


def _register_configurations(module: ModuleType) -> None:
    from glmexp.model.configuration import ChatGLMFamilyConfig

    module.AutoConfig.register("chatglm", ChatGLMFamilyConfig, exist_ok=True)


def _register_tokenizers(module: ModuleType) -> None:
    from glmexp.model.configuration import ChatGLM2Config, ChatGLMConfig

    for config_class in (ChatGLMConfig, ChatGLM2Config):
        # Every class is registered by its name; the last one is what the configuration class maps to.
        for tokenizer_class in (*TOKENIZERS.values(), ChatGLMTokenizer):
            module.AutoTokenizer.register(config_class, tokenizer_class, exist_ok=True)


@cache
def register_networks() -> None:
    """Make AutoModel and its kin find our networks, and all networks the attention kinds varlen and slots."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from glmexp.model import slots, varlen
    from glmexp.model.chatglm import ChatGLMForConditionalGeneration
    from glmexp.model.chatglm2 import ChatGLM2ForConditionalGeneration
    from glmexp.model.configuration import ChatGLM2Config, ChatGLMConfig

    varlen.register()
    slots.register()
    for auto in (AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        auto.register(ChatGLMConfig, ChatGLMForConditionalGeneration, exist_ok=True)
        auto.register(ChatGLM2Config, ChatGLM2ForConditionalGeneration, exist_ok=True)


def _when_loaded(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with the module ``name``: now if it is loaded, else as soon as it has been."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _After(name, then))


class _After(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it lets the other finders find one module and calls a function behind its code."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec, with a loader that goes on to ``then``; None for every other module."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None, f"transformers has no {fullname}"
        assert spec.loader is not None, f"{fullname} is no module"
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
