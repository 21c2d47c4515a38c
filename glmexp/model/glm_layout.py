"""ChatGLM2 and ChatGLM3 weights and adapters as transformers' ``GlmForCausalLM`` has them, and back.

The two networks compute the same function from the same numbers (in float32; in bfloat16 the product of RMSNorm is
rounded at another place). Only names differ, and the fused query_key_value against q_proj, k_proj and v_proj. What one
of them has no place for is refused.

A LoRA adapter on query_key_value becomes three with the same A, which is exact. The way back is exact too: with one A
the fused adapter has the same rank; where the three differ it holds them one below the other, at three times the rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GlmConfig

from glmexp.config.errors import ArtifactError, Problem
from glmexp.model.configuration import ChatGLM2Config
from glmexp.model.rope import ROPE_BASE

TOP = {
    "transformer.embedding.word_embeddings": "model.embed_tokens",
    "transformer.encoder.final_layernorm": "model.norm",
    "transformer.output_layer": "lm_head",
}
LAYER = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.gate_up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}
LAYERS, GLM_LAYERS = "transformer.encoder.layers.", "model.layers."
FUSED = "self_attention.query_key_value"
SPLIT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ROTARY_SHARE = 0.5


def glm_config(config: ChatGLM2Config) -> GlmConfig:
    """The configuration of the same network as ``GlmForCausalLM``. Raises ArtifactError naming what it has no place
    for.
    """
    wanted: dict[str, Any] = {
        "rmsnorm": True,
        "post_layer_norm": True,
        "add_bias_linear": False,
        "apply_residual_connection_post_layernorm": False,
        "fp32_residual_connection": False,
        "hidden_dropout": 0.0,
        "pre_seq_len": None,
    }
    _refuse(config, wanted, "GlmForCausalLM has no place for it")
    interpolated = config.release == "chatglm2" and config.rope_ratio != 1
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": ROPE_BASE * config.rope_ratio}
    if interpolated:
        # ChatGLM2-32k divides positions; here frequencies are divided: the same up to rounding.
        rope = {"rope_type": "linear", "factor": float(config.rope_ratio), "rope_theta": ROPE_BASE}
    return GlmConfig(
        vocab_size=config.padded_vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.kv_channels,
        max_position_embeddings=config.seq_length,
        rms_norm_eps=config.layernorm_epsilon,
        attention_bias=config.add_qkv_bias,
        attention_dropout=config.attention_dropout,
        tie_word_embeddings=config.tie_word_embeddings,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        initializer_range=config.initializer_range,
        rope_parameters={**rope, "partial_rotary_factor": ROTARY_SHARE},
    )


def chatglm_config(config: GlmConfig, release: str = "chatglm3") -> ChatGLM2Config:
    """The configuration of a ``GlmForCausalLM`` in the released layout. Raises ArtifactError as above.

    ``release``: whose name it gets; the tokenizer and the chat format go by it.
    """
    _refuse(config, {"hidden_act": "silu", "tie_word_embeddings": False}, "the released layout has no place for it")
    rope: dict[str, Any] = dict(config.rope_parameters or {"rope_theta": ROPE_BASE})
    kind, theta = rope.get("rope_type", "default"), float(rope["rope_theta"])
    share = rope.get("partial_rotary_factor", ROTARY_SHARE)
    interpolated = kind == "linear" and release == "chatglm2" and theta == ROPE_BASE
    if share != ROTARY_SHARE or not (
        interpolated or (kind == "default" and (release == "chatglm3" or theta == ROPE_BASE))
    ):
        raise ArtifactError(
            Problem(
                "config.json: rope_parameters",
                f"{rope} has no place in {release}",
                "half of each head is rotated; another base is chatglm3's, positions are divided in chatglm2's",
            )
        )
    ratio = float(rope["factor"]) if interpolated else theta / ROPE_BASE
    return ChatGLM2Config(
        padded_vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        multi_query_attention=True,
        multi_query_group_num=config.num_key_value_heads or config.num_attention_heads,
        kv_channels=config.head_dim or config.hidden_size // config.num_attention_heads,
        seq_length=config.max_position_embeddings,
        layernorm_epsilon=config.rms_norm_eps,
        add_qkv_bias=config.attention_bias,
        attention_dropout=config.attention_dropout or 0.0,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        initializer_range=config.initializer_range,
        rope_ratio=int(ratio) if ratio == int(ratio) else ratio,
        release=release,
    )


def _refuse(config: Any, wanted: Mapping[str, Any], reason: str) -> None:
    problems = [
        Problem(f"config.json: {name}", f"is {getattr(config, name)!r}; {reason}", f"it would have to be {value!r}")
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
    if problems:
        raise ArtifactError(*problems)


def to_glm(state_dict: Mapping[str, Tensor], config: ChatGLM2Config) -> dict[str, Tensor]:
    """Weights of ``ChatGLM2ForConditionalGeneration`` under the names of ``GlmForCausalLM``.

    Raises ArtifactError for a key that has no place there. Inverse frequencies, which follow from the configuration,
    are left out.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if name.endswith("rotary_pos_emb.inv_freq"):
            continue
        module, _, kind = name.rpartition(".")
        places = list(glm_modules(module))
        parts = split_rows(tensor, config) if len(places) == 3 else (tensor,)
        result |= {f"{place}.{kind}": part for place, part in zip(places, parts, strict=True)}
    return result


def from_glm(state_dict: Mapping[str, Tensor], config: GlmConfig) -> dict[str, Tensor]:
    """Weights of ``GlmForCausalLM`` under the released names. Raises ArtifactError for a key without a place, and where
    one of q, k, v is missing."""
    result: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        module, _, kind = name.rpartition(".")
        place, part = chatglm_module(module)
        if part is None:
            result[f"{place}.{kind}"] = tensor
        elif part == 0:
            names = [f"{module.removesuffix(SPLIT[0])}{one}.{kind}" for one in SPLIT]
            missing = [one for one in names if one not in state_dict]
            if missing:
                raise ArtifactError(Problem(missing[0], "is missing beside q_proj", "use the whole checkpoint"))
            result[f"{place}.{kind}"] = torch.cat([state_dict[one] for one in names])
    return result


def split_rows(fused: Tensor, config: ChatGLM2Config) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of query_key_value (rows, ...) to those of q, k, v. Without multi-query they lie head by head."""
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.kv_channels
    if config.multi_query_attention:
        query, key, value = fused.split([heads * width, groups * width, groups * width])
    else:
        query, key, value = (part.flatten(0, 1) for part in fused.unflatten(0, (heads, 3, width)).unbind(1))
    # Copies: safetensors refuses views of one storage.
    return query.clone(), key.clone(), value.clone()


def glm_modules(module: str) -> Iterator[str]:
    """The modules that hold what ``module`` of the released layout holds: three for the fused one."""
    found = re.fullmatch(rf"{re.escape(LAYERS)}(\d+)\.(.+)", module)
    if module in TOP:
        yield TOP[module]
    elif found and found[2] == FUSED:
        yield from (f"{GLM_LAYERS}{found[1]}.{part}" for part in SPLIT)
    elif found and found[2] in LAYER:
        yield f"{GLM_LAYERS}{found[1]}.{LAYER[found[2]]}"
    else:
        raise ArtifactError(Problem(module, "has no place in GlmForCausalLM", "only the network itself is converted"))


def chatglm_module(module: str) -> tuple[str, int | None]:
    """The released module that holds what ``module`` of GlmForCausalLM holds, and which third of it."""
    found = re.fullmatch(rf"{re.escape(GLM_LAYERS)}(\d+)\.(.+)", module)
    for released, glm in TOP.items():
        if module == glm:
            return released, None
    if found and found[2] in SPLIT:
        return f"{LAYERS}{found[1]}.{FUSED}", SPLIT.index(found[2])
    if found:
        for released, glm in LAYER.items():
            if found[2] == glm:
                return f"{LAYERS}{found[1]}.{released}", None
    raise ArtifactError(Problem(module, "has no place in ChatGLM2/3", "only the network itself is converted"))
