"""Small random networks and SentencePiece files, made here so that the tests need no checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from glmexp.data.store import Example
from glmexp.model import ChatGLM2Config, ChatGLMConfig
from glmexp.model.auto import register_networks

RELEASES = ("chatglm", "chatglm2", "chatglm3")
FAMILIES = (*RELEASES, "qwen2")
# Special ids of the small v1 vocabulary: [MASK], [gMASK], [sMASK], <unused_0>, sop, eop.
MASK, GMASK, SOP, EOP = 56, 57, 60, 61


def small_config(release: str, **changes: Any) -> Any:
    if release == "chatglm":
        sizes = {
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 2,
            "inner_hidden_size": 48,
            "vocab_size": 64,
        }
        ids = {"bos_token_id": SOP, "eos_token_id": EOP, "pad_token_id": 3}
        return ChatGLMConfig(**{**sizes, **ids, "max_sequence_length": 64, **changes})
    sizes = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "kv_channels": 16, "ffn_hidden_size": 48}
    more = {"padded_vocab_size": 64, "seq_length": 64, "release": release}
    return ChatGLM2Config(**{**sizes, **more, **changes})


def small_network(release: str, attention: str = "sdpa", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random network in float32 and eval mode, with weights large enough to tell positions apart."""
    torch.manual_seed(seed)
    config = small_config(release, initializer_range=0.2, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def network(family: str, attention: str, **changes: Any) -> Any:
    """A small random network of any family, as ``small_network`` makes ChatGLM's."""
    if family != "qwen2":
        return small_network(family, attention, **changes)
    register_networks()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, attn_implementation=attention,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def examples(family: str, sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Example]:
    """Examples of (context, answer) tokens as the family's rows are laid out."""
    chance = random.Random(seed)
    rows = []
    for context, answer in sizes:
        question = [chance.randrange(5, 50) for _ in range(context)]
        reply = [chance.randrange(5, 50) for _ in range(answer)]
        if family == "chatglm":
            ids, given_, learned = [*question, GMASK, SOP, *reply, EOP], context + 2, context + 1
        else:
            ids, given_, learned = [*question, *reply, 2], context, context
        labels = [-100] * learned + ids[learned:]
        text = json.dumps({"messages": [], "label": "1"}).encode()
        rows.append(Example(np.array(ids, np.int32), np.array(labels, np.int32), given_, 1, text))
    return rows


def small_batch(release: str, length: int = 12) -> dict[str, Tensor]:
    """Two rows without pads, and labels on their second half."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 50, (2, length), generator=generator)
    if release == "chatglm":
        ids[:, 4], ids[:, 5] = GMASK, SOP
    labels = ids.masked_fill(torch.arange(length) < length // 2, -100)
    return {"input_ids": ids, "labels": labels}


def make_vocabulary(folder: Path, release: str) -> Path:
    """Train a small SentencePiece file as the release has it: v1 with special pieces inside, v2/v3 without; both with
    byte fallback, so that every text has ids."""
    name = "ice_text" if release == "chatglm" else "tokenizer"
    texts = [
        "你好！有什么可以帮助你的？",
        "What is the capital of France?",
        "[Round 1]\n\n问：\n\n答：",
        "Hello, world",
    ]
    special: dict[str, Any] = {}
    if release == "chatglm":
        special = {
            "pad_id": 3,
            "control_symbols": ["[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>"],
            "user_defined_symbols": ["<n>", "<|tab|>", *(f"<|blank_{width}|>" for width in range(2, 81))],
        }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 4),
        model_prefix=str(folder / name),
        vocab_size=430 if release == "chatglm" else 330,
        hard_vocab_limit=False,
        byte_fallback=True,
        remove_extra_whitespaces=release == "chatglm",
        normalization_rule_name="nmt_nfkc" if release == "chatglm" else "identity",
        minloglevel=2,
        **special,
    )
    return folder / f"{name}.model"


def released_folder(folder: Path, release: str, with_config: bool = True) -> Path:
    """A tokenizer folder in the released layout, with an ``auto_map`` to code that is not there."""
    make_vocabulary(folder, release)
    name = {"chatglm": "THUDM/chatglm-6b", "chatglm2": "THUDM/chatglm2-6b", "chatglm3": "THUDM/chatglm3-6b"}[release]
    settings: dict[str, Any] = {
        "name_or_path": name,
        "tokenizer_class": "ChatGLMTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None]},
    }
    if release == "chatglm":
        settings |= {"num_image_tokens": 0, "gmask_token": "[gMASK]", "end_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if with_config:
        (folder / "config.json").write_text(json.dumps(released_config(release)))
    return folder


def released_config(release: str) -> dict[str, Any]:
    """A config.json as released: the kind in ``_name_or_path`` or a key of v1, no field of ours."""
    config = json.loads(small_config(release).to_json_string())
    for name in ("release", "tie_word_embeddings", "transformers_version", "mask_token_id", "gmask_token_id"):
        config.pop(name, None)
    suffix = release.removeprefix("chatglm")
    config["_name_or_path"] = f"THUDM/chatglm{suffix}-6b"
    config["model_type"] = "chatglm"
    config["auto_map"] = {
        "AutoConfig": "configuration_chatglm.ChatGLMConfig",
        "AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
    }
    return config
