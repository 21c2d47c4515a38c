"""Tokenizers of ChatGLM2-6B and ChatGLM3-6B: one SentencePiece file, special tokens put behind its pieces."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from sentencepiece import SentencePieceProcessor
from transformers import PreTrainedTokenizer

from glmexp.config.errors import ConfigError, Problem
from glmexp.model.tokenization_chatglm import save_sentencepiece

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


class ChatGLM2Tokenizer(PreTrainedTokenizer):
    """ChatGLM2-6B's tokenizer. ``[gMASK] sop`` stand in front of a text, ``</s>`` behind a pair.

    No text is ever read as a special token. Padding is on the left unless asked otherwise and returns
    ``position_ids``: 0 on pads, real tokens counted from 0. Decoding drops special tokens.
    """

    release: ClassVar[str] = "chatglm2"
    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask", "position_ids"]  # noqa: RUF012
    padding_side = "left"
    command_tokens: ClassVar[tuple[str, ...]] = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
    fixed_tokens: ClassVar[dict[str, str | None]] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<unk>",
        "unk_token": "<unk>",
    }

    def __init__(self, vocab_file: str, **kwargs: Any) -> None:
        self.vocab_file = vocab_file
        self.sp_model = SentencePieceProcessor(model_file=str(vocab_file))
        first = self.sp_model.get_piece_size()
        self.command_ids = {token: first + index for index, token in enumerate(self.command_tokens)}
        self.command_names = {index: token for token, index in self.command_ids.items()}
        for name, token in self.fixed_tokens.items():
            given = kwargs.pop(name, None)
            if given is not None and str(given) not in (token, "<pad>"):
                raise ConfigError(
                    Problem(
                        f"tokenizer: {name}", f"is {str(given)!r}", f"the released vocabulary fixes it as {token!r}"
                    )
                )
        super().__init__(**kwargs)

    # The released classes name these without making them tokens that a text could contain.
    @property
    def eos_token(self) -> str:  # type: ignore[override]
        """``</s>``."""
        return "</s>"

    @property
    def eos_token_id(self) -> int:
        """Ends an answer."""
        return self.sp_model.eos_id()

    @property
    def pad_token(self) -> str:  # type: ignore[override]
        """``<unk>``, as released."""
        return "<unk>"

    @property
    def pad_token_id(self) -> int:
        """0: the file has no pad of its own."""
        return max(self.sp_model.pad_id(), 0)

    @property
    def unk_token(self) -> str:  # type: ignore[override]
        """``<unk>``."""
        return "<unk>"

    @property
    def vocab_size(self) -> int:
        """Pieces and special tokens; the model's vocabulary is padded beyond."""
        return self.sp_model.get_piece_size() + len(self.command_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""
        pieces = {self.sp_model.id_to_piece(index): index for index in range(self.sp_model.get_piece_size())}
        return {**pieces, **self.command_ids, **self._added_tokens_encoder}

    def get_command(self, token: str) -> int:
        """Id of a special token (``<bos>``, ``<eos>``, ``<pad>``, ``[gMASK]``, ``sop``, ...)."""
        index = self.command_ids.get(token)
        if index is not None:
            return index
        return {"<bos>": self.sp_model.bos_id(), "<eos>": self.eos_token_id, "<pad>": self.pad_token_id}[token]

    @property
    def reads_marks(self) -> bool:
        """A text may hold tokens that stand for themselves: those that a user has added."""
        return bool(self._added_tokens_encoder)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.sp_model.encode(text, out_type=str)

    def _convert_token_to_id(self, token: str) -> int:
        index = self.command_ids.get(token)
        return self.sp_model.piece_to_id(token) if index is None else index

    def _plain_id(self, index: int) -> str | None:
        """The piece of an id, "" for what has none, None for a special token."""
        if index in self.command_names:
            return None
        fixed = (self.sp_model.bos_id(), self.sp_model.eos_id(), self.sp_model.pad_id(), self.sp_model.unk_id())
        if index < 0 or index in fixed or index >= self.sp_model.get_piece_size():
            return ""
        return self.sp_model.id_to_piece(index)

    def _convert_id_to_token(self, index: int) -> str:
        return self._plain_id(index) or ""

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of a list of tokens."""
        return self.sp_model.decode_pieces(tokens)

    def get_prefix_tokens(self) -> list[int]:
        """``[gMASK] sop``."""
        return [self.command_ids["[gMASK]"], self.command_ids["sop"]]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """``[gMASK] sop a``, or ``[gMASK] sop a b </s>``."""
        pair = [] if token_ids_1 is None else [*token_ids_1, self.eos_token_id]
        return [*self.get_prefix_tokens(), *token_ids_0, *pair]

    def _pad(self, encoded_inputs: Any, *args: Any, padding_side: str | None = None, **kwargs: Any) -> dict[str, Any]:
        length = len(encoded_inputs["input_ids"])
        positions = encoded_inputs.get("position_ids")
        if positions is None:
            real = encoded_inputs.get("attention_mask") or [1] * length
            positions = [max(sum(real[: index + 1]) - 1, 0) if real[index] else 0 for index in range(length)]
        padded = super()._pad(encoded_inputs, *args, padding_side=padding_side, **kwargs)  # type: ignore[misc]
        fill = [0] * (len(padded["input_ids"]) - length)
        left = (padding_side or self.padding_side) == "left"
        padded["position_ids"] = [*fill, *positions] if left else [*positions, *fill]
        return padded

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write the SentencePiece file under its released name."""
        return save_sentencepiece(self, save_directory, filename_prefix)


class ChatGLM3Tokenizer(ChatGLM2Tokenizer):
    """ChatGLM3-6B's tokenizer: four role tokens more, and decoding keeps special tokens as text.

    ``encode_special_tokens``: read special tokens that a text contains as such; off, so that a role typed by a user
    stays plain text.
    """

    release: ClassVar[str] = "chatglm3"
    command_tokens: ClassVar[tuple[str, ...]] = (*ChatGLM2Tokenizer.command_tokens, *ROLES)

    def __init__(self, vocab_file: str, encode_special_tokens: bool = False, **kwargs: Any) -> None:
        self.encode_special_tokens = encode_special_tokens
        super().__init__(vocab_file, encode_special_tokens=encode_special_tokens, **kwargs)

    @property
    def reads_marks(self) -> bool:
        """Also with ``encode_special_tokens``."""
        return super().reads_marks or self.encode_special_tokens

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        if not self.encode_special_tokens:
            return super()._tokenize(text)
        pattern = "|".join(re.escape(role) for role in ROLES)
        tokens: list[str] = []
        for part in re.split(f"({pattern})", text):
            tokens += [part] if part in ROLES else self.sp_model.encode(part, out_type=str) if part else []
        return tokens

    def _convert_id_to_token(self, index: int) -> str:
        plain = self._plain_id(index)
        return self.command_names[index] if plain is None else plain

    def build_single_message(self, role: str, metadata: str, message: str) -> list[int]:
        """Ids of one message: its role token, the metadata line, the content, each encoded by itself."""
        role_token = f"<|{role}|>"
        if role_token not in ROLES:
            raise ValueError(f"role {role!r} is unknown: one of system, user, assistant, observation")
        line = self.encode(f"{metadata}\n", add_special_tokens=False)
        return [self.command_ids[role_token], *line, *self.encode(message, add_special_tokens=False)]
