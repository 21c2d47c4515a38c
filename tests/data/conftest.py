"""Renderers of all four families over small vocabularies that are made on the spot."""

from __future__ import annotations

from typing import Any

import pytest

from glmexp.model import ChatGLM1Tokenizer, ChatGLM2Tokenizer, ChatGLM3Tokenizer
from glmexp.model.renderer import renderer
from glmexp.model.tiny.recipes import qwen2_tokenizer
from tests.model.samples import make_vocabulary

FAMILIES = ("chatglm", "chatglm2", "chatglm3", "qwen2")
TEXT = ["今天天气很好，我们去公园。", "What is the capital of France? Paris", "system user assistant"] * 20


@pytest.fixture(scope="session")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("vocabularies")
    pieces = str(make_vocabulary(folder, "chatglm3"))
    tokenizers = {
        "chatglm": ChatGLM1Tokenizer(str(make_vocabulary(folder, "chatglm")), num_image_tokens=0),
        "chatglm2": ChatGLM2Tokenizer(pieces),
        "chatglm3": ChatGLM3Tokenizer(pieces),
        "qwen2": qwen2_tokenizer(TEXT, folder),
    }
    return {family: renderer(family, tokenizer) for family, tokenizer in tokenizers.items()}  # type: ignore[arg-type]
