"""Decoding over slots: the tokens and logits of transformers' own generation, for every family."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from glmexp.config.errors import ConfigError
from glmexp.model import decoder as decoder_module
from glmexp.model.choosing import choose, warped
from glmexp.model.decoder import Decoder, Step, applies
from glmexp.model.rope import rotate_interleaved
from tests.model.samples import FAMILIES, GMASK, RELEASES, SOP, network

PAD = 3


@dataclass(frozen=True)
class Choice:
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None


def prompts(family: str, *lengths: int) -> tuple[Tensor, Tensor]:
    """Left-padded prompts and their mask."""
    chance = torch.Generator().manual_seed(sum(lengths))
    longest = max(lengths)
    ids, real = torch.full((len(lengths), longest), PAD), torch.zeros(len(lengths), longest, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(5, 50, (length,), generator=chance)
        real[row, longest - length :] = 1
        if family == "chatglm":
            ids[row, -2:] = torch.tensor([GMASK, SOP])
    return ids, real


def plain(model: Any, ids: Tensor, real: Tensor, stops: list[int], most: int = 12, **more: Any) -> Tensor:
    with torch.no_grad():
        whole = model.generate(
            input_ids=ids,
            attention_mask=real,
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=PAD,
            **more,
        )
    return whole[:, ids.shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(7,), (9, 4, 6)], ids=["one", "padded"])
def test_tokens_are_those_of_generate(family: str, lengths: tuple[int, ...]) -> None:
    model = network(family, "sdpa")
    ids, real = prompts(family, *lengths)
    free = plain(model, ids, real, [63])
    stops = [int(free[0, 3]), 63]  # ends inside of the answer
    expected = plain(model, ids, real, stops)
    decoder = Decoder(model, "static")
    for _ in range(2):  # the second time with the cache that is there
        found = decoder.generate(ids, real, 12, stops, PAD, slots=40)
        assert found.tolist() == expected.tolist()
    assert plain(model, ids, real, stops).tolist() == expected.tolist(), "the network is as it was"


def test_repetition_penalty_is_that_of_transformers() -> None:
    model = network("chatglm3", "sdpa")
    ids, real = prompts("chatglm3", 9, 4)
    expected = plain(model, ids, real, [63], repetition_penalty=1.8)
    found = Decoder(model, "static").generate(ids, real, 12, [63], PAD, Choice(repetition_penalty=1.8))
    assert found.tolist() == expected.tolist()
    assert expected.tolist() != plain(model, ids, real, [63]).tolist(), "the penalty says something"


def test_a_penalty_is_not_rounded_to_the_format_of_the_logits() -> None:
    """In bf16 10 / 1.05 would be 9.5, no more than the other token has."""
    logits = torch.tensor([[10.0, 9.5]], dtype=torch.bfloat16)
    seen = torch.tensor([[True, False]])
    assert 10 / 1.05 > 9.5
    assert choose(logits, Choice(repetition_penalty=1.05), seen).tolist() == [0]
    assert choose(logits.flip(1), Choice(repetition_penalty=1.05), seen.flip(1)).tolist() == [1]


@pytest.mark.parametrize("family", RELEASES)
def test_a_prefix_lies_in_the_slots(family: str) -> None:
    model = network(family, "sdpa")
    model.add_prefix_encoder(5, prefix_projection=True)
    model.eval()
    ids, real = prompts(family, 6, 8)
    decoder = Decoder(model, "static")
    assert decoder.generate(ids, real, 9, [63], PAD).tolist() == plain(model, ids, real, [63], 9).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_without_a_cache(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(family, "sdpa")
    ids, real = prompts(family, 9, 5)
    seen: list[Tensor] = []
    take = Step.take

    def noting(self: Step, logits: Tensor) -> None:
        seen.append(logits.clone())
        take(self, logits)

    monkeypatch.setattr(Step, "take", noting)
    new = Decoder(model, "static").generate(ids, real, 6, [63], PAD)
    for row, length in enumerate((9, 5)):
        whole = torch.cat((ids[row, 9 - length :], new[row]))[None]
        with torch.no_grad():
            exact = model(input_ids=whole, use_cache=False).logits[0, length - 1 : -1]
        found = torch.stack([logits[row] for logits in seen])
        assert (found - exact[: len(found)]).abs().max() <= 1e-5


def test_reader_gets_each_step_and_can_end_it() -> None:
    model = network("chatglm3", "sdpa")
    ids, real = prompts("chatglm3", 6, 4)
    decoder = Decoder(model, "static")
    got: list[list[int]] = []

    def reader(tokens: list[int]) -> bool:
        got.append(tokens)
        return len(got) == 4

    found = decoder.generate(ids, real, 12, [63], PAD, on_tokens=reader)
    assert [list(column) for column in zip(*found.tolist(), strict=True)] == got
    assert len(got) == 4


def test_a_smaller_batch_is_filled_up_and_finds_the_cache_of_the_last() -> None:
    model = network("chatglm3", "sdpa")
    ids, real = prompts("chatglm3", 9, 4, 6)
    decoder = Decoder(model, "static")
    decoder.generate(ids, real, 8, [63], PAD)
    step = decoder.step
    got: list[list[int]] = []
    found = decoder.generate(ids[1:], real[1:], 8, [63], PAD, rows=3, on_tokens=lambda tokens: got.append(tokens))  # type: ignore[arg-type]
    assert found.tolist() == plain(model, ids[1:], real[1:], [63], 8).tolist()
    assert decoder.step is step
    assert {len(tokens) for tokens in got} == {2}


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    ids, real = prompts("chatglm3", 6)
    with pytest.raises(ValueError, match="6 of the prompt and 12 new ones are 18, and the cache has 17 slots"):
        Decoder(network("chatglm3", "sdpa"), "static").generate(ids, real, 12, [63], PAD, slots=17)
    with pytest.raises(ValueError, match="pads stand in front"):
        Decoder(network("chatglm3", "sdpa"), "static").generate(ids, torch.tensor([[1, 1, 1, 1, 1, 0]]), 4, [63], PAD)


def test_warpers_leave_what_those_of_transformers_leave() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 3
    expected = logits
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8)):
        expected = warper(torch.zeros(5, 1, dtype=torch.int64), expected)
    choice = Choice(temperature=0.7, top_k=12, top_p=0.8)
    assert torch.equal(warped(logits, choice), expected)


def test_sampled_tokens_are_as_frequent_as_they_are_probable() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    drawn = choose(logits.expand(40_000, 4), Choice(temperature=1.0), None)
    found = drawn.bincount(minlength=4) / 40_000
    assert (found - logits.softmax(0)).abs().max() < 0.01  # four standard deviations of a share of 0.64


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled before, and nothing stays."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any, backend: Any) -> Decoder:
    """A decoder of one call after the other whose blocks ``backend`` compiles."""
    decoder = Decoder(model, "static")
    decoder.run_layer = torch.compile(decoder.run_layer, dynamic=False, fullgraph=True, backend=backend)
    return decoder


def counting(model: Any) -> tuple[Decoder, list[int]]:
    """The same, and of each graph that is compiled how many products of one row it has."""
    graphs: list[int] = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(sum("row_product" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    return compiled(model, count), graphs


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("family", ["chatglm", "chatglm3", "qwen2"])
def test_blocks_are_compiled_once(family: str) -> None:
    model = network(family, "sdpa")
    ids, real = prompts(family, 6, 4)
    expected = Decoder(model, "static").generate(ids, real, 5, [63], PAD, slots=16)
    decoder, graphs = counting(model)
    assert decoder.generate(ids, real, 5, [63], PAD, slots=16).tolist() == expected.tolist()
    assert len(graphs) == 1, "one graph serves both blocks"


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("family", "products"), [("chatglm", 4), ("chatglm3", 4), ("chatglm3 with biases", 4), ("qwen2", 6)]
)
def test_one_row_has_products_of_its_own_while_it_is_decoded(
    family: str, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the operator is the plain product: which layers have it, when, and that blocks share what is compiled."""
    monkeypatch.setattr(decoder_module, "takes_rows", lambda network: True)
    family, _, biases = family.partition(" with ")
    model = network(family, "sdpa", **({"add_bias_linear": True} if biases else {}))
    kinds = [type(module) for module in model.modules()]
    ids, real = prompts(family, 6)
    decoder, graphs = counting(model)
    found = decoder.generate(ids, real, 5, [63], PAD, slots=16)
    assert found.equal(plain(model, ids, real, [63], 5))
    assert graphs == [products], "of a block; a gate is part of the products that it is made of"
    assert [type(module) for module in model.modules()] == kinds, "afterwards they are what they were"
    two = Decoder(model, "static")
    two.generate(*prompts(family, 6, 4), 2, [63], PAD, slots=16)
    assert two.step is not None
    linears = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    with two.step.ready():
        assert {type(layer) for layer in linears} == {torch.nn.Linear}, "and with two rows"


def attention_at_once(
    fused: Tensor, keys: Tensor, values: Tensor, used: Tensor, scaling: float, rotation: tuple[Tensor, Tensor]
) -> Tensor:
    """What the kernel does, in words of PyTorch."""
    batch, slots, groups, size = keys.shape
    heads = fused.shape[-1] // size - 2 * groups
    query, key, value = fused.unflatten(-1, (-1, size)).split((heads, groups, groups), dim=2)
    query, key = (rotate_interleaved(part.transpose(1, 2), *rotation) for part in (query, key))
    last = torch.arange(batch), used.long() - 1
    keys[last], values[last] = key.squeeze(2), value.squeeze(1)
    context = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, groups, heads // groups, size), keys.transpose(1, 2), values.transpose(1, 2),
        attn_mask=(torch.arange(slots) < used[:, None])[:, None, None], scale=scaling,
    )  # fmt: skip
    return context.reshape(batch, 1, heads * size)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("lengths", [(7,), (9, 4, 6)], ids=["one", "padded"])
@pytest.mark.parametrize("release", ["chatglm2", "chatglm3"])
def test_one_kernel_rotates_writes_and_attends(
    release: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as for the compiler, which has to leave what is written where it is."""
    import glmexp.model
    from glmexp.model import slots

    kernels = SimpleNamespace(attention=attention_at_once)
    monkeypatch.setitem(sys.modules, "glmexp.model.step_kernels", kernels)
    monkeypatch.setattr(glmexp.model, "step_kernels", kernels, raising=False)
    monkeypatch.setattr(slots, "HAS_TRITON", True)
    monkeypatch.setattr(slots, "has_kernel", lambda keys: True)
    model = network(release, "sdpa")
    ids, real = prompts(release, *lengths)
    assert compiled(model, "aot_eager").generate(ids, real, 12, [63], PAD).equal(plain(model, ids, real, [63]))


@pytest.mark.usefixtures("fresh_compiler")
def test_what_a_gpu_does_in_a_step_can_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a graph break: with fullgraph that would be an error, on a GPU alone."""
    from glmexp.model import slots

    monkeypatch.setattr(slots, "has_kernel", lambda query: True)
    names: list[str] = []

    def noting(graph: Any, example: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return lambda *args: (torch.zeros(2, 1, 4, 8),)  # the operator needs a GPU

    filled = slots.Filled.empty(2, 16, torch.device("cpu"))
    query, keys = torch.zeros(2, 4, 1, 8), torch.zeros(2, 16, 2, 8)
    for triton, name in ((True, "attend_slots"), (False, "flash_attention")):
        monkeypatch.setattr(slots, "HAS_TRITON", triton)
        traced = torch.compile(slots.slots_attention, fullgraph=True, dynamic=False, backend=noting)
        traced(None, query, keys, keys, None, scaling=1.0, filled=filled)
        assert any(name in one for one in names)


def test_any_number_of_shapes_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses one more than its limit: with fullgraph that is an error."""
    import torch._dynamo

    model = network("chatglm3", "sdpa")
    decoder = Decoder(model, "compiled")
    plain_layer = Decoder(model, "static").run_layer
    decoder.run_layer = torch.compile(plain_layer, dynamic=False, fullgraph=True, backend="eager")
    monkeypatch.setattr(Step, "record", lambda self: None)  # it needs a GPU
    ids, real = prompts("chatglm3", *[4] * 3)
    expected = Decoder(model, "static").generate(ids, real, 2, [63], PAD)
    with torch._dynamo.config.patch(recompile_limit=1):  # monkeypatch would leave the option without a value
        for rows in range(1, 4):
            assert decoder.generate(ids[:rows], real[:rows], 2, [63], PAD).equal(expected[:rows])


@pytest.mark.usefixtures("fresh_compiler")
def test_where_the_compiler_fails_a_way_that_nobody_asked_for_is_another_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch._dynamo

    def failing(graph: Any, example: Any) -> Any:
        raise ValueError("no compiler here")

    def record(step: Step) -> None:
        if step.run_layer is not plain_layer:  # as far as a CPU comes with it
            with step.ready():
                step.run()

    model = network("chatglm3", "sdpa")
    ids, real = prompts("chatglm3", 7)
    plain_layer = Decoder(model, "static").run_layer
    monkeypatch.setattr(Step, "record", record)
    for falls_back in (False, True):
        torch._dynamo.reset()
        decoder = Decoder(model, "compiled", falls_back=falls_back)
        decoder.run_layer = torch.compile(plain_layer, dynamic=False, fullgraph=True, backend=failing)
        if falls_back:
            assert decoder.generate(ids, real, 5, [63], PAD).equal(plain(model, ids, real, [63], 5))
            assert decoder.way == "graph"
            assert decoder.generate(ids, real, 5, [63], PAD, slots=32).equal(plain(model, ids, real, [63], 5))
        else:
            with pytest.raises(ConfigError) as caught:
                decoder.generate(ids, real, 5, [63], PAD)
            report = caught.value.report()
            assert "decoding.way: compiled: the compiler fails: backend='failing' raised: ValueError" in report
            assert "decoding.way=graph" in report
    lines = [line for line in capsys.readouterr().out.splitlines() if "decoding" in line]
    assert len(lines) == 1, "said once"
    assert lines[0].startswith("decoding: graph, since the compiler fails")


def test_recordings_can_be_given_up_while_others_still_hold_them() -> None:
    """NCCL ends only after all graphs that hold its collectives, and a run that ends still has its decoder."""
    ids, real = prompts("chatglm3", 5)
    decoder = Decoder(network("chatglm3", "sdpa"), "static")
    decoder.generate(ids, real, 2, [63], PAD)
    step, resets = decoder.step, []
    assert step is not None
    step.graph = SimpleNamespace(reset=lambda: resets.append(True))  # type: ignore[assignment]
    decoder_module._recorded.add(step)
    decoder_module.forget_recordings()
    assert step.graph is None
    decoder_module.forget_recordings()
    assert resets == [True]


def test_networks_without_a_step_of_their_own_go_the_plain_way() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    assert all(applies(network(family, "sdpa")) for family in FAMILIES)
    assert not applies(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16)))
