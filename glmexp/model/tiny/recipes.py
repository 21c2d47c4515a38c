"""Tokenizer, sizes and schedule of each tiny model. Every one has about a million parameters."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from glmexp.model.chatglm import ChatGLMForConditionalGeneration
from glmexp.model.chatglm2 import ChatGLM2ForConditionalGeneration
from glmexp.model.configuration import ChatGLM2Config, ChatGLMConfig
from glmexp.model.tokenization_chatglm import LINE_BREAK, LONGEST_BLANK, TAB, ChatGLM1Tokenizer
from glmexp.model.tokenization_chatglm2 import ChatGLM2Tokenizer, ChatGLM3Tokenizer

VOCABULARY = 1280
"""Ids of ChatGLM2, ChatGLM3 and Qwen2, special tokens included."""
CHATGLM_VOCABULARY = 1408
"""Ids of ChatGLM (v1), which has 81 pieces for blanks alone; its embedding is tied, so that they cost less."""
CHATGLM_CONTROLS = ("[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>")
"""In the order of the released ids: the configuration counts from <sop> to the mask tokens."""

QWEN2_SYSTEM = "You are a helpful assistant."
QWEN2_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of the released Qwen2 checkpoints (tokenizer_config.json)."""

# Qwen2's own split of a text into words (transformers, models/qwen2/tokenization_qwen2.py).
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Recipe:
    """How one tiny model is made."""

    tokenizer: Callable[[list[str], Path], PreTrainedTokenizerBase]
    """(lines of text, folder for its files) -> tokenizer."""
    network: Callable[[], PreTrainedModel]
    """Freshly initialised, float32."""
    learning_rate: float = 3e-3
    batch_tokens: int = 2560
    """Padded tokens of a batch: batches of short rows hold more rows."""


def sentencepiece_model(lines: list[str], size: int, **settings: Any) -> bytes:
    """A byte-pair SentencePiece model of `size` pieces with byte fallback; `settings` are those of its trainer."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        max_sentencepiece_length=16,
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    return model.getvalue()


def chatglm_tokenizer(lines: list[str], folder: Path) -> PreTrainedTokenizerBase:
    """Normalises as the released file does. Special tokens and blanks are pieces; here they come first."""
    blanks = [f"<|blank_{count}|>" for count in range(2, LONGEST_BLANK + 1)]
    settings = {
        "normalization_rule_name": "nmt_nfkc",
        "pad_id": 3,
        "control_symbols": list(CHATGLM_CONTROLS),
        "user_defined_symbols": [LINE_BREAK, TAB, *blanks],
    }
    file = folder / "ice_text.model"
    file.write_bytes(sentencepiece_model(lines, CHATGLM_VOCABULARY, **settings))
    return ChatGLM1Tokenizer(str(file), num_image_tokens=0)


def chatglm2_pieces(lines: list[str], folder: Path) -> str:
    """The one file of ChatGLM2 and ChatGLM3: no normalisation. With the nine special tokens of v3: VOCABULARY ids."""
    size = VOCABULARY - len(ChatGLM3Tokenizer.command_tokens)
    file = folder / "tokenizer.model"
    file.write_bytes(
        sentencepiece_model(lines, size, normalization_rule_name="identity", remove_extra_whitespaces=False)
    )
    return str(file)


def chatglm2_tokenizer(lines: list[str], folder: Path) -> PreTrainedTokenizerBase:
    """ChatGLM2's special tokens behind the pieces."""
    return ChatGLM2Tokenizer(chatglm2_pieces(lines, folder))


def chatglm3_tokenizer(lines: list[str], folder: Path) -> PreTrainedTokenizerBase:
    """ChatGLM3's special tokens behind the pieces."""
    return ChatGLM3Tokenizer(chatglm2_pieces(lines, folder))


def qwen2_tokenizer(lines: list[str], folder: Path) -> PreTrainedTokenizerBase:
    """Byte-level byte pairs over Qwen2's words, then its three special tokens in the order of the released ids."""
    words = Tokenizer(models.BPE())
    words.normalizer = normalizers.NFC()
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(QWEN2_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Qwen2 reads a sign and the letters behind it as one word: without this, quotation marks would merge with the first
    # bytes of the words in them. The words of the chat template stand in every chat.
    often = ["system", "user", "assistant", QWEN2_SYSTEM, "“", " “", "”"]
    words.train_from_iterator([*(re.sub("[“”]", "\n", line) for line in lines), *often * 500], trainer)
    trained = json.loads(words.to_str())["model"]
    vocabulary = dict(trained["vocab"])
    vocabulary |= {token: len(trained["vocab"]) + index for index, token in enumerate(QWEN2_SPECIAL)}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[tuple(pair) for pair in trained["merges"]],  # type: ignore[misc]  # pairs, whatever the hint says
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=QWEN2_TEMPLATE,
        model_max_length=2048,
    )


def chatglm_network() -> PreTrainedModel:
    """0.97 M parameters: 4 layers of hidden size 128, 4 heads, embedding and output tied."""
    sop = 4 + CHATGLM_CONTROLS.index("<sop>")  # behind <unk>, <s>, </s> and <pad>
    return ChatGLMForConditionalGeneration(
        ChatGLMConfig(
            vocab_size=CHATGLM_VOCABULARY,
            hidden_size=128,
            num_layers=4,
            num_attention_heads=4,
            inner_hidden_size=512,
            max_sequence_length=2048,
            bos_token_id=sop,
            eos_token_id=sop + 1,
            pad_token_id=3,
        )
    )


def chatglm2_network(release: str) -> PreTrainedModel:
    """1.05 M parameters: 4 layers of hidden size 128, 4 heads in 2 groups."""
    return ChatGLM2ForConditionalGeneration(
        ChatGLM2Config(
            padded_vocab_size=VOCABULARY,
            hidden_size=128,
            num_layers=4,
            num_attention_heads=4,
            kv_channels=32,
            multi_query_group_num=2,
            ffn_hidden_size=344,
            seq_length=2048,
            release=release,
        )
    )


def qwen2_network() -> PreTrainedModel:
    """1.05 M parameters, the same shape as the ChatGLM3 one."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=VOCABULARY - 3,
            eos_token_id=VOCABULARY - 1,
            pad_token_id=VOCABULARY - 3,
        )
    )


RECIPES = {
    "tiny": Recipe(chatglm3_tokenizer, partial(chatglm2_network, "chatglm3")),
    "tiny_chatglm": Recipe(chatglm_tokenizer, chatglm_network, batch_tokens=1024),
    "tiny_chatglm2": Recipe(chatglm2_tokenizer, partial(chatglm2_network, "chatglm2")),
    "tiny_qwen2": Recipe(qwen2_tokenizer, qwen2_network),
}
