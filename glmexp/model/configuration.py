"""Configurations of ChatGLM-6B (v1) and of ChatGLM2/3-6B (v2, v3), read from the released config.json alone.

All three releases say ``model_type: chatglm``. The key ``position_encoding_2d`` marks v1. ChatGLM2 and ChatGLM3 are
the same network in float32 except for ``rope_ratio``; only the released name tells them apart, and transformers
replaces that name by the local folder, so both classes keep it in a field of their own, ``release``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.families import chatglm_release
from glmexp.model.auto import register_networks


class ChatGLMFamilyConfig(PreTrainedConfig):
    """What ``AutoConfig`` finds for ``model_type: chatglm``; ``from_dict`` picks the class of the release."""

    model_type: ClassVar[str] = "chatglm"

    release: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True
    initializer_range: float = 0.02
    layernorm_epsilon: float = 1e-5
    pre_seq_len: int | None = None
    prefix_projection: bool = False
    quantization_bit: int = 0

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Build the configuration of the release that ``config_dict`` describes.

        Raises ConfigError when a concrete class is asked to read another release's file.
        """
        found = chatglm_release(config_dict)
        wanted: type[ChatGLMFamilyConfig] = ChatGLMConfig if found == "chatglm" else ChatGLM2Config
        if cls is ChatGLMFamilyConfig:
            return wanted.from_dict(config_dict, **kwargs)  # type: ignore[return-value]
        if not issubclass(cls, wanted):
            raise ConfigError(
                Problem("config.json", f"describes {found}, which {cls.__name__} cannot read", f"use {wanted.__name__}")
            )
        ratio = config_dict.get("rope_ratio", 1)
        if ratio != 1 and chatglm_release(config_dict, default=None) is None:
            raise ConfigError(
                Problem(
                    "config.json: rope_ratio",
                    f"{ratio} means another RoPE in ChatGLM2 (positions are divided) than in ChatGLM3 (the base is"
                    " multiplied), and nothing in the file tells which of the two it is",
                    'add "release": "chatglm2" or "release": "chatglm3" to config.json',
                )
            )
        return super().from_dict({**config_dict, "release": found}, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # A network is found by the class of a configuration object, so this is early enough; and a tokenizer alone
        # needs none.
        register_networks()
        if self.quantization_bit:
            raise ConfigError(
                Problem(
                    "config.json: quantization_bit",
                    f"{self.quantization_bit}-bit packed weights cannot be trained",
                    "use the checkpoint with 16-bit weights",
                )
            )


class ChatGLMConfig(ChatGLMFamilyConfig):
    """ChatGLM-6B. Defaults are the released 6B sizes; ``mask_token_id`` and ``gmask_token_id`` follow ``bos_token_id``
    where a file (the first release, 150,528 ids) does not name them."""

    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "intermediate_size": "inner_hidden_size",
        "max_position_embeddings": "max_sequence_length",
    }

    release: str | None = "chatglm"
    vocab_size: int = 130528
    hidden_size: int = 4096
    num_layers: int = 28
    num_attention_heads: int = 32
    inner_hidden_size: int = 16384
    max_sequence_length: int = 2048
    position_encoding_2d: bool = True
    bos_token_id: int | None = 130004
    eos_token_id: int | list[int] | None = 130005
    pad_token_id: int | None = 3
    mask_token_id: int | None = None
    gmask_token_id: int | None = None
    # The released file does not say so, but loading ties the two tensors; transformers 5 has no default.
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.bos_token_id is not None:
            # In both vocabularies the ids are [MASK], [gMASK], [sMASK], <unused_0>, <sop>.
            self.mask_token_id = self.bos_token_id - 4 if self.mask_token_id is None else self.mask_token_id
            self.gmask_token_id = self.bos_token_id - 3 if self.gmask_token_id is None else self.gmask_token_id
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                Problem(
                    "config.json: hidden_size",
                    f"{self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}",
                )
            )

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """Key/value heads: in v1 every head has its own."""
        return self.num_attention_heads


class ChatGLM2Config(ChatGLMFamilyConfig):
    """ChatGLM2-6B and ChatGLM3-6B. Defaults are the released ChatGLM3-6B sizes."""

    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "vocab_size": "padded_vocab_size",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "seq_length",
    }

    release: str | None = "chatglm3"
    padded_vocab_size: int = 65024
    hidden_size: int = 4096
    num_layers: int = 28
    num_attention_heads: int = 32
    kv_channels: int = 128
    ffn_hidden_size: int = 13696
    seq_length: int = 8192
    multi_query_attention: bool = True
    multi_query_group_num: int = 2
    add_bias_linear: bool = False
    add_qkv_bias: bool = True
    rmsnorm: bool = True
    post_layer_norm: bool = True
    apply_residual_connection_post_layernorm: bool = False
    fp32_residual_connection: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    rope_ratio: float | int = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                Problem(
                    "config.json: multi_query_group_num",
                    f"{self.multi_query_group_num} does not divide num_attention_heads {self.num_attention_heads}",
                )
            )

    @property
    def head_size(self) -> int:
        """Width of one head; heads times this need not equal hidden_size."""
        return self.kv_channels

    @property
    def num_key_value_heads(self) -> int:
        """Key/value heads ("groups")."""
        return self.multi_query_group_num if self.multi_query_attention else self.num_attention_heads
