"""Networks and tokenizers of ChatGLM 1, 2 and 3. Importing this registers them with transformers' Auto classes.

Names are loaded when they are asked for: a tokenizer needs no network, and so no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from glmexp.model.auto import register as _register

if TYPE_CHECKING:
    from glmexp.model.chatglm import ChatGLMForConditionalGeneration
    from glmexp.model.chatglm2 import ChatGLM2ForConditionalGeneration
    from glmexp.model.configuration import ChatGLM2Config, ChatGLMConfig
    from glmexp.model.prefix import load_prefix
    from glmexp.model.tokenization_chatglm import ChatGLM1Tokenizer
    from glmexp.model.tokenization_chatglm2 import ChatGLM2Tokenizer, ChatGLM3Tokenizer

__all__ = [
    "ChatGLM1Tokenizer",
    "ChatGLM2Config",
    "ChatGLM2ForConditionalGeneration",
    "ChatGLM2Tokenizer",
    "ChatGLM3Tokenizer",
    "ChatGLMConfig",
    "ChatGLMForConditionalGeneration",
    "load_prefix",
]

_MODULES = {
    "ChatGLM1Tokenizer": "tokenization_chatglm",
    "ChatGLM2Config": "configuration",
    "ChatGLM2ForConditionalGeneration": "chatglm2",
    "ChatGLM2Tokenizer": "tokenization_chatglm2",
    "ChatGLM3Tokenizer": "tokenization_chatglm2",
    "ChatGLMConfig": "configuration",
    "ChatGLMForConditionalGeneration": "chatglm",
    "load_prefix": "prefix",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


_register()
