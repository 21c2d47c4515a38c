"""Model to DeepSpeed engine: optimizer over what is trained, schedule, initialize."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from glmexp.config.ds_config import gathers_blocks
from glmexp.config.errors import ConfigError, Problem
from glmexp.config.memory import GPU_PLACES, passes_gpu, split
from glmexp.config.schema import RunConfig
from glmexp.engine import accumulation, grad_norm, run_ahead, whole_blocks
from glmexp.engine.passing import keep_on_host, make_without_gradients
from glmexp.engine.schedule import lr_factor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@contextmanager
def partitioned_loading(ds_config: dict[str, Any]) -> Iterator[None]:
    """Inside, ``from_pretrained`` partitions each parameter as it is loaded (stage 3); at other stages nothing changes.

    transformers finds the configuration through a weak reference, so the object must live as long as the loading.
    """
    if ds_config["zero_optimization"]["stage"] < 3:
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig, deepspeed

    keep_alive = HfDeepSpeedConfig(ds_config)
    try:
        yield
    finally:
        del keep_alive
        deepspeed.unset_hf_deepspeed_config()


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that are trained, in the model's order."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def frozen(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that must stay as they are."""
    return [(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad]


def count(parameters: list[tuple[str, nn.Parameter]]) -> int:
    """Elements, those of ZeRO-3's partitions included."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for _, parameter in parameters)


def initialize(model: nn.Module, config: RunConfig, ds_config: dict[str, Any], total_steps: int) -> Any:
    """The DeepSpeed engine over ``model``. Only trainable parameters reach the optimizer."""
    import deepspeed

    make_ready(model, config)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=None,
        optimizer=optimizer(model, config),
        lr_scheduler=lambda optimizer: schedule(optimizer, config, total_steps),
        config=ds_config,
        dist_init_required=False,
    )
    set_right(engine, config)
    return engine


def make_ready(model: nn.Module, config: RunConfig) -> None:
    """What a model needs before DeepSpeed gets it.

    Trained parameters get the run's dtype: DeepSpeed casts them at stages 0 to 2 and leaves what was added after a
    partitioned loading alone at stage 3, and what an artifact holds must not depend on the stage.
    """
    import_muon_plainly()
    if passes_gpu(config.offload):
        make_without_gradients()
    _check_leaf_modules(model, config.zero.leaf_modules or [])
    if gathers_blocks(config):
        whole_blocks.mark(model)
    dtype = DTYPES[config.precision.dtype]
    for _, parameter in trainable(model):
        parameter.data = parameter.data.to(dtype)


def import_muon_plainly() -> None:
    """DeepSpeed (0.19.8) asks of every optimizer whether it is Muon, whose module wraps three functions in
    ``torch.compile``. Nobody calls them here, and the compiler that this alone would import takes 2 s of each rank."""
    from deepspeed.runtime import compiler

    kept, compiler.compile = compiler.compile, lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = kept


def schedule(
    optimizer: torch.optim.Optimizer, config: RunConfig, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate over the steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(config.optim, total_steps, step))


def set_right(engine: Any, config: RunConfig) -> None:
    """What a new DeepSpeed engine needs before its first step."""
    _forget_warm_up_step(engine.basic_optimizer)
    grad_norm.fuse(engine.optimizer)
    accumulation.add_in_place(engine.optimizer)
    run_ahead.let(engine.optimizer)
    if passes_gpu(config.offload):
        keep_on_host(engine, config.offload.gpu_places or GPU_PLACES, bool(config.offload.pin_memory))
    if config.zero.stage == 3:
        _check_granularity(engine, config.zero.stage3_module_granularity_threshold)
        _let_leaf_inputs_require_grad(engine.module, by_name=not config.zero.stage3_module_granularity_threshold)
    if gathers_blocks(config):
        whole_blocks.gather(engine)
        precision = config.precision
        checks = precision.dtype == "fp16" or (precision.dtype == "bf16" and precision.check_grad_overflow is not False)
        run_ahead.let_blocks(engine.optimizer, checks)


def _check_leaf_modules(model: nn.Module, names: list[str]) -> None:
    """DeepSpeed logs a class that no module has and goes on. Raises ConfigError with those that there are."""
    there = {type(module).__name__: type(module) for module in model.modules()}
    known = {*there, *(f"{one.__module__}.{one.__qualname__}" for one in there.values())}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            Problem(
                "zero.leaf_modules",
                f"{', '.join(unknown)}: no module of this network has this class",
                f"classes that there are: {', '.join(sorted(there))}",
            )
        )


def _check_granularity(engine: Any, threshold: int | None) -> None:
    """DeepSpeed logs a threshold below every module's and goes on. Raises ConfigError with the smallest that works."""
    if not threshold:
        return
    smallest = engine.optimizer.parameter_offload.min_granularity_value
    if smallest > threshold:
        raise ConfigError(
            Problem(
                "zero.stage3_module_granularity_threshold",
                f"{threshold} without effect: no module has so few elements per descendant",
                f"at least {smallest}, or null",
            )
        )


def _let_leaf_inputs_require_grad(model: nn.Module, by_name: bool) -> None:
    """Let DeepSpeed (0.19.8) reduce the gradients of a leaf module after they are there.

    ``stage3.py`` does it in a full backward hook of the module, and torch calls that hook before the module's own
    backward pass where none of its inputs requires a gradient: under a frozen embedding that is the first trained
    block. Its weights are partitioned too early then, and autograd stops ("The size of tensor a (0) must match").
    """
    from deepspeed.utils import z3_leaf_module

    def require_grad(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        floats = [place for place, one in enumerate(inputs) if torch.is_tensor(one) and one.is_floating_point()]
        if not torch.is_grad_enabled() or any(inputs[place].requires_grad for place in floats):
            return inputs
        if not floats:
            raise ConfigError(
                Problem(
                    "zero.leaf_modules" if by_name else "zero.stage3_module_granularity_threshold",
                    f"{type(module).__name__} is trained as a leaf module and gets no tensor that could carry a "
                    "gradient: DeepSpeed would partition its weights before their gradients are there",
                    "name the blocks, which get hidden states" if by_name else "a lower threshold",
                )
            )
        first = floats[0]
        return (*inputs[:first], inputs[first].detach().requires_grad_(), *inputs[first + 1 :])

    for module in model.modules():
        if z3_leaf_module(module) and any(parameter.requires_grad for parameter in module.parameters()):
            # Before DeepSpeed's own hooks, which look at the inputs as well.
            module.register_forward_pre_hook(require_grad, prepend=True)


def _forget_warm_up_step(optimizer: torch.optim.Optimizer) -> None:
    """At stage 0 in 16 bit DeepSpeed (0.19.8) takes a step with zero gradients to allocate Adam's states.

    Adam counts it, and its bias correction makes the first real step 0.744 times as large as it should be.
    """
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()


def optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only (no biases, no norms), as is usual. Groups are as ``memory.split`` says."""
    optim, stage, passing = config.optim, config.zero.stage, passes_gpu(config.offload)
    decayed = [p for _, p in trainable(model) if len(getattr(p, "ds_shape", p.shape)) > 1]
    others = [p for _, p in trainable(model) if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups = [
        {"params": [kind[place] for place in group], "weight_decay": decay}
        for kind, decay in ((decayed, optim.weight_decay), (others, 0.0))
        for group in split([getattr(p, "ds_numel", p.numel()) for p in kind], stage, passing)
    ]
    settings: dict[str, Any] = {"lr": optim.lr, "betas": tuple(optim.betas), "eps": optim.eps}
    if config.offload.adam == "deepspeed":  # decided by launcher/needs.py, which has compiled it
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, **settings)
    # torch's own, not DeepSpeed's FusedAdam: that one is compiled on first use and needs a CUDA toolkit.
    return torch.optim.AdamW(groups, **settings, fused=torch.cuda.is_available())


def quiet_deepspeed() -> None:
    """DeepSpeed's logger writes to the terminal by itself: let its lines go where all others go."""
    for name in ("DeepSpeed", "deepspeed"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
