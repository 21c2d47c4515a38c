"""Bytes that an offload takes in host memory and on disk, from the sizes in the configuration alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from glmexp.config.families import FAMILIES
from glmexp.config.schema import ModelSection, RunConfig, Sizes

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of an element, by ``precision.dtype``."""
MASTER, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes an element: float32 master, Adam's two moments, and the float32 gradient that stands beside the master."""
EXACT_PINNING = "pinned_max_round_threshold_mb:1024,pinned_max_cached_size_mb:1024"
"""Setting of torch's allocator (in 2.13, not in 2.11): pinned buffers above 1 GiB are as large as asked for and, as
that demands, not kept."""
GROUP_ELEMENTS = 2**29
"""Most elements of an optimizer group, unless one tensor has more. DeepSpeed's step takes a float32 copy of one group's
gradients at a time: with all weights in one group that is 23 GiB for 6 B parameters, and it is 2 GiB with these. Copies
to and from the host go on beside the next group's step."""


def split(sizes: Sequence[int], stage: int) -> list[list[int]]:
    """Places of tensors of these sizes, in order, in groups of at most GROUP_ELEMENTS elements or one tensor.

    At stage 3 all are one group: DeepSpeed makes its own of ``zero.sub_group_size`` elements.
    """
    if stage == 3:
        return [[*range(len(sizes))]] if sizes else []
    groups: list[list[int]] = []
    filled = 0
    for place, size in enumerate(sizes):
        if not groups or filled + size > GROUP_ELEMENTS:
            groups.append([])
            filled = 0
        groups[-1].append(place)
        filled += size
    return groups


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
    sizes = matrices(model)
    return None if sizes is None else sum(sizes)


def matrices(model: ModelSection) -> list[int] | None:
    """Elements of each of the network's matrices, in its order; None where its sizes are not known."""
    sizes = sizes_of(model)
    if sizes is None:
        return None
    hidden, layers, inner = sizes.hidden_size, sizes.num_layers, sizes.intermediate_size
    heads, vocab = sizes.num_attention_heads, sizes.vocab_size
    if hidden is None or layers is None or inner is None or heads is None or vocab is None:
        return None
    width = sizes.head_size or hidden // heads
    queries, keys = heads * width, (sizes.num_key_value_heads or heads) * width
    # ChatGLM-6B, the only family without grouped keys, has an MLP without a gate.
    gated = 2 if sizes.num_key_value_heads is not None else 1
    block = [hidden * (queries + 2 * keys), queries * hidden, gated * hidden * inner, inner * hidden]
    tied = sizes.tied_embedding or sizes.num_key_value_heads is None
    return [vocab * hidden, *block * layers, *([] if tied else [vocab * hidden])]


def host_bytes(config: RunConfig) -> int | None:
    """Host memory of an offloaded run, all ranks together; None where it is not known or small.

    Per trained parameter DeepSpeed (0.19.8, ``stage_1_and_2.py``) keeps master, gradient, moments and a buffer in the
    run's dtype; with accumulation, the gradients so far in that dtype. Pinned buffers are rounded up to a power of two
    by torch's allocator. With params=cpu the weights come on top. Only full fine-tuning is counted: what the other
    methods train is small.
    """
    offload, sizes = config.offload, matrices(config.model)
    if sizes is None:
        return None
    elements = sum(sizes)
    trained = elements if config.method.name == "full" else 0
    weight = BYTES[config.precision.dtype]
    total = 0
    if offload.optimizer == "cpu" and trained:
        groups = [sum(sizes[place] for place in group) for group in split(sizes, config.zero.stage)]
        buffers = [kind * group for kind in (MASTER, GRADIENT, weight) for group in groups]
        # At stage 3 a buffer is one sub group's, by default nearly a power of two.
        rounded = bool(offload.pin_memory) and config.zero.stage < 3 and not exact_pinning(config.launcher.env)
        total += sum(map(power_of_two, buffers) if rounded else buffers) + MOMENTS * trained
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
    return total + (BYTES[config.precision.dtype] * elements if offload.params == "nvme" else 0)


def pinned_by_deepspeed(variables: Mapping[str, str]) -> bool:
    """Whether DeepSpeed (0.19) locks host memory itself (``deepspeed/utils/pin_memory.py``), with an op of its own."""
    return variables.get("DS_PIN_MEMORY_BACKEND", "").lower() == "native"


def exact_pinning(variables: Mapping[str, str]) -> bool:
    """Whether torch (2.13) is told not to round large pinned buffers up, or DeepSpeed pins, which does not."""
    if pinned_by_deepspeed(variables):
        return True
    settings = (variables.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any(EXACT_PINNING.partition(":")[0] in setting for setting in settings)


def power_of_two(number: int) -> int:
    """The least power of two that is at least ``number``; 0 stays."""
    return 1 << (number - 1).bit_length() if number else 0
