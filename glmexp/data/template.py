"""What the data room asks of a model's chat template. The model room implements it; the entry hands it in."""

from __future__ import annotations

from typing import Protocol, TypedDict


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    """system, user or assistant."""
    content: str


class Renderer(Protocol):
    """A chat template with its tokenizer."""

    @property
    def stop_ids(self) -> list[int]:
        """Tokens at which a generated answer ends."""

    @property
    def pad_id(self) -> int:
        """Token that fills batches up."""

    def train(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """Ids of the whole conversation, and for each id whether it is to be learned (answers and their end tokens)."""

    def prompt(self, messages: list[Message]) -> list[int]:
        """Ids of the conversation up to where the assistant's answer begins."""
