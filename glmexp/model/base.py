"""What the models of all releases share: class settings for transformers, and the step from ids to logits and loss."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from glmexp.model.attention import check_kind
from glmexp.model.head import causal_loss, keep_positions
from glmexp.model.prefix import PrefixMixin
from glmexp.model.varlen import VARLEN


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
