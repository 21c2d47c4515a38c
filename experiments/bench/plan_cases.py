"""The configurations that the plan is held against: true shapes, random weights, rows of known lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

SHALLOW, WHOLE, TINY = 4, 28, 2
SMALL = [
    "model.sizes.hidden_size=64", "model.sizes.intermediate_size=96", "model.sizes.num_attention_heads=4",
    "model.sizes.num_key_value_heads=2", "model.sizes.head_size=16", "model.sizes.vocab_size=1408",
]  # fmt: skip
LEARNED = 0.5
"""Share of a row of fixed length that is its answer."""


@dataclass(frozen=True)
class Case:
    """One configuration, and how it shares the machine."""

    name: str
    model: str
    layers: int
    length: int
    overrides: tuple[str, ...]
    gib: int
    """Upper guess of its GPU memory: what may run beside it while it warms up."""
    packed: bool = False
    alone: bool = False
    """Measured without a neighbour: host memory, and what is left of the card."""
    rungs: tuple[int, ...] = ()
    """Rows of micro batches that follow, growing until memory is out."""
    warm_up: int = 2
    steps: int = 5
    small: bool = False

    def words(self, data: str, run: str, ranks: int) -> list[str]:
        """Its command line."""
        own = {word.partition("=")[0] for word in self.overrides}
        words = [
            f"model={self.model}", "model.init=random", f"model.sizes.num_layers={self.layers}", "data=alpaca",
            f"data.train_file={data}", f"data.max_length={self.length}", f"data.packing={str(self.packed).lower()}",
            "data.prepare_workers=1", "data.num_workers=0", f"train.max_steps={self.steps}", "train.epochs=1000",
            "eval=none", "tracker=none", "method.lr=1e-5", f"run.dir={run}",
            "launcher=inprocess" if ranks == 1 else "launcher=env",
        ]  # fmt: skip
        if self.small:
            foreign = {"chatglm": ("head_size", "num_key_value_heads"), "qwen2": ("head_size",)}.get(self.model, ())
            words += [word for word in SMALL if word.partition("=")[0].removeprefix("model.sizes.") not in foreign]
        return [word for word in words if word.partition("=")[0] not in own] + list(self.overrides)

    def as_small(self) -> Case:
        """The same on a CPU in seconds: two narrow layers, short rows."""
        return replace(self, layers=TINY, length=max(64, self.length // 16), small=True, rungs=self.rungs[:2])


def _case(name: str, words: str, gib: int, **more: Any) -> Case:
    """``name``: model, layers, length and the rest, as chatglm3-4-2048-... says."""
    model, layers, length = name.split("-")[:3]
    return Case(name, model, int(layers), int(length), tuple(words.split()), gib, **more)


CKPT = "train.gradient_checkpointing=true"
FP8 = "precision.base=fp8"
CASES = [
    # Packed rows first: their blocks are compiled, half a minute in which others are measured.
    _case("chatglm3-4-8192-lora-s2-packed", "method=lora train.micro_batch_size=1", 22, packed=True),
    _case("qwen2-4-8192-lora-s2-packed", "method=lora train.micro_batch_size=1", 30, packed=True),
    _case("chatglm3-4-2048-full-s2-packed", "method=full train.micro_batch_size=2", 50, packed=True),
    _case("qwen2-4-4096-lora-s2-packed-ckpt", f"method=lora train.micro_batch_size=2 {CKPT}", 24, packed=True),
    _case("chatglm3-4-2048-lora-s2", "method=lora train.micro_batch_size=4", 22),
    _case(
        "chatglm3-4-512-lora-s2-ckpt",
        f"method=lora train.micro_batch_size=8 {CKPT} eval=loss eval.batch_size=8 data.holdout=16 train.save_steps=5",
        16,
    ),
    _case("chatglm3-4-2048-lora-s3", "method=lora zero=stage3 train.micro_batch_size=2", 18),
    _case("chatglm3-4-2048-ptuning-s2", "method=ptuning train.micro_batch_size=2", 18),
    _case("chatglm3-4-512-ptuning-s0-ckpt", f"method=ptuning zero=stage0 train.micro_batch_size=4 {CKPT}", 12),
    _case("chatglm3-4-2048-freeze-s2", "method=freeze train.micro_batch_size=4", 20),
    _case("chatglm3-4-2048-full-s2-accum", "method=full train.micro_batch_size=2 train.grad_accum=2", 60),
    _case("chatglm3-4-512-full-s0-ckpt", f"method=full zero=stage0 train.micro_batch_size=4 {CKPT}", 50),
    _case("chatglm3-4-2048-full-s3-ckpt", f"method=full zero=stage3 train.micro_batch_size=2 {CKPT}", 50),
    _case("qwen2-4-2048-lora-s2-accum", "method=lora train.micro_batch_size=2 train.grad_accum=2", 22),
    _case("qwen2-4-512-full-s2", "method=full train.micro_batch_size=8", 70),
    _case(
        "qwen2-4-8192-full-s3-packed-ckpt", f"method=full zero=stage3 train.micro_batch_size=1 {CKPT}", 80, packed=True
    ),
    _case("qwen2-4-2048-ptuning-s2", "method=ptuning train.micro_batch_size=2", 22),
    _case("qwen2-4-2048-freeze-s3", "method=freeze zero=stage3 train.micro_batch_size=2", 24),
    _case("qwen2-4-512-freeze-s1-ckpt", f"method=freeze zero=stage1 train.micro_batch_size=8 {CKPT}", 20),
    _case(
        "chatglm3-4-2048-full-s2-offload-ckpt",
        f"method=full offload=optimizer offload.adam=torch train.micro_batch_size=2 {CKPT}",
        40,
        alone=True,
        steps=4,
    ),
    _case(
        "qwen2-4-512-full-s3-all-ckpt",
        f"method=full zero=stage3 offload=all offload.adam=torch train.micro_batch_size=8 {CKPT}",
        60,
        alone=True,
        steps=4,
    ),
    _case("chatglm3-28-8192-lora-s2-packed", "method=lora train.micro_batch_size=1", 80, packed=True),
    _case("qwen2-28-8192-lora-s2-packed", "method=lora train.micro_batch_size=1", 90, packed=True),
    _case("chatglm3-28-2048-lora-s2-ckpt", f"method=lora train.micro_batch_size=4 {CKPT}", 34),
    _case("chatglm3-28-512-ptuning-s2", "method=ptuning train.micro_batch_size=8", 60),
    _case("chatglm3-28-2048-freeze-s2", "method=freeze train.micro_batch_size=2", 30),
    _case("qwen2-28-2048-lora-s3-ckpt", f"method=lora zero=stage3 train.micro_batch_size=2 {CKPT}", 40),
    _case("qwen2-28-512-freeze-s2", "method=freeze train.micro_batch_size=8", 36),
    _case("chatglm3-28-2048-full-s2-ckpt", f"method=full train.micro_batch_size=1 {CKPT}", 135, alone=True),
    _case(
        "chatglm3-28-2048-lora-s2-ladder",
        "method=lora train.micro_batch_size=2",
        135,
        alone=True,
        steps=4,
        rungs=(4, 6, 7, 8, 9, 10, 11, 12, 14, 16, 20),
    ),
    _case(
        "qwen2-14-4096-full-s2-ladder-ckpt",
        f"method=full train.micro_batch_size=1 {CKPT}",
        135,
        alone=True,
        steps=4,
        rungs=(8, 16, 24, 32, 36, 38, 40, 42, 44, 48),
    ),
    _case("chatglm3-28-8192-lora-s2-fp8-packed", f"method=lora train.micro_batch_size=1 {FP8}", 60, packed=True),
    _case("chatglm3-4-2048-lora-s2-fp8", f"method=lora train.micro_batch_size=4 {FP8}", 22),
    _case(
        "chatglm3-4-2048-lora-s2-fp8-once",
        f"method=lora train.micro_batch_size=4 {FP8} precision.base_transposed=false",
        22,
    ),
    _case("qwen2-28-2048-lora-s2-fp8-ckpt", f"method=lora train.micro_batch_size=4 {FP8} {CKPT}", 36),
    _case("qwen2-4-2048-freeze-s2-fp8", f"method=freeze train.micro_batch_size=2 {FP8}", 24),
]
TWO_GPUS = [
    _case("chatglm3-4-2048-full-s2", "method=full train.micro_batch_size=2", 0),
    _case("chatglm3-4-2048-full-s2-accum", "method=full train.micro_batch_size=2 train.grad_accum=2", 0),
    _case("chatglm3-4-2048-full-s1", "method=full zero=stage1 train.micro_batch_size=2", 0),
    _case("chatglm3-4-2048-full-s0", "method=full zero=stage0 train.micro_batch_size=2", 0),
    _case("qwen2-4-2048-full-s3-ckpt", f"method=full zero=stage3 train.micro_batch_size=2 {CKPT}", 0),
    _case("chatglm3-4-2048-lora-s3", "method=lora zero=stage3 train.micro_batch_size=2", 0),
    _case("qwen2-4-512-lora-s2", "method=lora train.micro_batch_size=8", 0),
    _case(
        "chatglm3-4-2048-full-s2-offload-ckpt",
        f"method=full offload=optimizer offload.adam=torch train.micro_batch_size=2 {CKPT}",
        0,
        steps=4,
    ),
    _case("chatglm3-28-2048-full-s3-ckpt", f"method=full zero=stage3 train.micro_batch_size=2 {CKPT}", 0),
    _case("qwen2-28-2048-lora-s3-ckpt", f"method=lora zero=stage3 train.micro_batch_size=2 {CKPT}", 0),
]
STUDIES = [
    *(
        _case(f"{model}-28-2048-lora-s2-ckpt", f"method=lora train.micro_batch_size=4 {CKPT}", 34)
        for model in ("chatglm", "chatglm2", "chatglm3", "qwen2")
    ),
    *(
        _case(
            f"chatglm3-4-2048-full-s3-{offload}-ckpt",
            f"method=full zero=stage3 offload={offload} offload.adam=torch train.micro_batch_size=2 {CKPT}",
            40,
            alone=True,
            steps=4,
        )
        for offload in ("optimizer", "all")
    ),
]
"""Rows of experiments/true_size.yaml and of experiments/offload_true_shapes.yaml that are not among the above."""
SETS = {"plan": CASES, "studies": STUDIES}
