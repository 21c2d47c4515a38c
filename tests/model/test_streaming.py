"""What a chat prints token by token is the answer that is kept, and never half a character."""

from __future__ import annotations

import random

import pytest

from glmexp.config.compose import run_config
from glmexp.model.build import load_tokenizer
from glmexp.model.renderer import renderer
from glmexp.model.streaming import HALF, TextStream

TEXTS = (
    "你好，世界！我是一个助手。 12 + 30 = 42",
    "Hello  world ,\n\n  indented\tcode 😀👩‍👩‍👧 é ?",
    "龘靐齉爩 𠮷野家 が",
    "  lead and trail  \n",
)
KINDS = ("tiny", "tiny_chatglm", "tiny_chatglm2", "tiny_qwen2")


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_whole_characters_and_add_up_to_the_answer(kind: str) -> None:
    model = run_config([f"model={kind}"]).model
    tokenizer = load_tokenizer(model)
    template = renderer(model.family, tokenizer)
    whole = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    dice = random.Random(0)
    torn = [[dice.choice(dice.choice(whole)) for _ in range(20)] for _ in range(100)]  # characters broken anywhere
    for ids in [*whole, *torn]:
        stream = TextStream(tokenizer, template.stop_ids)
        pieces = [stream.add(token) for token in ids]
        assert ids not in whole or HALF not in "".join(pieces), "a torn character is shown only where one was said"
        answer = template.answer(ids)
        assert "".join(pieces) + stream.rest() in (answer, answer.rstrip(HALF).rstrip())


def test_nothing_is_shown_behind_the_end() -> None:
    model = run_config(["model=tiny"]).model
    tokenizer = load_tokenizer(model)
    template = renderer(model.family, tokenizer)
    stream = TextStream(tokenizer, template.stop_ids)
    ids = tokenizer.encode("好", add_special_tokens=False)
    assert "".join(stream.add(token) for token in [*ids, template.stop_ids[-1], *ids]) + stream.rest() == "好"
    assert stream.ended
