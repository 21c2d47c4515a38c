"""The leak gate: what leaks is refused with its reason; what does not keeps its bits, in every family and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from glmexp.config.compose import run_config
from glmexp.config.ds_config import lower
from glmexp.config.errors import DataError
from glmexp.config.families import FAMILIES
from glmexp.data.packing import collate_packed, model_inputs
from glmexp.data.store import Example
from glmexp.engine import build, distributed, leak
from glmexp.engine.loss import loss_sum, padded_inputs, supervised_tokens
from tests.engine.cells import configure
from tests.model.samples import EOP, GMASK, SOP, small_network
from tests.ranks import run_on_ranks

RANDOM_ANSWER = 16
"""Different tokens that an answer is drawn from."""
ANSWER = 6


def released_rows(count: int, seed: int) -> dict[str, Tensor]:
    """ChatGLM-6B rows as the model expects them, with random answers: prompt [gMASK] sop answer eop."""
    prompt, answer = _random_parts(count, seed)
    ids = torch.cat([prompt, _column(GMASK, count), _column(SOP, count), answer, _column(EOP, count)], dim=1)
    return _labelled(ids, slice(prompt.shape[1] + 1, ids.shape[1]))


def tutorial_rows(count: int, seed: int) -> dict[str, Tensor]:
    """The same texts as a well-known tutorial encodes them: prompt and answer are one text, [gMASK] sop come last."""
    prompt, answer = _random_parts(count, seed)
    ids = torch.cat([prompt, answer, _column(EOP, count), _column(GMASK, count), _column(SOP, count)], dim=1)
    return _labelled(ids, slice(prompt.shape[1], prompt.shape[1] + ANSWER + 1))


def _random_parts(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(5, 13, (count, 4), generator=generator)
    return prompt, torch.randint(20, 20 + RANDOM_ANSWER, (count, ANSWER), generator=generator)


def _column(token: int, count: int) -> Tensor:
    return torch.full((count, 1), token)


def _labelled(ids: Tensor, learned: slice) -> dict[str, Tensor]:
    labels = torch.full_like(ids, -100)
    labels[:, learned] = ids[:, learned]
    return {"input_ids": ids, "labels": labels, "lengths": torch.full((len(ids),), ids.shape[1])}


def row(batch: dict[str, Tensor], prompt: int | None = None) -> leak.Row:
    return leak.Row(batch, prompt, "row 1")


def causal_row(padding: int = 0) -> dict[str, Tensor]:
    """prompt answer end, for ChatGLM2, ChatGLM3 and Qwen2."""
    ids = torch.tensor([[9, 8, 7, 6, 21, 22, 23, 24, 2, *[0] * padding]])
    batch = _labelled(ids, slice(4, 9))
    return {**batch, "lengths": torch.tensor([9])}


def qwen2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, initializer_range=0.2, **sizes)).eval()


def network(family: str, method: str, dtype: torch.dtype) -> nn.Module:
    model = qwen2() if family == "qwen2" else small_network(family)
    words = [f"method={method}"] + (["method.num_virtual_tokens=3"] if method == "ptuning" else [])
    applied = configure("train.gradient_checkpointing=false", *words).method.apply(model.to(dtype), FAMILIES[family])
    return applied.to(dtype)


def test_the_leak_of_the_tutorial_is_real_and_is_refused() -> None:
    """Trained on fresh random answers: nobody can guess them, and yet the loss falls to 0 by copying."""
    losses = {}
    for rows in (tutorial_rows, released_rows):
        model = small_network("chatglm", hidden_size=64, inner_hidden_size=128).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(260):
            batch = rows(32, step)
            loss = loss_sum(model(input_ids=batch["input_ids"]).logits, batch["labels"])
            loss = loss / supervised_tokens(batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[rows] = float(loss.detach())
        batch = rows(1, 0)
        if rows is tutorial_rows:
            with pytest.raises(DataError) as refused:
                leak.check(model, [row(batch)], padded_inputs, {EOP})
            assert "a prediction sees its own answer" in str(refused.value)
            assert "The answer stands before sop (token 12)" in str(refused.value)
            assert "prompt [gMASK] sop answer eop" in str(refused.value)
        else:
            assert "passed" in leak.check(model, [row(batch)], padded_inputs, {EOP})
    assert losses[tutorial_rows] < 0.05
    # sop and eop are certain, each of the ANSWER tokens between them costs the logarithm of the choices.
    assert losses[released_rows] > 0.9 * math.log(RANDOM_ANSWER) * ANSWER / (ANSWER + 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["full", "lora", "ptuning"])
@pytest.mark.parametrize("family", ["chatglm", "chatglm2", "chatglm3", "qwen2"])
def test_honest_rows_keep_their_bits(family: str, method: str, dtype: torch.dtype) -> None:
    model = network(family, method, dtype)
    rows = [released_rows(1, 0)] if family == "chatglm" else [causal_row(), causal_row(padding=5)]
    for batch in rows:
        for change in leak._changes(model.eval(), padded_inputs(batch), batch["labels"][0]):
            assert (change.size, change.noise) == (0.0, 0.0)
    assert leak.check(model, [row(batch) for batch in rows], padded_inputs, {2, EOP}).startswith("leak gate: passed")


@pytest.mark.parametrize("family", ["chatglm", "chatglm2", "chatglm3", "qwen2"])
def test_packed_rows_keep_their_bits(family: str) -> None:
    model = network(family, "lora", torch.float32)
    single = [released_rows(1, seed) for seed in (0, 1)] if family == "chatglm" else [causal_row(), causal_row()]
    given = 6 if family == "chatglm" else 4
    examples = [
        Example(one["input_ids"][0].int().numpy(), one["labels"][0].int().numpy(), given, line=1) for one in single
    ]
    batch = collate_packed([examples], 0, 64)

    def inputs(packed: Any) -> dict[str, Tensor]:
        return model_inputs(packed, family, GMASK, "sdpa")

    assert "passed" in leak.check(model, [row(batch)], inputs, {2, EOP})
    if family == "chatglm":
        open_answers = {**batch, "contexts": torch.ones_like(batch["contexts"])}
        with pytest.raises(DataError, match="a prediction sees its own answer"):
            leak.check(model, [row(open_answers)], inputs, {2, EOP})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("reach", [1, 3])
def test_a_mask_that_shows_a_later_token_is_refused(attention: str, reach: int) -> None:
    model, batch = small_network("chatglm3", attention), causal_row()

    def inputs(given: Any) -> dict[str, Tensor]:
        length = given["input_ids"].shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril(reach)[None, None]
        return {"input_ids": given["input_ids"], "attention_mask": mask}

    with pytest.raises(DataError, match="a prediction sees its own answer: predictions of the tokens up to 4 "):
        leak.check(model, [row(batch)], inputs, {2})


def test_a_leak_into_one_late_position_is_found() -> None:
    model, batch = small_network("chatglm3"), causal_row()

    def inputs(given: Any) -> dict[str, Tensor]:
        mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
        mask[0, 0, 7, 8] = True
        return {"input_ids": given["input_ids"], "attention_mask": mask}

    with pytest.raises(DataError, match="predictions of the tokens up to 8 change"):
        leak.check(model, [row(batch)], inputs, {2})


def _nothing(batch: dict[str, Tensor]) -> None:
    batch["labels"].fill_(-100)


def _padding(batch: dict[str, Tensor]) -> None:
    batch["labels"][0, 9:] = batch["input_ids"][0, 9:]


def _copy(batch: dict[str, Tensor]) -> None:
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][0, 9:] = -100


def _prompt(batch: dict[str, Tensor]) -> None:
    batch["labels"][0, 2:4] = batch["input_ids"][0, 2:4]


def _endless(batch: dict[str, Tensor]) -> None:
    batch["labels"][0, 8] = -100


def _shifted(batch: dict[str, Tensor]) -> None:
    batch["labels"][0, 3:8] = batch["labels"][0, 4:9].clone()
    batch["labels"][0, 8] = -100


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_nothing, "row 1: has no supervised token"),
        (_padding, "row 1: 3 tokens of padding are learned"),
        (_copy, "row 1: every token of the prompt is learned: the labels are a copy of the ids"),
        (_prompt, "row 1: 2 tokens of the prompt are learned"),
        (_endless, "row 1: the answer that ends at token 7 has no end token behind it"),
        (_shifted, "row 1: label 21 at token 3 is not the token there (6)"),
    ],
)
def test_wrong_labels_are_refused_by_name(spoil: Callable[[dict[str, Tensor]], None], said: str) -> None:
    batch = causal_row(padding=3)
    spoil(batch)
    with pytest.raises(DataError) as refused:
        leak.check(small_network("chatglm3"), [row(batch, prompt=4)], padded_inputs, {2})
    assert said in str(refused.value)


def test_padding_goes_by_the_mask_where_pad_and_end_are_one_token() -> None:
    batch = causal_row(padding=3)
    batch["input_ids"][0, 9:] = 2
    assert "passed" in leak.check(small_network("chatglm3"), [row(batch, 4)], padded_inputs, {2})


def every_stage(folder: str, method: str) -> list[str]:
    """On a rank: what the gate says of both layouts at each ZeRO stage, in bf16."""
    said = []
    for stage in range(4):
        words = [f"method={method}", f"zero=stage{stage}", "precision=bf16", "tracker=none"]
        config = run_config([*words, "train.micro_batch_size=1"], ranks=distributed.world_size())
        ds_config = lower(config, distributed.world_size())
        with build.partitioned_loading(ds_config):
            network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model = config.method.apply(network, FAMILIES["chatglm"])
        engine = build.initialize(model, config, ds_config, 1)
        engine.train()
        said.append(leak.check(engine, [row(released_rows(1, 0))], padded_inputs, {EOP}))
        assert engine.training, "the gate leaves the mode as it was"
        try:
            leak.check(engine, [row(tutorial_rows(1, 0))], padded_inputs, {EOP})
        except DataError as error:
            said.append(str(error))
        engine.destroy()
    return said


@pytest.mark.parametrize("method", ["lora", "ptuning"])
def test_every_zero_stage_tells_honest_rows_from_leaking_ones(method: str, tmp_path: Path) -> None:
    small_network("chatglm").save_pretrained(tmp_path / "model")
    for said in run_on_ranks(every_stage, str(tmp_path / "model"), method, folder=tmp_path):
        assert len(said) == 8
        assert all(line.startswith("leak gate: passed") for line in said[::2])
        assert all("The answer stands before sop" in line for line in said[1::2])
