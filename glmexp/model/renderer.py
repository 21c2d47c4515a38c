"""A chat template with its tokenizer: what the data room asks for, for every model family."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any

from glmexp.config.errors import DataError, Problem
from glmexp.config.schema import Family
from glmexp.model import chat, tokenization_chatglm, tokenization_chatglm2

Message = Mapping[str, Any]


class ChatGLMRenderer:
    """ChatGLM 1, 2 and 3 in the formats of their releases."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.release = chat.release_of(tokenizer)
        self.stop_ids = chat.stop_ids(tokenizer)
        self.pad_id = int(tokenizer.pad_token_id)
        # v1 learns to give sop, and a generation is given it.
        self.given_labels = 1 if self.release == "chatglm" else 0
        self.one_answer_a_row = self.release != "chatglm3"

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the vocabulary, the release and the code that renders."""
        added = sorted((str(token), index) for token, index in self.tokenizer.added_tokens_encoder.items())
        modules = (chat, tokenization_chatglm, tokenization_chatglm2)
        words = [self.release, json.dumps(added), getattr(self.tokenizer, "encode_special_tokens", False)]
        words += [getattr(self.tokenizer, name, None) for name in ("do_lower_case", "remove_space", "num_image_tokens")]
        return _digest(self.tokenizer.sp_model.serialized_model_proto(), repr(words), *modules)

    def train(self, messages: Sequence[Message], supervise: chat.Supervise = "last") -> tuple[list[int], list[bool]]:
        """Ids of a conversation that ends with an answer, and which of them are learned."""
        row = chat.render_chat(self.tokenizer, messages, supervise)
        return row.ids, row.supervised

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids up to where the answer begins."""
        return chat.prompt_ids(self.tokenizer, messages)

    def answer(self, ids: Sequence[int]) -> str:
        """Text of generated ids up to the first stop token."""
        return chat.answer_text(self.tokenizer, ids)

    def is_special(self, index: int) -> bool:
        """Whether the token is a mark of the template and no text."""
        if self.release == "chatglm":
            marks = (self.tokenizer.gmask_token_id, *self.tokenizer.all_special_ids)
            return index in marks
        return index in (self.tokenizer.eos_token_id, self.pad_id, *self.tokenizer.command_names)

    def token_text(self, index: int) -> str:
        """One token as it stands in the vocabulary, for inspection."""
        if self.release != "chatglm":
            special = self.tokenizer.command_names.get(index)
            if special is None and index >= self.tokenizer.sp_model.get_piece_size():  # of model.add_tokens
                return str(self.tokenizer.added_tokens_decoder[index])
            return special or self.tokenizer.sp_model.id_to_piece(index)
        return str(self.tokenizer.convert_ids_to_tokens(index))

    def sees(self, context: int) -> str:
        """What sees what in a row whose first ``context`` tokens come before what is learned."""
        if self.release == "chatglm":
            return f"the first {context} tokens see each other in both directions, later ones what is before them"
        return "each token sees itself and what is before it"


class TemplateRenderer:
    """The template that the checkpoint brings in its tokenizer_config.json (Qwen2)."""

    given_labels = 0
    one_answer_a_row = False

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pad_id = int(tokenizer.pad_token_id)
        end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self.stop_ids = sorted({int(tokenizer.eos_token_id), int(end_of_text)})
        special = sorted((one.content for one in tokenizer.added_tokens_decoder.values() if one.special), key=len)
        self._special = re.compile("(" + "|".join(map(re.escape, reversed(special))) + ")")

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the vocabulary, the template and the code that renders."""
        return _digest(self.tokenizer.backend_tokenizer.to_str().encode(), repr(self.tokenizer.chat_template))

    def train(self, messages: Sequence[Message], supervise: chat.Supervise = "last") -> tuple[list[int], list[bool]]:
        """Ids of a conversation that ends with an answer, and which are learned: the answers and their end tokens."""
        row = self._ids(messages, add_generation_prompt=False)
        learned = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [self._span(messages, place, row) for place in (learned if supervise == "all" else learned[-1:])]
        end = spans[-1][1]
        supervised = [False] * end
        for start, stop in spans:
            supervised[start:stop] = [True] * (stop - start)
        return row[:end], supervised

    def _span(self, messages: Sequence[Message], place: int, row: list[int]) -> tuple[int, int]:
        """Where the answer ``messages[place]`` and its end token stand in the row."""
        prompt = self.prompt(messages[:place])
        if row[: len(prompt)] != prompt or self.tokenizer.eos_token_id not in row[len(prompt) :]:
            raise DataError(
                Problem(
                    "chat template",
                    "the row does not go on where the prompt ends, or its answer has no end token",
                    "use a template that adds to the end only and closes each answer",
                )
            )
        return len(prompt), len(prompt) + row[len(prompt) :].index(self.tokenizer.eos_token_id) + 1

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids up to where the answer begins."""
        return self._ids(messages, add_generation_prompt=True)

    def answer(self, ids: Sequence[int]) -> str:
        """Text of generated ids up to the first stop token."""
        end = next((place for place, index in enumerate(ids) if index in self.stop_ids), len(ids))
        real = [index for index in ids[:end] if index >= 0]  # -100 is a label that does not count
        return str(self.tokenizer.decode(real, skip_special_tokens=True)).strip()

    def is_special(self, index: int) -> bool:
        """Whether the token is a mark of the template and no text."""
        return index in self.tokenizer.all_special_ids

    def token_text(self, index: int) -> str:
        """One token as text, for inspection; half a character shows as U+FFFD."""
        return str(self.tokenizer.decode([index]))

    def sees(self, context: int) -> str:
        """What sees what in a row whose first ``context`` tokens come before what is learned."""
        return "each token sees itself and what is before it"

    def _ids(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        for message in messages:
            if message.get("tools") or message.get("metadata") or message["role"] == "observation":
                raise DataError(
                    Problem("messages", "tools are not part of this chat template", "leave such rows out, or chatglm3")
                )
        # One call for text and ids would read <|im_end|> in a user's text as the end of the turn. So the template's own
        # special tokens are put in as ids; what stands between two of them is encoded together, as the release does.
        marked = [{**message, "content": _MARK.format(place)} for place, message in enumerate(messages)]
        frame = self.tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=add_generation_prompt)
        ids: list[int] = []
        text = ""
        for place, message in enumerate(messages):
            head, found, frame = frame.partition(_MARK.format(place))
            if not found:
                raise DataError(
                    Problem("chat template", "a message is left out or changed", "use a template that keeps each text")
                )
            text = self._frame(text, head, ids)
            if message["role"] == "assistant":  # a generation is given what stands before the answer, whole
                ids += self._encode(text)
                text = ""
            text += str(message["content"])
        return ids + self._encode(self._frame(text, frame, ids))

    def _frame(self, text: str, frame: str, ids: list[int]) -> str:
        """Add ``text`` and the template's ``frame`` behind it to ``ids``, up to the last special token of the frame.
        Returns what is left to be encoded with what follows."""
        *parts, rest = self._special.split(frame)
        for plain, token in zip(parts[::2], parts[1::2], strict=True):
            ids += self._encode(text + plain)
            ids.append(int(self.tokenizer.convert_tokens_to_ids(token)))
            text = ""
        return text + rest

    def _encode(self, text: str) -> list[int]:
        """Ids of a text in which no special token is read."""
        if not text:
            return []
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def shown(template: Renderer, ids: Sequence[int]) -> str:
    """Text of ids with the marks of the template in it, as far as the vocabulary allows."""
    words: list[str] = []
    plain: list[int] = []

    def flush() -> None:
        if plain:
            words.append(str(template.tokenizer.decode(plain, skip_special_tokens=False)))
            plain.clear()

    for index in ids:
        if template.is_special(index):
            flush()
            words.append(template.token_text(index))
        else:
            plain.append(index)
    flush()
    return "".join(words)


_MARK = "\ue000{}\ue001"
"""Stands for a message's text while the template is filled in: private-use characters, which no template holds."""


def _digest(vocabulary: bytes, settings: str, *modules: ModuleType) -> str:
    digest = hashlib.sha256(vocabulary)
    digest.update(settings.encode())
    for module in (*modules, inspect.getmodule(_digest)):
        assert module is not None
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()


Renderer = ChatGLMRenderer | TemplateRenderer


def renderer(family: Family, tokenizer: Any) -> Renderer:
    """The renderer of a model family."""
    return TemplateRenderer(tokenizer) if family == "qwen2" else ChatGLMRenderer(tokenizer)
