"""Registration with transformers' Auto classes, and the tokenizer that a folder asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from glmexp.model.base import ChatGLMPreTrainedModel
from glmexp.model.chatglm import ChatGLMForConditionalGeneration
from glmexp.model.chatglm2 import ChatGLM2ForConditionalGeneration
from glmexp.model.configuration import ChatGLM2Config, ChatGLMConfig, ChatGLMFamilyConfig, release_of
from glmexp.model.tokenization_chatglm import ChatGLM1Tokenizer
from glmexp.model.tokenization_chatglm2 import ChatGLM2Tokenizer, ChatGLM3Tokenizer

MODELS: dict[type[ChatGLMFamilyConfig], type[ChatGLMPreTrainedModel]] = {
    ChatGLMConfig: ChatGLMForConditionalGeneration,
    ChatGLM2Config: ChatGLM2ForConditionalGeneration,
}
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
            model_config, _ = PreTrainedConfig.get_config_dict(place, **where)
            release = release_of(model_config, default=None)
            if release is not None:
                return release
        own = get_tokenizer_config(place, **where)
        name = str(own.get("name_or_path") or "").lower()
        for release in ("chatglm2", "chatglm3"):
            if release in name:
                return release
        if Path(place, "ice_text.model").is_file() or "num_image_tokens" in own:
            return "chatglm"
        return "chatglm3"


def register() -> None:
    """Make the Auto classes find ours for ``model_type: chatglm``. Local classes win over a folder's ``auto_map``, so
    nothing of the folder is run and nobody is asked."""
    AutoConfig.register("chatglm", ChatGLMFamilyConfig, exist_ok=True)
    for config_class, model_class in MODELS.items():
        for auto in (AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM):
            auto.register(config_class, model_class, exist_ok=True)
    for config_class in (ChatGLMConfig, ChatGLM2Config):
        # Every class is registered by its name; the last one is what the configuration class maps to.
        for tokenizer_class in (*TOKENIZERS.values(), ChatGLMTokenizer):
            AutoTokenizer.register(config_class, tokenizer_class, exist_ok=True)
