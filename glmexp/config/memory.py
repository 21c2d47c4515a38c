"""Bytes that an offload takes in host memory and on disk, from the sizes in the configuration alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from glmexp.config.families import FAMILIES
from glmexp.config.schema import ModelSection, RunConfig, Sizes

_DTYPE = {"bf16": 2, "fp16": 2, "fp32": 4}
MASTER, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes an element: float32 master, Adam's two moments, and the float32 gradient that stands beside the master."""
EXACT_PINNING = "pinned_max_round_threshold_mb:1024,pinned_max_cached_size_mb:1024"
"""Setting of torch's allocator: pinned buffers above 1 GiB are as large as asked for and, as that demands, not kept."""


def sizes_of(model: ModelSection) -> Sizes | None:
    """Sizes of the network that will be built; None where only its checkpoint on a hub knows them."""
    if model.init == "random":
        return model.sizes
    file = Path(model.path or "", "config.json")
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    names = FAMILIES[model.family].sizes
    return Sizes(**{name: content.get(names.get(name, ""), None) for name in Sizes.__dataclass_fields__})


def parameters(model: ModelSection) -> int | None:
    """Elements of the network's matrices; None where its sizes are not known."""
    sizes = sizes_of(model)
    if sizes is None:
        return None
    hidden, layers, inner = sizes.hidden_size, sizes.num_layers, sizes.intermediate_size
    heads, vocab = sizes.num_attention_heads, sizes.vocab_size
    if hidden is None or layers is None or inner is None or heads is None or vocab is None:
        return None
    width = sizes.head_size or hidden // heads
    queries, keys = heads * width, (sizes.num_key_value_heads or heads) * width
    attention = hidden * (queries + 2 * keys) + queries * hidden
    # ChatGLM-6B, the only family without grouped keys, has an MLP without a gate.
    mlp = hidden * inner * (3 if sizes.num_key_value_heads is not None else 2)
    embeddings = vocab * hidden * (1 if sizes.tied_embedding or sizes.num_key_value_heads is None else 2)
    return layers * (attention + mlp) + embeddings


def host_bytes(config: RunConfig) -> int | None:
    """Host memory of an offloaded run, all ranks together; None where it is not known or small.

    Per trained parameter DeepSpeed (0.19.8, ``stage_1_and_2.py``) keeps master, gradient, moments and a buffer in the
    run's dtype; with accumulation, the gradients so far in that dtype. Pinned buffers are rounded up to a power of two
    by torch's allocator. With params=cpu the weights come on top. Only full fine-tuning is counted: what the other
    methods train is small.
    """
    offload, elements = config.offload, parameters(config.model)
    if elements is None:
        return None
    trained = elements if config.method.name == "full" else 0
    weight = _DTYPE[config.precision.dtype]
    total = 0
    if offload.optimizer == "cpu":
        buffers = [MASTER * trained, GRADIENT * trained, weight * trained]
        # At stage 3 a buffer is one sub group's, by default nearly a power of two.
        rounded = bool(offload.pin_memory) and config.zero.stage < 3 and not _exact_pinning(config.launcher.env)
        total += sum(map(_power_of_two, buffers) if rounded else buffers) + MOMENTS * trained
        total += weight * trained if (config.train.grad_accum or 1) > 1 else 0
    if offload.params == "cpu":
        total += weight * elements
    return total or None


def nvme_bytes(config: RunConfig) -> int | None:
    """Disk of an offload to nvme, all ranks together; None where it is not known."""
    offload, elements = config.offload, parameters(config.model)
    if elements is None:
        return None
    trained = elements if config.method.name == "full" else 0
    total = (MASTER + MOMENTS) * trained if offload.optimizer == "nvme" else 0
    return total + (_DTYPE[config.precision.dtype] * elements if offload.params == "nvme" else 0)


def pinned_by_deepspeed(variables: Mapping[str, str]) -> bool:
    """Whether DeepSpeed (0.19) locks host memory itself (``deepspeed/utils/pin_memory.py``), with an op of its own."""
    return variables.get("DS_PIN_MEMORY_BACKEND", "").lower() == "native"


def _exact_pinning(variables: Mapping[str, str]) -> bool:
    """Whether torch (2.11 on) is told not to round large pinned buffers up, or DeepSpeed pins, which does not."""
    if pinned_by_deepspeed(variables):
        return True
    settings = (variables.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any(EXACT_PINNING.partition(":")[0] in setting for setting in settings)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length() if number else 0
