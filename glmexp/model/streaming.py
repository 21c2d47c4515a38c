"""Text of an answer while its tokens come: whole characters only, as ``Renderer.answer`` gives it in the end."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

HALF = "\ufffd"
"""What a tokenizer makes of a character whose other bytes are still to come: a Chinese one has three."""


class TextStream:
    """``add`` each new token, print what comes back, and ``rest`` at the end.

    Only the tokens since the last printed ones are decoded again, with those before them: what a token reads as may
    depend on its neighbour (a space in front of a word), and an answer is not decoded as often as it has tokens.
    White space waits until something follows: at the ends of an answer it is no part of it, and some tokenizers take
    it away in front of a comma.
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int]) -> None:
        self._tokenizer, self._stops = tokenizer, frozenset(stop_ids)
        self._ids: list[int] = []
        """Tokens that are decoded again: those last printed from, and those that came since."""
        self._read = 0
        """So many of them are printed."""
        self._printed = ""
        self._begun = False
        self.ended = False
        """A stop token has come."""

    def add(self, token: int) -> str:
        """What this token completes; empty within a character and behind the end."""
        if self.ended or token in self._stops:
            self.ended = True
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(HALF):
            return ""
        new = text.rstrip()[len(self._printed) :]
        if new:
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._printed = self._decode(self._ids).rstrip()
        return self._shown(new)

    def rest(self) -> str:
        """What is left when nothing more comes; half a character is left out."""
        return self._shown(self._decode(self._ids).rstrip(HALF).rstrip()[len(self._printed) :])

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""

    def _shown(self, text: str) -> str:
        shown = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(shown)
        return shown
