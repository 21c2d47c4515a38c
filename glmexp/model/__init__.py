"""Networks and tokenizers of ChatGLM 1, 2 and 3. Importing this registers them with transformers' Auto classes."""

from glmexp.model.auto import register as _register
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

_register()
