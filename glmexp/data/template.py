"""What the data room asks of a model's chat template. The model room implements it; the entry hands it in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, Protocol, TypedDict


class Message(TypedDict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "observation"]
    content: str
    metadata: NotRequired[str]
    """On a turn of the assistant: the tool that it calls."""
    tools: NotRequired[list[Any]]
    """On the system turn: the tools that may be called."""


class Renderer(Protocol):
    """A chat template with its tokenizer. It can be pickled: processes that prepare data get a copy."""

    @property
    def stop_ids(self) -> list[int]:
        """Tokens at which a generated answer ends."""

    @property
    def pad_id(self) -> int:
        """Token that fills batches up."""

    @property
    def given_labels(self) -> int:
        """Learned tokens at the start of an answer that a generation is given all the same (v1: sop)."""

    @property
    def one_answer_a_row(self) -> bool:
        """Earlier answers stand inside the prompt's text and cannot be learned in the same row (v1, v2)."""

    @property
    def fingerprint(self) -> str:
        """Changes with the tokenizer, the template and its code."""

    def train(self, messages: Sequence[Message], supervise: Literal["last", "all"]) -> tuple[list[int], list[bool]]:
        """Ids of the whole conversation, and for each id whether it is to be learned (answers and their end tokens).

        Raises DataError for what the template has no place for.
        """

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the conversation up to where the assistant's answer begins."""
