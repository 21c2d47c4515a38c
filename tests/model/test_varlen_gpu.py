"""Attention kind varlen on a GPU: as exact as sdpa with a mask, and faster; no micro batch waits for the device."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config

from glmexp.data.packing import collate_packed, model_inputs
from glmexp.data.store import Example
from glmexp.engine.loss import forward_loss
from glmexp.model import ChatGLM2Config, random_init
from glmexp.model.auto import register_networks
from tests.model.samples import GMASK, examples, network, small_network

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = {
    "chatglm3": ChatGLM2Config(
        padded_vocab_size=65024, hidden_size=4096, ffn_hidden_size=13696, num_layers=2, num_attention_heads=32,
        multi_query_group_num=2, kv_channels=128, seq_length=8192, release="chatglm3",
    ),
    "qwen2": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=2, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=8192,
    ),
}  # fmt: skip


def on_gpu(length: int) -> dict[str, Any]:
    """One packed row of about ``length`` tokens on the GPU: examples of 1 to 900 tokens, most of them short."""
    chance, rows = random.Random(0), []
    while (left := length - sum(len(row.input_ids) for row in rows)) > 0:
        count = min(left, 1 if not rows else min(900, int(chance.lognormvariate(5.2, 0.9)) + 2))
        ids = np.array([chance.randrange(100, 60_000) for _ in range(count)], np.int32)
        labels = np.where(np.arange(count) < count // 3, -100, ids)
        rows.append(Example(ids, labels.astype(np.int32), count // 3, 1))
    batch = collate_packed([rows], 0, length)
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in batch.items()}


def step(model: Any, family: str, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits of the supervised positions and all gradients, in float32."""
    kind = model.config._attn_implementation
    model.zero_grad()
    logits: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda *passed: logits.append(passed[-1].detach()))
    loss = forward_loss(model, model_inputs(batch, family, None, kind), batch)  # type: ignore[arg-type]
    handle.remove()
    (loss / len(batch["targets"])).backward()
    return logits[0].float(), torch.cat([p.grad.flatten().float() for p in model.parameters()])


def milliseconds(model: Any, family: str, batch: dict[str, Any], times: int = 10) -> float:
    """Median time of forward and backward."""
    taken = []
    for _ in range(times + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(model, family, batch)
        torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - start))
    return sorted(taken[3:])[times // 2]


@pytest.mark.parametrize("family", list(SHAPES))
def test_on_a_gpu_segments_are_as_exact_as_the_mask_and_faster(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 against float32 on the same weights: at most 1.2 times the error of sdpa (design's tolerance). Step times at
    8,192 packed tokens are printed."""
    register_networks()
    short, whole = on_gpu(2048), on_gpu(8192)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    lines = []
    for kind in ("sdpa", "varlen"):
        model = random_init.build(SHAPES[family], torch.bfloat16, kind, seed=0)
        found[kind] = step(model, family, short)
        torch.cuda.reset_peak_memory_stats()
        lines.append(f"{family} {kind}: {milliseconds(model, family, whole):.1f} ms a step of 8192 tokens")
        lines[-1] += f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    model.set_attn_implementation("sdpa")
    exact = step(model.float(), family, short)
    for name, place in (("logits", 0), ("gradients", 1)):
        error = {k: float((pair[place] - exact[place]).norm() / exact[place].norm()) for k, pair in found.items()}
        lines.append(f"{family} {name}: relative error sdpa {error['sdpa']:.5f}, varlen {error['varlen']:.5f}")
        assert error["varlen"] <= 1.2 * error["sdpa"], lines[-1]
    with capsys.disabled():
        print("", *lines, sep="\n  ")


def test_on_a_gpu_a_prefix_is_seen_by_every_segment() -> None:
    """Flash attention's causal mask is aligned to the last key: keys in front of a segment are seen by all of it."""
    batch = on_gpu(512)
    batch["input_ids"] = batch["input_ids"] % 64
    batch["targets"] = batch["targets"] % 64
    errors = {}
    model = small_network("chatglm3", "sdpa", pre_seq_len=5, seq_length=512).cuda()
    exact = step(model, "chatglm3", batch)
    for kind in ("sdpa", "varlen"):
        model = small_network("chatglm3", kind, pre_seq_len=5, seq_length=512).to("cuda", torch.bfloat16)
        errors[kind] = [
            float((a - b).norm() / b.norm()) for a, b in zip(step(model, "chatglm3", batch), exact, strict=True)
        ]
    for one, plain in zip(errors["varlen"], errors["sdpa"], strict=True):
        assert one <= 1.2 * plain, errors


@pytest.mark.parametrize("family", ["chatglm", *SHAPES])
def test_on_a_gpu_a_packed_micro_batch_waits_for_nothing(family: str) -> None:
    """No size or value is asked of the device between the copy of a batch and the end of its backward pass."""
    kind = "sdpa" if family == "chatglm" else "varlen"
    rows = examples(family, [(3, 2), (6, 1), (9, 5)])
    batch = collate_packed([rows], pad_id=3, budget=64)
    batch = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in batch.items()}
    model = network(family, kind).to("cuda", torch.bfloat16).train()
    for mode in ("default", "error"):  # the first pass loads kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            forward_loss(model, model_inputs(batch, family, GMASK, kind), batch).backward()  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")
