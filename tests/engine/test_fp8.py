"""Frozen layers in fp8: what rounding costs, that gradients are those of the rounded layer, and that runs keep them."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glmexp.config.compose import run_config
from glmexp.config.errors import ConfigError
from glmexp.config.families import FAMILIES
from glmexp.engine import build, fingerprint, fp8
from glmexp.entry import artifact, export, proof, serving, sources
from glmexp.model.build import load_network
from tests.engine.cells import configure, engine_loop
from tests.ranks import run_on_ranks

FP8 = ("precision=bf16", "precision.base=fp8")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(wide: int = 96, high: int = 64, dtype: torch.dtype = torch.float32) -> nn.Linear:
    found = nn.Linear(wide, high).to(dtype).requires_grad_(False)
    found.weight.copy_((draw(high, wide, seed=1) * 0.02).to(dtype))
    found.bias.copy_(draw(high, seed=3).to(dtype))
    return found


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def tiny(*overrides: str) -> tuple[Any, Any]:
    """The tiny model with LoRA, in float32, and its transformers model."""
    config = configure("model=tiny", *overrides, ranks=1)
    model = config.method.apply(load_network(config.model, torch.float32), FAMILIES[config.model.family])
    return model, model.get_base_model()


def names_of_trained(model: nn.Module) -> list[str]:
    return [name for name, _ in build.trainable(model)]


@pytest.mark.parametrize("keep", [True, False])
def test_both_products_are_those_of_the_layer_to_fp8s_rounding(keep: bool) -> None:
    plain = linear()
    low = fp8.Fp8Linear(plain, keep)
    states, grad = draw(3, 50, 96), draw(3, 50, 64, seed=2).exp()
    states.requires_grad_()
    out = low(states)
    out.backward(grad)
    assert states.grad is not None
    # e4m3 has 3 bits behind the point: a uniform error of up to 2^-4 in each factor, about 0.026 of a normal one.
    assert relative(out.detach() - plain.bias, nn.functional.linear(states.detach(), plain.weight)) < 0.04
    assert relative(states.grad, grad @ plain.weight) < 0.04
    # Against the rounded weight only the activations' own error is left.
    held = low.weight.view(fp8.FORMAT).float() * low.scales.view(torch.float32).t()
    assert relative(held, plain.weight) < 0.028
    assert relative(out.detach() - plain.bias, nn.functional.linear(states.detach(), held)) < 0.03
    assert relative(states.grad, grad @ held) < 0.03


def test_a_kept_transpose_changes_no_bit() -> None:
    results = []
    for keep in (True, False):
        states = draw(40, 96).requires_grad_()
        out = fp8.Fp8Linear(linear(), keep)(states)
        out.backward(draw(40, 64, seed=2))
        results.append((out.detach(), states.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_no_token_sees_anothers_size() -> None:
    low, states = fp8.Fp8Linear(linear(), False), draw(8, 96)
    large = states.clone()
    large[3] *= 1e4
    assert torch.equal(low(states)[[0, 1, 2, 4, 5, 6, 7]], low(large)[[0, 1, 2, 4, 5, 6, 7]])


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e12])
def test_rows_of_any_size_keep_their_accuracy(size: float) -> None:
    states = draw(8, 96) * size
    values, scales = fp8.quantised(states)
    assert torch.allclose(values.float() * scales, states, rtol=2**-4, atol=size * 2**-9)


def test_what_is_not_finite_does_not_become_a_number() -> None:
    low = fp8.Fp8Linear(linear(), False)
    for bad in (float("inf"), float("nan")):
        states = draw(2, 96)
        states[0, 5] = bad
        out = low(states)
        assert not out[0].isfinite().any()
        assert out[1].isfinite().all()


def test_the_product_is_that_of_torchs_scaled_one() -> None:
    """On a GPU torch._scaled_mm takes the place of the reference that tests run on."""
    weight, scales = fp8.quantised_weight(draw(64, 96, seed=1) * 0.02)
    values, own = fp8.quantised(draw(48, 96))
    weight, scales = weight.view(fp8.FORMAT), scales.view(torch.float32)
    try:
        scaled = torch._scaled_mm(values, weight.t(), scale_a=own, scale_b=scales, out_dtype=torch.bfloat16)
    except RuntimeError as error:
        if "per-tensor scaling for CPU" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__} has no row-wise scales on a CPU")
    assert relative(scaled, fp8.product(values, own, weight, scales, torch.float32)) < 2**-7  # bf16's rounding


def test_a_cast_of_the_whole_model_leaves_weights_and_scales() -> None:
    """DeepSpeed casts what it is given: in bf16 values and scales would be others."""
    low = fp8.Fp8Linear(linear(dtype=torch.bfloat16), True)
    bits, scales = low.weight.clone(), low.scales.clone()
    low.float().half().bfloat16()
    assert torch.equal(low.weight, bits)
    assert torch.equal(low.scales, scales)
    assert low.weight.dtype == torch.uint8


def test_frozen_linears_of_blocks_alone_are_converted_and_nothing_else_changes() -> None:
    model, network = tiny()
    names = {name: p.numel() for name, p in model.named_parameters()}
    before = fingerprint.of_parameters(model.named_parameters())
    trained = names_of_trained(model)
    assert fp8.convert(model, network, trained, keep_transposed=True) == len(fp8.layers(model)) > 0
    assert {name: p.numel() for name, p in model.named_parameters()} == names
    assert names_of_trained(model) == trained
    assert fp8.prints(model, model.named_parameters()) == before, "fingerprints are those of the weights as loaded"
    low = {name for name, p in model.named_parameters() if p.dtype == torch.uint8}
    assert low == {f"{name}.weight" for name, _ in fp8.layers(model)}
    assert all(".layers." in name and "lora_" not in name for name in low)


def test_each_weight_in_16_bit_goes_when_its_layer_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a network of 6 B held 10 GiB more while it was converted than before and after."""
    model, network = tiny()
    old: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    plain = fp8.quantised_weight

    def seen(weight: Tensor) -> tuple[Tensor, Tensor]:
        alive.append(sum(one() is not None for one in old))
        return plain(weight)

    monkeypatch.setattr(fp8, "quantised_weight", seen)
    old += [weakref.ref(one.weight) for one in network.modules() if type(one) is nn.Linear]
    converted = fp8.convert(model, network, names_of_trained(model), keep_transposed=True)
    assert alive == [len(old) - number for number in range(converted)]


def test_a_network_without_frozen_linears_is_refused() -> None:
    config = configure("model=tiny", "method=full", ranks=1)
    network = load_network(config.model, torch.float32)
    with pytest.raises(ConfigError, match="fp8 without effect: no block has a frozen linear layer"):
        fp8.convert(network, network, names_of_trained(network), keep_transposed=True)


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"8\.9 or higher \(Ada, Hopper\), and NVIDIA A100 has 8\.0"):
        fp8.check_device()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    fp8.check_device()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_block_has_the_gradients_of_the_plain_one(dtype: torch.dtype) -> None:
    """torch 2.11 lost the gradient behind a product whose result had the right dtype already (float32 on a CPU)."""
    first, second = (fp8.Fp8Linear(linear(*sizes, dtype=dtype), True) for sizes in ((64, 192), (96, 64)))

    def block(states: Tensor) -> Tensor:
        gate, value = first(states).chunk(2, dim=-1)
        return second(nn.functional.silu(gate) * value)

    states = (4 * draw(2, 20, 64)).to(dtype).requires_grad_()
    plain = block(states)
    (grad,) = torch.autograd.grad(plain.float().square().sum(), states)
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)(states)
    assert torch.equal(compiled, plain)
    assert torch.equal(torch.autograd.grad(compiled.float().square().sum(), states)[0], grad)


def test_a_torch_that_loses_a_gradient_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8.check_compiled()
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda x: function(x.detach()) + x.float().sum())
    with pytest.raises(RuntimeError, match="compiles a layer in fp8 to one with another gradient"):
        fp8.check_compiled()


def _methods(folder: str) -> dict[str, Any]:
    """LoRA at two stages, one with checkpointing; P-Tuning and freeze: each an artifact in ``folder``."""
    cells = {
        "stage0": ["zero=stage0"],
        "stage2": ["zero=stage2", "train.gradient_checkpointing=true", "gather=sharded"],
        "ptuning": ["zero=stage1", "method=ptuning"],
        "freeze": ["zero=stage2", "method=freeze", "method.num_layers=1", "precision.base_transposed=false"],
    }
    return {name: engine_loop(configure(*FP8, *words), f"{folder}/{name}") for name, words in cells.items()}


def test_runs_keep_their_base_in_fp8_and_a_loaded_artifact_gives_their_logits(tmp_path: Path) -> None:
    traces, _ = run_on_ranks(_methods, str(tmp_path), folder=tmp_path)
    # bf16 sums in another order, and a value that it moves over an edge of fp8 moves by up to 6 %.
    assert traces["stage2"].losses == pytest.approx(traces["stage0"].losses, rel=2e-2)
    for name, trace in traces.items():
        assert trace.losses[-1] < trace.losses[0], name
        folder = artifact.find(tmp_path / name)
        assert artifact.read_card(folder).base_format == "fp8"
        assert proof.judge(tmp_path / name)["faults"] == [], name
        loaded, _ = artifact.load(folder, torch.bfloat16)
        assert fp8.layers(loaded), name
    # Where LoRA is merged, to write tokens or to split the network, its base is that of 16 bit.
    for way, low in (("plain", True), ("static", False)):
        words = ["entry=evaluate", f"artifact.path={tmp_path / 'stage0'}", f"decoding.way={way}"]
        config = run_config(words, ranks=1, gpus=0)
        served = serving.load(serving.find(config), config).model
        assert bool(fp8.layers(served)) == low
        assert hasattr(served, "peft_config") == low
    # An export merges with the base as it was, and finds it by the fingerprints from before the rounding.
    config = run_config(["entry=export", f"artifact.path={tmp_path / 'stage0'}"], ranks=1, gpus=0)
    (tmp_path / "whole" / artifact.FOLDER).mkdir(parents=True)
    facts = export.write_whole(sources.of(config), config, tmp_path / "whole" / artifact.FOLDER)
    assert "fingerprints of the base" in facts["checked"]


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["precision.base=fp8", "precision=fp32"], "precision.base", "the dtype is fp32"),
        (["precision.base=fp8", "method=full"], "precision.base", "freezes nothing"),
        (["precision.base=fp8", "zero=stage3"], "precision.base", "fp8 weights are not partitioned"),
        (["precision.base=fp8", "gather=full16"], "gather.name", "where it is in fp8"),
        (["precision.base_transposed=true"], "precision.base_transposed", "the base is not in fp8"),
        (["precision.base=fp8", "entry=evaluate"], "precision.base", "without effect under entry=evaluate"),
    ],
)
def test_what_fp8_cannot_do_is_said_before_anything_starts(words: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_config(words, ranks=1, gpus=1)
    assert [(one.where, said in str(one)) for one in caught.value.problems] == [(key, True)]
