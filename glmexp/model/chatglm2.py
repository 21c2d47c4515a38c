"""ChatGLM2-6B and ChatGLM3-6B: one network (GLM, Du et al. 2022, arXiv:2103.10360), parameters named as released."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from glmexp.model.attention import FusedAttention, decoder_mask
from glmexp.model.base import ChatGLMPreTrainedModel, ChatGLMTransformer, Hidden, Prefix, through
from glmexp.model.configuration import ChatGLM2Config
from glmexp.model.prefix import PrefixEncoder
from glmexp.model.rope import ROPE_BASE, inverse_frequencies, rotate_interleaved, rotation_table
from glmexp.model.slots import LayerSlots
from glmexp.model.varlen import VARLEN


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019): float32 inside, the product with the weight before the cast."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """``states`` (..., width); the result has the same dtype."""
        exact = states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * exact).to(states.dtype)


def make_norm(config: ChatGLM2Config) -> nn.Module:
    """The norm that the configuration names, over hidden_size."""
    if config.rmsnorm:
        return RMSNorm(config.hidden_size, config.layernorm_epsilon)
    return nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)


class SelfAttention(FusedAttention):
    """Grouped-query attention."""

    is_causal = True

    def __init__(self, config: ChatGLM2Config, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.head_size = config.head_size
        self.num_key_value_groups = self.heads // self.groups
        self.scaling, self.dropout = self.head_size**-0.5, config.attention_dropout
        rows = (self.heads + 2 * self.groups) * self.head_size
        bias = config.add_bias_linear or config.add_qkv_bias
        self.query_key_value = nn.Linear(config.hidden_size, rows, bias=bias)
        self.dense = nn.Linear(self.heads * self.head_size, config.hidden_size, bias=config.add_bias_linear)

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fused rows (batch, length, rows) to query, key, value (batch, heads or groups, length, head_size).

        Multi-query: all query heads, then all keys, then all values. Else head by head its q, k, v, as in v1.
        """
        parts: tuple[Tensor, ...]
        if self.config.multi_query_attention:
            states = fused.unflatten(-1, (-1, self.head_size))
            parts = states.split((self.heads, self.groups, self.groups), dim=2)
        else:
            parts = fused.unflatten(-1, (self.heads, 3, self.head_size)).unbind(3)
        query, key, value = (part.transpose(1, 2) for part in parts)
        return query, key, value

    def rotate(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """The first half of each head's channels, in pairs of neighbours."""
        return rotate_interleaved(states, *rotation)

    def at_once(self, fused: Tensor, rotation: tuple[Tensor, Tensor], cache: Any) -> Tensor | None:
        """The kernel of a decoding step, which knows fused rows of grouped queries."""
        if not (isinstance(cache, LayerSlots) and self.config.multi_query_attention and cache.attend_at_once(fused)):
            return None
        keys, values, used = cache.keys, cache.values, cache.filled.used
        return torch.ops.glmexp.turn_and_attend(fused, *rotation, keys, values, used, self.scaling)


class MLP(nn.Module):
    """SwiGLU: ``dense_h_to_4h`` gives gate and value, one after the other."""

    def __init__(self, config: ChatGLM2Config) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=config.add_bias_linear)
        self.dense_4h_to_h = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=config.add_bias_linear)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` (batch, length, hidden) to the same."""
        gate, value = self.dense_h_to_4h(hidden).chunk(2, dim=-1)
        return self.dense_4h_to_h(nn.functional.silu(gate) * value)


class Block(GradientCheckpointingLayer):
    """Pre-norm transformer block."""

    def __init__(self, config: ChatGLM2Config, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = make_norm(config)
        self.self_attention = SelfAttention(config, layer_idx)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = MLP(config)
        self.sums = False
        """Tensor parallel: attention and MLP give this rank's part, and the block adds those of all ranks up."""

    def normed(self, norm: Any, states: Tensor) -> Tensor:
        """The norm's output, in the dtype of the weights where the residual stream is kept in float32."""
        if not self.config.fp32_residual_connection:
            return norm(states)
        return norm(states.to(torch.float32)).to(norm.weight.dtype)

    def add(self, residual: Tensor, states: Tensor) -> Tensor:
        """Residual sum after dropout, in the dtype of the residual stream."""
        if self.sums:
            if residual.dtype == states.dtype:
                return torch.ops.glmexp.sum_over_ranks(states, residual)
            states = torch.ops.glmexp.sum_over_ranks(states, None)
        return residual + nn.functional.dropout(states, self.config.hidden_dropout, self.training)

    def add_and_norm(self, residual: Tensor, states: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """The residual sum, and its norm's output: one kernel where all ranks' parts are added up too."""
        if self.sums and isinstance(norm, RMSNorm) and residual.dtype == states.dtype == norm.weight.dtype:
            return torch.ops.glmexp.sum_and_norm(states, residual, norm.weight, norm.eps)
        total = self.add(residual, states)
        return total, self.normed(norm, total)

    def forward(self, hidden: Tensor, prefix_key: Tensor | None, prefix_value: Tensor | None, **kwargs: Any) -> Tensor:
        """``hidden`` (batch, length, hidden) to the same; ``kwargs`` are the attention's. The prefix is positional:
        reentrant checkpointing passes gradients to positional inputs only."""
        after_norm = self.config.apply_residual_connection_post_layernorm
        normed = self.normed(self.input_layernorm, hidden)
        attended = self.self_attention(normed, prefix_key, prefix_value, **kwargs)
        residual = normed if after_norm else hidden
        hidden, normed = self.add_and_norm(residual, attended, self.post_attention_layernorm)
        return self.add(normed if after_norm else hidden, self.mlp(normed))


class Embedding(nn.Module):
    """Holds ``word_embeddings`` under its released name."""

    def __init__(self, config: ChatGLM2Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.fp32 = config.fp32_residual_connection

    def forward(self, input_ids: Tensor) -> Tensor:
        """``input_ids`` (batch, length) to (batch, length, hidden)."""
        states = self.word_embeddings(input_ids)
        return states.float() if self.fp32 else states


class Encoder(nn.Module):
    """The blocks and the final norm."""

    def __init__(self, config: ChatGLM2Config) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        if config.post_layer_norm:
            self.final_layernorm = make_norm(config)

    def forward(self, hidden: Tensor, prefix: Prefix, collect: bool, **kwargs: Any) -> Hidden:
        """``hidden`` (batch, length, hidden) to the same; with ``collect`` all blocks' inputs and outputs."""
        hidden, collected = through(self.layers, hidden, prefix, collect, **kwargs)
        if self.config.post_layer_norm:
            hidden = self.final_layernorm(hidden)
        return hidden, collected


class Transformer(ChatGLMTransformer):
    """Everything under ``transformer.``; the released names put the output layer here too."""

    def __init__(self, config: ChatGLM2Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.encoder = Encoder(config)
        self.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.prefix_encoder = PrefixEncoder(config) if config.pre_seq_len else None

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for ``positions`` (batch, length): two float32 (batch, 1, length, kv_channels / 4)."""
        config = self.config
        interpolated = config.release == "chatglm2" and config.rope_ratio != 1
        base = ROPE_BASE * (1 if interpolated else config.rope_ratio)
        frequencies = inverse_frequencies(config.kv_channels // 2, positions.device, base)
        scaled = positions.float() / config.rope_ratio if interpolated else positions
        return rotation_table(scaled, frequencies)

    def check_positions(self, positions: Tensor, training: bool) -> None:
        """ValueError for positions at or above seq_length. On an accelerator looking costs a synchronisation, so there
        only the first step of a generation is looked at."""
        limit = self.config.seq_length
        looks = positions.device.type == "cpu" or (not training and positions.shape[1] > 1)
        if positions.device.type == "meta" or not looks or torch.compiler.is_compiling():
            return
        highest = int(positions.max())
        if highest >= limit:
            raise ValueError(f"position {highest} is outside the model's seq_length of {limit}")

    def embed(self, input_ids: Tensor) -> Tensor:
        """(batch, length) to (batch, length, hidden)."""
        return self.embedding(input_ids)

    def positions(
        self, ids: Tensor | None, given: Tensor | None, hidden: Tensor, attention_mask: Tensor | None, past: int
    ) -> Tensor:
        """``given`` (batch, length), or counted on from the cache; checked."""
        if given is None:
            given = torch.arange(past, past + hidden.shape[1], device=hidden.device)[None]
        self.check_positions(given, self.training)
        return given

    def visible(
        self, input_ids: Tensor | None, hidden: Tensor, attention_mask: Tensor | None, past: int, extra: int
    ) -> Tensor | None:
        """See ``attention.decoder_mask``."""
        return decoder_mask(attention_mask, hidden, past, extra)

    def blocks(self, hidden: Tensor, prefix: Prefix, collect: bool, **kwargs: Any) -> Hidden:
        """The encoder."""
        return self.encoder(hidden, prefix, collect, **kwargs)


class ChatGLM2ForConditionalGeneration(ChatGLMPreTrainedModel, GenerationMixin):
    """ChatGLM2-6B and ChatGLM3-6B with the language-model head.

    ``attention_mask``: None (all real); (batch, cached + new), 1 = real; or boolean (batch, 1, new, cached + new),
    True = visible. ``position_ids``: (batch, new); None counts every token from the cache's length on, pads too.
    Right padded training rows need no mask: nothing real looks at a pad, and without a mask the fused causal kernels
    apply. Packed rows: the same boolean mask, or with the attention kind ``varlen`` segments (see ``varlen``). The
    last entry of ``hidden_states`` is before the final norm. A position at or above seq_length is a ValueError.
    """

    config: ChatGLM2Config
    config_class = ChatGLM2Config
    attention_kinds = ("eager", "sdpa", VARLEN)
    _tied_weights_keys = {  # noqa: RUF012
        "transformer.output_layer.weight": "transformer.embedding.word_embeddings.weight"
    }

    def __init__(self, config: ChatGLM2Config) -> None:
        super().__init__(config)
        self.transformer = Transformer(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding module."""
        return self.transformer.embedding.word_embeddings

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the embedding module."""
        self.transformer.embedding.word_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        """The output layer."""
        return self.transformer.output_layer

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Replace the output layer."""
        self.transformer.output_layer = new_embeddings
