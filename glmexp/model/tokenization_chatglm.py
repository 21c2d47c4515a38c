"""Tokenizer of ChatGLM-6B (v1): SentencePiece with pieces of its own for line breaks, tabs and runs of spaces."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from sentencepiece import SentencePieceProcessor
from transformers import AddedToken, PreTrainedTokenizer

from glmexp.config.errors import ConfigError, Problem

LINE_BREAK, TAB, LONGEST_BLANK = "<n>", "<|tab|>", 80
BLANKS = re.compile(f" {{2,{LONGEST_BLANK}}}")
BLANK_PIECE = re.compile(r"<\|blank_(\d+)\|>")


class ChatGLM1Tokenizer(PreTrainedTokenizer):
    """ChatGLM-6B's tokenizer. A text is followed by ``[gMASK] <sop>``; a pair is ``a [gMASK] <sop> b <eop>``.

    Written in a text, ``[MASK]``, ``<sop>``, ``<eop>``, ``<pad>`` and ``<unk>`` are read as special tokens, as
    released (``split_special_tokens=True`` reads them as text). The file normalises (full width to ASCII): text does
    not round-trip. Padding (left unless asked otherwise) or a length limit adds ``attention_mask`` (1, length,
    length), True = hidden, and ``position_ids`` (2, length), in which [MASK] goes before [gMASK]; without them only
    ids are returned.

    ``num_image_tokens``: ids in front of the pieces; 20,000 in the first release, and by default, as there.
    """

    release: ClassVar[str] = "chatglm"
    vocab_files_names = {"vocab_file": "ice_text.model"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask", "position_ids"]  # noqa: RUF012
    padding_side = "left"

    gmask_token = "[gMASK]"
    end_token = "</s>"

    def __init__(
        self,
        vocab_file: str,
        do_lower_case: bool = False,
        remove_space: bool = False,
        bos_token: Any = "<sop>",
        eos_token: Any = "<eop>",
        mask_token: Any = "[MASK]",
        pad_token: Any = "<pad>",
        unk_token: Any = "<unk>",
        num_image_tokens: int = 20000,
        # Joins " 's" to "'s" and the like in decoded text, as the release does.
        clean_up_tokenization_spaces: bool = True,
        added_tokens_decoder: dict[int, AddedToken] | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_file = vocab_file
        self.do_lower_case, self.remove_space = do_lower_case, remove_space
        self.num_image_tokens = num_image_tokens
        self.sp_model = SentencePieceProcessor(model_file=str(vocab_file))
        # transformers 5 would make every "..._token" one that text can contain; these two are not.
        self.check_fixed({**(kwargs.pop("model_specific_special_tokens", None) or {}), **kwargs})
        for name in ("gmask_token", "end_token"):
            kwargs.pop(name, None)
        tokens = {
            "bos_token": str(bos_token),
            "eos_token": str(eos_token),
            "mask_token": str(mask_token),
            "pad_token": str(pad_token),
            "unk_token": str(unk_token),
        }
        # Text loses its spaces next to a special token.
        special = {
            self._convert_token_to_id(token): AddedToken(
                token, lstrip=True, rstrip=True, normalized=False, special=True
            )
            for token in tokens.values()
        }
        super().__init__(
            do_lower_case=do_lower_case,
            remove_space=remove_space,
            num_image_tokens=num_image_tokens,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            added_tokens_decoder={**special, **(added_tokens_decoder or {})},
            **tokens,
            **kwargs,
        )

    def check_fixed(self, given: dict[str, Any]) -> None:
        """ConfigError for a tokenizer_config.json that renames the two tokens which the vocabulary fixes."""
        for name in ("gmask_token", "end_token"):
            wanted = getattr(type(self), name)
            if str(given.get(name, wanted)) != wanted:
                raise ConfigError(
                    Problem(f"tokenizer: {name}", f"is {str(given[name])!r}", f"the vocabulary fixes it as {wanted!r}")
                )

    @property
    def gmask_token_id(self) -> int:
        """Id of ``[gMASK]``."""
        return self._convert_token_to_id(self.gmask_token)

    @property
    def end_token_id(self) -> int:
        """Id of ``</s>``, which the chat model does not use; an attribute of the released tokenizer."""
        return self._convert_token_to_id(self.end_token)

    @property
    def vocab_size(self) -> int:
        """Image ids and pieces; the model's vocabulary is padded beyond."""
        return self.sp_model.get_piece_size() + self.num_image_tokens

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""
        vocab = {self._convert_id_to_token(index): index for index in range(self.vocab_size)}
        return {**vocab, **self._added_tokens_encoder}

    def preprocess(self, text: str) -> str:
        """What SentencePiece gets for ``text``: line breaks, tabs and runs of spaces as pieces of their own."""
        if self.remove_space:
            text = " ".join(text.split())
        if self.do_lower_case:
            text = text.lower()
        text = text.replace("\n", LINE_BREAK).replace("\t", TAB)
        return BLANKS.sub(lambda run: f"<|blank_{len(run.group())}|>", text)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.sp_model.encode(self.preprocess(text), out_type=str)

    def _convert_token_to_id(self, token: str) -> int:
        if token.startswith("<image_") and token.endswith(">") and token[7:-1].isdigit():
            index = int(token[7:-1])
            if index < self.num_image_tokens:
                return index
        return self.sp_model.piece_to_id(token) + self.num_image_tokens

    def _convert_id_to_token(self, index: int) -> str:
        if index < self.num_image_tokens:
            return f"<image_{index}>"
        if index >= self.vocab_size:  # the model's vocabulary is padded: such an id has no text
            return ""
        return self.sp_model.id_to_piece(index - self.num_image_tokens)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of a list of tokens; special tokens leave nothing."""
        text = self.sp_model.decode_pieces(tokens).replace(LINE_BREAK, "\n").replace(TAB, "\t")
        return BLANK_PIECE.sub(lambda piece: " " * int(piece.group(1)), text)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """``a [gMASK] <sop>``, or ``a [gMASK] <sop> b <eop>``."""
        pair = [] if token_ids_1 is None else [*token_ids_1, self.eos_token_id]
        return [*token_ids_0, self.gmask_token_id, self.bos_token_id, *pair]

    def pad(self, encoded_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; masks and positions of earlier encodings are made anew for the padded length."""
        drop = ("attention_mask", "position_ids")
        if isinstance(encoded_inputs, Mapping):
            encoded_inputs = {name: value for name, value in encoded_inputs.items() if name not in drop}
        else:
            encoded_inputs = [
                {name: value for name, value in row.items() if name not in drop} for row in encoded_inputs
            ]
        return super().pad(encoded_inputs, *args, **kwargs)

    def _pad(
        self,
        encoded_inputs: Any,
        max_length: int | None = None,
        *args: Any,
        padding_side: str | None = None,
        return_attention_mask: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        ids = encoded_inputs["input_ids"]
        padded = super()._pad(  # type: ignore[misc]
            encoded_inputs, max_length, *args, padding_side=padding_side, return_attention_mask=False, **kwargs
        )
        if (max_length is None and len(padded["input_ids"]) == len(ids)) or return_attention_mask is False:
            return padded
        extra = len(padded["input_ids"]) - len(ids)
        fill = (extra, 0) if (padding_side or self.padding_side) == "left" else (0, extra)
        hidden, positions = self.mask_and_positions(ids)
        padded["attention_mask"] = np.pad(hidden, ((0, 0), fill, fill), constant_values=True)
        padded["position_ids"] = np.pad(positions, ((0, 0), fill))
        return padded

    def mask_and_positions(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The released mask (1, length, length), True = hidden, and positions (2, length) of one row without pads.

        Without sop the whole row is context; without a mask token positions count on.
        """
        length = len(ids)
        context = ids.index(self.bos_token_id) if self.bos_token_id in ids else length
        visible = np.tril(np.ones((length, length), dtype=bool))
        visible[:, :context] = True
        positions = np.stack([np.arange(length), np.maximum(np.arange(length) - context + 1, 0)])
        mask_token = self.mask_token_id if self.mask_token_id in ids else self.gmask_token_id
        if mask_token in ids:
            positions[0, context:] = ids.index(mask_token)
        return ~visible[None], positions

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write the SentencePiece file under its released name."""
        return save_sentencepiece(self, save_directory, filename_prefix)


def save_sentencepiece(tokenizer: Any, save_directory: str, filename_prefix: str | None) -> tuple[str, ...]:
    """Copy the SentencePiece file of a tokenizer to ``save_directory``; returns its path."""
    name = tokenizer.vocab_files_names["vocab_file"]
    target = Path(save_directory, f"{filename_prefix}-{name}" if filename_prefix else name)
    if not Path(tokenizer.vocab_file).is_file():
        target.write_bytes(tokenizer.sp_model.serialized_model_proto())
    elif not target.exists() or not target.samefile(tokenizer.vocab_file):
        shutil.copyfile(tokenizer.vocab_file, target)
    return (str(target),)
