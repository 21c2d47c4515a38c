"""A chat template with its tokenizer: what the data room asks for, for every model family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glmexp.config.errors import DataError, Problem
from glmexp.config.schema import Family
from glmexp.model import chat

Message = Mapping[str, Any]


class ChatGLMRenderer:
    """ChatGLM 1, 2 and 3 in the formats of their releases."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = chat.stop_ids(tokenizer)
        self.pad_id = int(tokenizer.pad_token_id)

    def train(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Ids of a conversation that ends with an answer, and which of them are learned."""
        row = chat.render_chat(self.tokenizer, messages)
        return row.ids, row.supervised

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids up to where the answer begins."""
        return chat.prompt_ids(self.tokenizer, messages)

    def answer(self, ids: Sequence[int]) -> str:
        """Text of generated ids up to the first stop token."""
        return chat.answer_text(self.tokenizer, ids)


class TemplateRenderer:
    """The template that the checkpoint brings in its tokenizer_config.json (Qwen2)."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pad_id = int(tokenizer.pad_token_id)
        end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self.stop_ids = sorted({int(tokenizer.eos_token_id), int(end_of_text)})

    def train(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Ids of a conversation that ends with an answer, and which are learned: the answer and its end token."""
        prompt = self.prompt(messages[:-1])
        row = self._ids(messages, add_generation_prompt=False)
        if row[: len(prompt)] != prompt or self.tokenizer.eos_token_id not in row[len(prompt) :]:
            raise DataError(
                Problem(
                    "chat template",
                    "the row does not go on where the prompt ends, or its answer has no end token",
                    "use a template that adds to the end only and closes each answer",
                )
            )
        end = len(prompt) + row[len(prompt) :].index(self.tokenizer.eos_token_id) + 1
        return row[:end], [place >= len(prompt) for place in range(end)]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids up to where the answer begins."""
        return self._ids(messages, add_generation_prompt=True)

    def answer(self, ids: Sequence[int]) -> str:
        """Text of generated ids up to the first stop token."""
        end = next((place for place, index in enumerate(ids) if index in self.stop_ids), len(ids))
        return str(self.tokenizer.decode(list(ids[:end]), skip_special_tokens=True)).strip()

    def _ids(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False
        )


def renderer(family: Family, tokenizer: Any) -> ChatGLMRenderer | TemplateRenderer:
    """The renderer of a model family."""
    return TemplateRenderer(tokenizer) if family == "qwen2" else ChatGLMRenderer(tokenizer)
