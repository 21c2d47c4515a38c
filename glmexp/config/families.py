"""What is known of each model family before any network is built: names of its linear layers and LoRA's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.schema import Family


@dataclass(frozen=True)
class FamilyFacts:
    """Names as they stand in the released checkpoints."""

    layers: str
    """Path of the list of transformer blocks."""
    linear_modules: tuple[str, ...]
    """Last parts of the names of the linear layers in a block: what LoRA can be put on."""
    lora_targets: tuple[str, ...]
    """LoRA's default target modules."""
    native_prefix: bool
    """The network holds a P-Tuning v2 prefix itself (else PEFT does)."""
    sizes: Mapping[str, str]
    """Keys of model.sizes that the family has, each with its key in config.json."""
    tiny: str
    """The shipped model of this family: its tokenizer serves networks with random weights."""


_GLM_LINEARS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_CHATGLM_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "inner_hidden_size",
    "num_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "max_positions": "max_sequence_length",
}
_CHATGLM2_SIZES = {
    "vocab_size": "padded_vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "multi_query_group_num",
    "head_size": "kv_channels",
    "max_positions": "seq_length",
}
_OF_TRANSFORMERS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
}
_QWEN2_SIZES = _OF_TRANSFORMERS | {"tied_embedding": "tie_word_embeddings"}
GLM_SIZES = _OF_TRANSFORMERS | {"head_size": "head_dim"}
"""Of transformers' GlmForCausalLM, which exports of ChatGLM2 and 3 may be."""


def _chatglm2(tiny: str) -> FamilyFacts:
    return FamilyFacts("transformer.encoder.layers", _GLM_LINEARS, ("query_key_value",), True, _CHATGLM2_SIZES, tiny)


FAMILIES: dict[Family, FamilyFacts] = {
    "chatglm": FamilyFacts(
        "transformer.layers", _GLM_LINEARS, ("query_key_value",), True, _CHATGLM_SIZES, "tiny_chatglm"
    ),
    "chatglm2": _chatglm2("tiny_chatglm2"),
    "chatglm3": _chatglm2("tiny"),
    "qwen2": FamilyFacts(
        "model.layers",
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        False,
        _QWEN2_SIZES,
        "tiny_qwen2",
    ),
}

CHATGLM_RELEASES = ("chatglm", "chatglm2", "chatglm3")


def chatglm_release(config: dict[str, Any], default: str | None = "chatglm3") -> str | None:
    """The release that a config.json describes: ``chatglm``, ``chatglm2`` or ``chatglm3``.

    Our own saved field decides, then ``position_encoding_2d``, then the released name. ``default`` is returned when
    nothing tells v2 from v3.
    """
    saved = config.get("release")
    if saved is not None:
        if saved not in CHATGLM_RELEASES:
            raise ConfigError(
                Problem("config.json: release", f"{saved!r} is unknown", f"one of {', '.join(CHATGLM_RELEASES)}")
            )
        return str(saved)
    if "position_encoding_2d" in config:
        return "chatglm"
    name = str(config.get("_name_or_path") or "").lower()
    for release in ("chatglm2", "chatglm3"):
        if release in name:
            return release
    return default
