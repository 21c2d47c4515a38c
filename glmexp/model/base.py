"""What the models of all releases share: class settings for transformers, and the step from ids to logits and loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from glmexp.model.attention import check_kind
from glmexp.model.head import causal_loss, keep_positions
from glmexp.model.prefix import PrefixEncoder, PrefixMixin, prefix_states
from glmexp.model.varlen import VARLEN

Prefix = list[tuple[Tensor, Tensor]] | list[tuple[None, None]]
"""Keys and values of a P-Tuning prefix by layer; empty without one."""
Hidden = tuple[Tensor, tuple[Tensor, ...] | None]
"""Hidden states (batch, length, hidden) after the final norm, and the collected ones."""


def through(layers: nn.ModuleList, hidden: Tensor, prefix: Prefix, collect: bool, **kwargs: Any) -> Hidden:
    """``hidden`` (batch, length, hidden) through all blocks; with ``collect`` the first's input and each's output."""
    collected = [hidden]
    for index, layer in enumerate(layers):
        key, value = prefix[index] if prefix else (None, None)
        hidden = layer(hidden, key, value, **kwargs)
        if collect:
            collected.append(hidden)
    return hidden, tuple(collected) if collect else None


class ChatGLMTransformer(nn.Module):
    """Everything under ``transformer.``: what is the same in all releases. A subclass says how ids become states, what
    is visible, where tokens stand, and has the blocks."""

    config: Any
    prefix_encoder: PrefixEncoder | None
    embed: Callable[[Tensor], Tensor]
    visible: Callable[..., Tensor | None]
    positions: Callable[..., Tensor]
    rotation: Callable[[Tensor], Any]
    blocks: Callable[..., Hidden]

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        collect: bool,
        **kwargs: Any,
    ) -> Hidden:
        """Hidden states and, with ``collect``, those on the way."""
        if inputs_embeds is not None and input_ids is None:
            hidden = inputs_embeds
        elif input_ids is not None and inputs_embeds is None:
            hidden = self.embed(input_ids)
        else:
            raise ValueError("give either input_ids or inputs_embeds")
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        visible = attention_mask
        if kwargs.get("cu_seq_lens_q") is None:
            extra = self.prefix_encoder.pre_seq_len if self.prefix_encoder is not None else 0
            visible = self.visible(input_ids, hidden, attention_mask, past, extra)
        places = self.positions(input_ids, position_ids, hidden, attention_mask, past)
        return self.blocks(
            hidden,
            prefix_states(self.prefix_encoder, hidden),
            collect,
            rotation=self.rotation(places),
            attention_mask=visible,
            past_key_values=past_key_values,
            **kwargs,
        )


class ChatGLMPreTrainedModel(PrefixMixin, PreTrainedModel):
    """Base of the language models. A subclass has ``transformer``, which gives hidden states, and an output layer, and
    names GenerationMixin itself: transformers looks at the direct bases only."""

    transformer: Any
    attention_kinds: ClassVar[tuple[str, ...]]
    base_model_prefix = "transformer"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # Released files carry inverse frequencies; they follow from the configuration.
    _keys_to_ignore_on_load_unexpected = [r"rotary\w*\.inv_freq$"]  # noqa: RUF012

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """transformers guesses it from the module's source, and does not see that ours go through the interface."""
        return True

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> str:
        """transformers asks here at construction and at ``set_attn_implementation``. ConfigError for another kind."""
        check_kind(attn_implementation, self.attention_kinds, type(self).__name__)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Any = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (batch, length, vocabulary), and the loss over ``labels`` (batch, length; -100 is not counted).

        Masks and positions: see the class. ``use_cache``: None means config.use_cache, and no cache in training.
        ``logits_to_keep``: see ``head.keep_positions``; the loss covers the kept positions. ``hidden_states``: the
        embedding output and each block's output, (batch, length, hidden) each. The P-Tuning prefix adds itself, also
        to the mask; it is not part of the cache. Further ``kwargs`` reach the attention function.

        Raises ValueError for masks or positions of a wrong shape, and for ``cu_seq_lens_q`` without the attention kind
        that reads it (``varlen``).
        """
        if kwargs.get("cu_seq_lens_q") is not None and self.config._attn_implementation != VARLEN:
            raise ValueError(f"cu_seq_lens_q needs attn_implementation={VARLEN!r}: other kinds would not see segments")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden, collected = self.transformer(
            input_ids,
            inputs_embeds,
            attention_mask,
            position_ids,
            past_key_values,
            bool(output_hidden_states),
            **kwargs,
        )
        output_layer: Any = self.get_output_embeddings()
        kept = keep_positions(hidden, logits_to_keep)
        logits = output_layer(kept.to(output_layer.weight.dtype))
        loss = None
        if labels is not None:
            loss = causal_loss(logits, labels, logits_to_keep, num_items_in_batch)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=collected,
        )
        return output if return_dict is None or return_dict else output.to_tuple()
