"""Frozen linear layers in fp8: e4m3 values with a scale a row (Micikevicius et al. 2022, arXiv:2209.05433).

A frozen W = diag(s) Q takes part in two products, and both are taken in fp8. Forward: the rows of x get scales from
their largest values, y = diag(a) Qx Q^T diag(s). Backward: dx = dy W = (dy diag(s)) Q, so the scales of W go into dy
before its rows get theirs, and the same Q serves both. All scales belong to one token or one weight row: no token sees
another's size. Sums are float32, results bf16 on a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.memory import FP8_MULTIPLE
from glmexp.engine import fingerprint
from glmexp.engine.compiled import blocks
from glmexp.plan import cards

FORMAT = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of the format."""
_LEAST = 1e-30
"""In place of the largest value of a row of zeros: its quotients stay finite."""
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23


def check_device() -> None:
    """Raise ConfigError where the GPU has no fp8 products. Without a GPU they are computed from the same rounded
    values in float32, slowly."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < cards.FP8_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        raise cards.no_fp8(torch.cuda.get_device_name(), f"{major}.{minor}")


def check_compiled() -> None:
    """Raise RuntimeError where torch.compile loses a gradient on its way through such a layer, as a version did that
    had no test here: a run would only be fast and wrong. About a second; nothing is compiled but a graph."""
    place = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 64, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.randn(64, 64, generator=generator))
    layer = Fp8Linear(linear.to(place, torch.bfloat16), keep_transposed=True)
    states = torch.randn(2, 16, 64, generator=generator).to(place, torch.bfloat16).requires_grad_()

    def gated(states: Tensor) -> Tensor:
        gate, value = layer(states).chunk(2, dim=-1)
        return (nn.functional.silu(gate) * value).sum()

    (plain,) = torch.autograd.grad(gated(states), states)
    (compiled,) = torch.autograd.grad(torch.compile(gated, backend="aot_eager")(states), states)
    if not torch.allclose(compiled, plain, rtol=1e-2, atol=1e-2 * float(plain.abs().max())):
        raise RuntimeError(
            f"torch {torch.__version__} compiles a layer in fp8 to one with another gradient: train.compile=false, or "
            "precision.base=null"
        )


def quantised(states: Tensor) -> tuple[Tensor, Tensor]:
    """``states`` (rows, width) as fp8 values and float32 scales (rows, 1). Plain operations, so that a compiler puts
    them into one kernel with what comes before. What is not finite becomes nan."""
    exact = states.float()
    largest = exact.abs().amax(1, keepdim=True).clamp(min=_LEAST)
    return (exact * (LARGEST / largest)).to(FORMAT), largest / LARGEST


def quantised_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` (out, in) as fp8 values and scales (1, out), both as the bits of integers: engines cast what is a
    floating point number.

    Scales are powers of two, so that dividing by them is exact and the values do not depend on the device. The
    largest value of a row comes to lie between 128 and 256.
    """
    _, exponents = torch.frexp(weight.abs().amax(1).float())
    scales = ((exponents.to(torch.int32) - 8 + _EXPONENT_BIAS) << _MANTISSA_BITS)[None]
    values = (weight.float() / scales.view(torch.float32).t()).to(FORMAT)
    return values.view(torch.uint8), scales


def product(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, in) with scales (rows, 1) times the transpose of (out, in) with scales (1, out): (rows, out)."""
    if values.is_cuda:
        # Fast accumulation adds up in the tensor cores' own width: far below the rounding of the values.
        found = torch._scaled_mm(
            values,
            weight.t(),
            scale_a=scales,
            scale_b=weight_scales,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    else:
        found = (values.float() * scales) @ (weight.float() * weight_scales.t()).t()
    # Not .to() where there is nothing to do: inside of an autograd function torch.compile (2.11) takes its result for
    # another tensor, and the gradient that arrives at the function is zero.
    return found if found.dtype == dtype else found.to(dtype)


class _Product(torch.autograd.Function):
    """x W^T for a frozen W; nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, scales: Tensor, transposed: Tensor | None) -> Tensor:
        """``states`` (rows, in), ``weight`` (out, in), ``scales`` (1, out), ``transposed`` (in, out): (rows, out)."""
        ctx.save_for_backward(weight, scales, transposed)
        values, own = quantised(states)
        return product(values, own, weight.view(FORMAT), scales, states.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        """``grad`` (rows, out) to that of the states (rows, in)."""
        weight, scales, transposed = ctx.saved_tensors
        # The hardware reads both factors along the dimension that is summed over: here that of the weight's rows.
        turned = weight.t().contiguous() if transposed is None else transposed
        values, own = quantised(grad.float() * scales)
        ones = torch.ones((1, turned.shape[0]), dtype=torch.float32, device=grad.device)
        return product(values, own, turned.view(FORMAT), ones, grad.dtype), None, None, None


class Fp8Linear(nn.Linear):
    """A linear layer whose frozen weight is held in fp8."""

    scales: Tensor
    transposed: Tensor | None

    def __init__(self, linear: nn.Linear, keep_transposed: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.origin = fingerprint.of_tensor(linear.weight)
        """Fingerprint of the weight before it was rounded."""
        place = linear.weight.device
        fast = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else place
        values, scales = quantised_weight(linear.weight.detach().to(fast))
        self.weight = nn.Parameter(values.to(place), requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("scales", scales.to(place), persistent=False)
        turned = values.t().contiguous().to(place) if keep_transposed else None
        self.register_buffer("transposed", turned, persistent=False)
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """``input`` (..., in) to (..., out), in its dtype."""
        flat = input.reshape(-1, self.in_features)
        result = _Product.apply(flat, self.weight, self.scales.view(torch.float32), self.transposed)
        if self.bias is not None:
            result = result + self.bias
        return result.unflatten(0, input.shape[:-1])


def convert(model: nn.Module, network: Any, trained: Collection[str], keep_transposed: bool) -> int:
    """Put the frozen linear layers of ``network``'s blocks into fp8. Returns how many.

    model: what ``trained`` are parameter names of; ``network``, the transformers model in it, names the blocks. Output
    layer and embedding stay as they are. Raises ConfigError where there is none to convert.
    """
    inside = {id(module) for block in blocks(network) for module in block.modules()}
    found = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and id(module) in inside
        and f"{name}.weight" not in trained
        and module.in_features % FP8_MULTIPLE == module.out_features % FP8_MULTIPLE == 0
    ]
    if not found:
        raise ConfigError(
            Problem(
                "precision.base",
                f"fp8 without effect: no block has a frozen linear layer whose sizes are multiples of {FP8_MULTIPLE}",
                "precision.base=null",
            )
        )
    for name in found:  # not the modules: each weight in 16 bit goes when its layer has its own
        parent, _, leaf = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), "as it was found"
        setattr(model.get_submodule(parent), leaf, Fp8Linear(linear, keep_transposed))
    return len(found)


def prints(model: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, int]:
    """``fingerprint.of_parameters``, with what fp8 weights were before they were rounded. Collective."""
    found = fingerprint.of_parameters(parameters)
    origins = {f"{name}.weight": module.origin for name, module in layers(model)}
    return {name: origins.get(name, value) for name, value in found.items()}


def layers(model: nn.Module) -> list[tuple[str, Fp8Linear]]:
    """Name and module of each layer in fp8."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
