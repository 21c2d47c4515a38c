"""The loss asks for labelled positions alone, and equals cross entropy over all logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from glmexp.data.collate import collate
from glmexp.data.packing import collate_packed, model_inputs
from glmexp.data.store import Example
from glmexp.engine import loss as loss_module
from glmexp.engine.loss import cross_entropy_sum, forward_loss, loss_sum
from tests.model.samples import FAMILIES, GMASK, examples, network
from tests.ranks import run_on_ranks

SETTINGS = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def rows(family: str) -> list[Example]:
    return examples(family, [(3, 2), (6, 4), (1, 5)])


def batch_of(family: str) -> dict[str, torch.Tensor]:
    """Three rows of different lengths, the last without labels."""
    first, second, third = rows(family)
    return collate([first, second, third.blank()], 3)


def plain(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy over all logits, shifted by one."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), reduction="sum")


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_labelled_positions_is_that_of_all_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it comes in chunks of three rows of logits; no other position gets logits."""
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 3 * 64)
    model, batch = network(family, "sdpa"), batch_of(family)
    plain_loss = plain(model, batch)
    plain_loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    sizes: list[tuple[int, ...]] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda *passed: sizes.append(tuple(passed[-1].shape)))
    found = forward_loss(model, {"input_ids": batch["input_ids"]}, batch)
    handle.remove()
    found.backward()
    supervised = sum(row.supervised_tokens for row in rows(family)[:2])
    assert sizes == [(supervised, 64)]
    assert abs(float(found.detach()) - float(plain_loss.detach())) / supervised <= 1e-6
    assert float((gradients(model) - wanted).norm() / wanted.norm()) <= 1e-6
    assert not head._forward_pre_hooks, "the network gives all logits again"


@pytest.mark.parametrize("family", ["chatglm3", "qwen2"])
def test_rows_without_a_label_give_zero_and_zero_gradients(family: str) -> None:
    """Every rank passes as many micro batches, and every parameter must have a gradient to reduce."""
    model = network(family, "sdpa")
    batch = collate([row.blank() for row in rows(family)], 3)
    found = forward_loss(model, {"input_ids": batch["input_ids"]}, batch)
    found.backward()
    assert float(found.detach()) == 0.0
    assert all(p.grad is not None and not bool(p.grad.any()) for p in model.parameters())


def test_the_chunked_cross_entropy_is_as_exact_in_16_bit_as_torch_own() -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(40, 300)).bfloat16().requires_grad_()
    targets = torch.randint(300, (40,))
    exact = F.cross_entropy(logits.float(), targets, reduction="sum")
    exact.mul(0.5).backward()
    wanted, logits.grad = logits.grad, None
    assert wanted is not None
    found = cross_entropy_sum(logits, targets)
    found.mul(0.5).backward()
    assert logits.grad is not None
    assert found.dtype == torch.float32
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad, wanted, atol=0, rtol=2**-7)  # one unit in the last place of bfloat16
    assert float(found.detach()) == pytest.approx(float(exact.detach()))


def test_labels_of_a_whole_batch_and_places_of_it_are_the_same_loss() -> None:
    batch = batch_of("chatglm3")
    assert np.array_equal(batch["targets"].numpy(), batch["labels"][:, 1:][batch["labels"][:, 1:] != -100].numpy())
    model = network("chatglm3", "sdpa")
    with torch.no_grad():
        everything = loss_sum(model(input_ids=batch["input_ids"], use_cache=False).logits, batch["labels"])
        assert float(forward_loss(model, {"input_ids": batch["input_ids"]}, batch)) == pytest.approx(float(everything))


def partitioned(families: tuple[str, ...]) -> list[list[tuple[float, float]]]:
    """By family three steps under ZeRO-3: this rank's loss as the loop takes it, and by all logits of the same
    weights; the last step with packed rows and gradient checkpointing."""
    import deepspeed

    found = []
    for family in families:
        kind = "sdpa" if family == "chatglm" else "varlen"
        model = network(family, kind).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, config=SETTINGS, optimizer=optimizer)
        batch, pairs = batch_of(family), []
        for _ in range(3):
            with torch.no_grad():
                wanted = plain(engine, batch)
            summed = forward_loss(engine, {"input_ids": batch["input_ids"]}, batch)
            engine.backward(summed / len(batch["targets"]))
            engine.step()
            pairs.append((float(summed.detach()), float(wanted)))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        wanted, packed = plain(engine, batch).detach(), collate_packed([rows(family)[:2]], 3, 64)
        summed = forward_loss(engine, model_inputs(packed, family, GMASK, kind), packed)  # type: ignore[arg-type]
        engine.backward(summed / len(packed["targets"]))
        engine.step()
        pairs.append((float(summed.detach()), float(wanted)))
        engine.destroy()
        found.append(pairs)
    return found


@pytest.mark.matrix
def test_partitioned_output_layers_give_the_same_loss(tmp_path: Path) -> None:
    for rank in run_on_ranks(partitioned, FAMILIES, folder=tmp_path):
        for family, pairs in zip(FAMILIES, rank, strict=True):
            assert pairs[2][0] < pairs[0][0], "it learns"
            for found, wanted in pairs:
                assert abs(found - wanted) / len(batch_of(family)["targets"]) <= 1e-6


def test_the_fused_softmax_is_the_one_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that a GPU compiles, here as they stand: compiling is torch's business."""
    monkeypatch.setattr(loss_module, "_compiled", lambda function: function)
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 3 * 50)
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(11, 50, generator=chance, requires_grad=True)
    targets = torch.randint(0, 50, (11,), generator=chance)
    found = []
    for fused in (False, True):
        loss = cross_entropy_sum(logits, targets, fused)
        found.append((loss, *torch.autograd.grad(loss * 0.5, logits)))
    wanted = F.cross_entropy(logits, targets, reduction="sum")
    found.append((wanted, *torch.autograd.grad(wanted * 0.5, logits)))
    for one in found[:2]:
        torch.testing.assert_close(one, found[2], rtol=1e-6, atol=1e-6)
    assert cross_entropy_sum(logits[:0], targets[:0], fused=True) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_on_a_gpu_the_softmax_is_as_exact_as_in_chunks() -> None:
    chance = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(700, 152064, generator=chance, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 152064, (700,), generator=chance, device="cuda")
    exact = F.cross_entropy(logits.double(), targets, reduction="sum")
    (wanted,) = torch.autograd.grad(exact, logits)
    for fused in (False, True):
        loss = cross_entropy_sum(logits, targets, fused)
        assert float(loss) == pytest.approx(float(exact), rel=1e-6)
        (found,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-9)  # a bfloat16 has 8 bits
