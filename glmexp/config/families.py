"""What is known of each model family before any network is built: names of its linear layers and LoRA's defaults."""

from __future__ import annotations

from dataclasses import dataclass

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


_GLM_LINEARS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_CHATGLM2 = FamilyFacts("transformer.encoder.layers", _GLM_LINEARS, ("query_key_value",), True)

FAMILIES: dict[Family, FamilyFacts] = {
    "chatglm": FamilyFacts("transformer.layers", _GLM_LINEARS, ("query_key_value",), True),
    "chatglm2": _CHATGLM2,
    "chatglm3": _CHATGLM2,
    "qwen2": FamilyFacts(
        "model.layers",
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        False,
    ),
}
