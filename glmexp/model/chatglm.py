"""ChatGLM-6B (v1; GLM, Du et al. 2022, arXiv:2103.10360), parameters named as released."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from glmexp.model.attention import FusedAttention
from glmexp.model.base import ChatGLMPreTrainedModel, ChatGLMTransformer, Hidden, Prefix, through
from glmexp.model.configuration import ChatGLMConfig
from glmexp.model.positions import check_rows, derive_positions, prefix_lm_mask
from glmexp.model.prefix import PrefixEncoder
from glmexp.model.rope import inverse_frequencies, rotate_halves, rotation_table

# DeepNorm's sqrt(2 * layers); the released code never hands its number of layers down, so it is that of 28 layers.
ALPHA = math.sqrt(2 * 28)

Rotation = list[tuple[Tensor, Tensor]]


class SelfAttention(FusedAttention):
    """Multi-head attention with one or two rotations."""

    is_causal = False

    def __init__(self, config: ChatGLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.heads, self.head_size = config.num_attention_heads, config.head_size
        self.num_key_value_groups = 1
        # The released scores are divided and multiplied by the layer's number too; that cancels and is left out.
        self.scaling = self.head_size**-0.5
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Head by head its q, k, v; (batch, length, rows) to three (batch, heads, length, head_size)."""
        query, key, value = fused.unflatten(-1, (self.heads, 3, self.head_size)).transpose(1, 2).unbind(3)
        return query, key, value

    def rotate(self, states: Tensor, rotation: Rotation) -> Tensor:
        """One part of each head per row of positions."""
        parts = states.chunk(len(rotation), dim=-1)
        return torch.cat([rotate_halves(part, *table) for part, table in zip(parts, rotation, strict=True)], dim=-1)


class MLP(nn.Module):
    """Two layers with the tanh form of GELU."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.inner_hidden_size)
        self.dense_4h_to_h = nn.Linear(config.inner_hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` (batch, length, hidden) to the same."""
        return self.dense_4h_to_h(nn.functional.gelu(self.dense_h_to_4h(hidden), approximate="tanh"))


class Block(GradientCheckpointingLayer):
    """Transformer block whose residual is the normalised input, scaled by alpha."""

    def __init__(self, config: ChatGLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.attention = SelfAttention(config, layer_idx)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.mlp = MLP(config)

    def forward(
        self,
        hidden: Tensor,
        prefix_key: Tensor | None,
        prefix_value: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """``hidden`` (batch, length, hidden) to the same; ``kwargs`` are the attention's. The prefix is positional:
        reentrant checkpointing passes gradients to positional inputs only."""
        normed = self.input_layernorm(hidden)
        attended = self.attention(normed, prefix_key, prefix_value, **kwargs)
        normed = self.post_attention_layernorm(ALPHA * normed + attended)
        return ALPHA * normed + self.mlp(normed)


class Transformer(ChatGLMTransformer):
    """Everything under ``transformer.``."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.prefix_encoder = PrefixEncoder(config) if config.pre_seq_len else None

    def rotation(self, positions: Tensor) -> Rotation:
        """One (cosines, sines) for each row of ``positions`` (batch, 2, length) or (batch, length)."""
        width = self.config.head_size // (2 if self.config.position_encoding_2d else 1)
        frequencies = inverse_frequencies(width, positions.device, half_rounded=True)
        rows = positions.unbind(1) if self.config.position_encoding_2d else (positions,)
        return [rotation_table(row, frequencies) for row in rows]

    def positions(
        self, ids: Tensor | None, given: Tensor | None, hidden: Tensor, attention_mask: Tensor | None, past: int
    ) -> Tensor:
        """``given`` after a check of its shape, or those that the ids tell."""
        if given is not None:
            if given.ndim != (3 if self.config.position_encoding_2d else 2):
                raise ValueError(
                    f"position_ids are {tuple(given.shape)}; ChatGLM-6B has"
                    f" {'(batch, 2, length)' if self.config.position_encoding_2d else '(batch, length)'}"
                )
            return given
        if past:
            raise ValueError("ChatGLM-6B cannot tell the positions of tokens after a cache: give position_ids")
        if ids is None:
            raise ValueError("with inputs_embeds ChatGLM-6B needs its 4D attention_mask and its position_ids")
        check_rows(ids, self.config, self.training)
        real = attention_mask
        if real is not None and real.ndim == 4:
            real = ~real.bool()[:, 0, -1]
        return derive_positions(ids, real, self.config)

    def embed(self, input_ids: Tensor) -> Tensor:
        """(batch, length) to (batch, length, hidden)."""
        return self.word_embeddings(input_ids)

    def visible(
        self, input_ids: Tensor | None, hidden: Tensor, attention_mask: Tensor | None, past: int, extra: int
    ) -> Tensor | None:
        """See ``positions.prefix_lm_mask``."""
        return prefix_lm_mask(input_ids, hidden, attention_mask, past, extra, self.config, self.training)

    def blocks(self, hidden: Tensor, prefix: Prefix, collect: bool, **kwargs: Any) -> Hidden:
        """The blocks and the final norm."""
        hidden, collected = through(self.layers, hidden, prefix, collect, **kwargs)
        hidden = self.final_layernorm(hidden)
        return hidden, (*collected[:-1], hidden) if collected else None


class ChatGLMForConditionalGeneration(ChatGLMPreTrainedModel, GenerationMixin):
    """ChatGLM-6B with the language-model head, tied to the embedding.

    ``attention_mask``: None; (batch, cached + new), 1 = real; or (batch, 1, new, cached + new) with True = HIDDEN, as
    the tokenizer makes it. ``position_ids``: (batch, 2, new). Without them they are read off the ids, in which every
    row needs [gMASK] or [MASK] and sop (else ValueError); then left pads must be named by a mask. In cached steps
    positions must be given. The last entry of ``hidden_states`` is after the final norm.
    """

    config: ChatGLMConfig
    config_class = ChatGLMConfig
    # The mask is bidirectional over the context: kinds that can only be causal do not apply.
    attention_kinds = ("eager", "sdpa")
    _tied_weights_keys = {  # noqa: RUF012
        "lm_head.weight": "transformer.word_embeddings.weight"
    }

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding module."""
        return self.transformer.word_embeddings

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the embedding module."""
        self.transformer.word_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        """The output layer."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Replace the output layer."""
        self.lm_head = new_embeddings

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> None:
        """transformers would count 0, 1, 2, ...; ours are read off the ids in every step."""

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Add the positions of all ids so far; the base class cuts them to the new tokens. One row of positions is what
        transformers counts by itself, and says nothing to a network that has two."""
        one_row = position_ids is not None and position_ids.ndim == 2
        if position_ids is None or (one_row and self.config.position_encoding_2d):
            position_ids = derive_positions(input_ids, attention_mask, self.config)
        return super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids,  # type: ignore[arg-type]
            attention_mask=attention_mask,  # type: ignore[arg-type]
            position_ids=position_ids,
            **kwargs,
        )

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Positions that the user gave: row 0 repeats the mask token's position where the base class counts on."""
        given = model_kwargs.get("position_ids")
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        if given is not None:
            added = updated["position_ids"][..., given.shape[-1] :]
            if self.config.position_encoding_2d:
                added[:, 0] = given[:, 0, -1:]
            else:
                counts = given[:, -1:] == given[:, -2:-1] + 1
                added.copy_(torch.where(counts, added, given[:, -1:]))
        return updated
