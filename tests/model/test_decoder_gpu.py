"""Recorded decoding on a GPU: the tokens of the plain way in float32, and no more error than it in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from glmexp.model.decoder import Decoder, Way
from tests.model.samples import FAMILIES, network
from tests.model.test_decoder import PAD, Choice, plain, prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(family: str, *lengths: int) -> tuple[Any, Tensor, Tensor]:
    ids, real = prompts(family, *lengths)
    return network(family, "sdpa").cuda(), ids.cuda(), real.cuda()


@pytest.mark.parametrize("way", ["static", "graph", "compiled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_write_what_generate_writes(family: str, way: Way) -> None:
    model, ids, real = on_gpu(family, 9, 4, 6)
    decoder = Decoder(model, way)
    for stop in (63, int(plain(model, ids, real, [63])[0, 3])):
        expected = plain(model, ids, real, [stop])
        assert decoder.generate(ids, real, 12, [stop], PAD, slots=32).tolist() == expected.tolist()
    one_row = plain(model, ids[:1], real[:1], [63])
    assert decoder.generate(ids[:1], real[:1], 12, [63], PAD, slots=32).tolist() == one_row.tolist()


@pytest.mark.parametrize("way", ["graph", "compiled"])
@pytest.mark.parametrize("lengths", [(9,), (9, 4, 6)], ids=["one", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_exact_as_the_plain_way(family: str, lengths: tuple[int, ...], way: Way) -> None:
    model, ids, real = on_gpu(family, *lengths)
    exact = network(family, "sdpa").cuda()
    model = model.to(torch.bfloat16)
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    decoder = Decoder(model, way)
    first = decoder.generate(ids, real, 2, [63], PAD)[:, :1]
    assert decoder.step is not None
    assert decoder.step.logits is not None
    whole, mask = torch.cat((ids, first), dim=1), torch.cat((real, torch.ones_like(first)), dim=1)
    with torch.no_grad():
        truth = exact(input_ids=whole, attention_mask=mask, use_cache=False).logits[:, -1]
        uncached = model(input_ids=whole, attention_mask=mask, use_cache=False).logits[:, -1]
    off, allowed = ((one.float() - truth).norm() for one in (decoder.step.logits, uncached))
    assert off <= 1.2 * allowed


def test_sampling_is_recorded_with_its_own_random_numbers() -> None:
    model, ids, real = on_gpu("chatglm3", 9, 4)
    decoder = Decoder(model, "graph")
    choosing = Choice(temperature=1.5, top_k=20, top_p=0.95, repetition_penalty=1.1)
    torch.manual_seed(0)
    first, second = (decoder.generate(ids, real, 12, [63], PAD, choosing, slots=32).tolist() for _ in range(2))
    assert first != second, "each replay draws anew"
