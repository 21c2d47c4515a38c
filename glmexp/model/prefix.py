"""P-Tuning v2 (Liu et al. 2021, arXiv:2110.07602): trained keys and values in front of every layer's own.

They are inputs of each layer, not a cache: gradient checkpointing drops caches, and it would drop the prefix with
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from glmexp.config.errors import ArtifactError, Problem

if TYPE_CHECKING:
    from glmexp.model.configuration import ChatGLM2Config, ChatGLMConfig

PREFIX_DROPOUT = 0.1
KEY_PREFIX = "transformer.prefix_encoder."


class PrefixEncoder(nn.Module):
    """``transformer.prefix_encoder``: one learned row per virtual token, optionally through a two-layer MLP.

    The row without a projection is as wide as all layers' keys and values. With one, v1's embedding has the hidden
    size and v2/v3's has the full width, as released.
    """

    def __init__(self, config: ChatGLMConfig | ChatGLM2Config) -> None:
        super().__init__()
        assert config.pre_seq_len is not None, "a prefix encoder needs pre_seq_len"
        self.pre_seq_len = config.pre_seq_len
        self.shape = (2 * config.num_layers, config.num_key_value_heads, config.head_size)
        width = self.shape[0] * self.shape[1] * self.shape[2]
        narrow = config.prefix_projection and config.release == "chatglm"
        embedding_width = config.hidden_size if narrow else width
        self.embedding = nn.Embedding(self.pre_seq_len, embedding_width)
        self.trans: nn.Module = nn.Identity()
        if config.prefix_projection:
            self.trans = nn.Sequential(
                nn.Linear(embedding_width, config.hidden_size), nn.Tanh(), nn.Linear(config.hidden_size, width)
            )
        self.dropout = nn.Dropout(PREFIX_DROPOUT)

    def forward(self, slots: Tensor, batch: int) -> Tensor:
        """Keys and values (2 * layers, batch, key/value heads, virtual tokens, head_size): 2N is layer N's key, 2N + 1
        its value. ``slots``: the ids 0..pre_seq_len-1."""
        rows = self.trans(self.embedding(slots)).view(self.pre_seq_len, *self.shape)
        # Expanded before the dropout, so that each row of the batch drops its own, as released.
        return self.dropout(rows.expand(batch, *rows.shape)).permute(2, 0, 3, 1, 4)


def prefix_states(encoder: PrefixEncoder | None, hidden: Tensor) -> list[tuple[Tensor, Tensor] | tuple[None, None]]:
    """Per layer its (key, value), each (batch, key/value heads, virtual tokens, head_size), in the dtype of ``hidden``
    (batch, length, hidden). Empty without an encoder."""
    if encoder is None:
        return []
    slots = torch.arange(encoder.pre_seq_len, device=hidden.device)
    states = encoder(slots, hidden.shape[0]).to(hidden.dtype).unbind(0)
    return list(zip(states[::2], states[1::2], strict=True))


def join_prefix(prefix: Tensor | None, states: Tensor) -> Tensor:
    """Prefix keys (or values) in front of ``states`` (batch, key/value heads, keys, head_size)."""
    return states if prefix is None else torch.cat((prefix.to(states.dtype), states), dim=2)


class PrefixMixin:
    """``add_prefix_encoder`` for both models."""

    def add_prefix_encoder(self: Any, pre_seq_len: int, prefix_projection: bool) -> None:
        """Give the model a new, trainable prefix of ``pre_seq_len`` virtual tokens, initialised with
        ``config.initializer_range``. Freezing the rest is up to the caller.

        Raises ValueError when the model has a prefix already.
        """
        if self.transformer.prefix_encoder is not None:
            raise ValueError(f"the model has a prefix of {self.config.pre_seq_len} virtual tokens already")
        if pre_seq_len < 1:
            raise ValueError(f"pre_seq_len must be at least 1 and is {pre_seq_len}")
        self.config.pre_seq_len, self.config.prefix_projection = pre_seq_len, prefix_projection
        place = next(self.transformer.parameters())
        encoder = PrefixEncoder(self.config)
        for module in encoder.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        encoder.to(device=place.device, dtype=place.dtype)
        encoder.train(self.training)
        self.transformer.prefix_encoder = encoder


def load_prefix(model: Any, state_dict: Mapping[str, Tensor]) -> None:
    """Load a released prefix checkpoint, which holds only ``transformer.prefix_encoder.*``, into ``model``.

    A model without a prefix gets one of the checkpoint's size. Raises ArtifactError, naming every key that is
    missing, is not a prefix weight, or has another shape than the model needs; nothing is changed then.
    """
    embedding = state_dict.get(KEY_PREFIX + "embedding.weight")
    if model.transformer.prefix_encoder is None:
        if embedding is None:
            raise ArtifactError(Problem("prefix checkpoint", f"has no {KEY_PREFIX}embedding.weight"))
        model.add_prefix_encoder(embedding.shape[0], any(key.startswith(KEY_PREFIX + "trans.") for key in state_dict))
        added = True
    else:
        added = False
    own = dict(model.transformer.prefix_encoder.named_parameters(prefix=KEY_PREFIX.rstrip(".")))
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in own.items()}
    problems = [Problem(name, "is missing in the prefix checkpoint") for name in own if name not in state_dict]
    for name, tensor in state_dict.items():
        if name not in own:
            problems.append(Problem(name, "is no weight of this model's prefix encoder"))
        elif tuple(tensor.shape) != shapes[name]:
            problems.append(Problem(name, f"has shape {tuple(tensor.shape)}, the model needs {shapes[name]}"))
    if problems:
        if added:
            model.transformer.prefix_encoder = None
            model.config.pre_seq_len, model.config.prefix_projection = None, False
        raise ArtifactError(*problems)
    with torch.no_grad(), whole_parameters(list(own.values())):
        for name, parameter in own.items():
            parameter.copy_(state_dict[name])


def whole_parameters(parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
    """Gather parameters that ZeRO-3 has partitioned, and write what changed back from rank 0."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
