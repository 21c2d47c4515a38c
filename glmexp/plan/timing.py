"""Seconds of an optimizer step: operations, memory traffic, kernel starts and communication over measured rates.

The rates were fitted to forward and backward passes of fifteen of the configurations measured on an H200
(docs/plan.md has all of them); another card's are in proportion to its data sheet. Work on the GPU and the starting of
kernels by the host run beside each other: the longer of the two counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from glmexp.config.derived import GRAD_ACCUM
from glmexp.config.ds_config import cuts_blocks
from glmexp.config.memory import BYTES, MASTER, MOMENTS, passes_gpu
from glmexp.config.schema import RunConfig
from glmexp.plan.activations import Batch, Kind, Trained, virtual_tokens
from glmexp.plan.cards import BANDWIDTH, LISTED, Card
from glmexp.plan.shapes import HEADS, REST, Model
from glmexp.plan.states import States, low_matrices

MATMUL, HEAD, ATTENTION = 1 / 1.472e-15, 1 / 1.3e-15, 1 / 2.985e-15
"""Operations a second on the H200: linear layers of blocks, the output layer, attention."""
FP8 = 1.81
"""How much faster products in fp8 are than in bf16: ChatGLM3's four weights in experiments/bench/fp8_products.py."""
ROUNDED, ROUNDED_COMPILED = 1 / 9e-12, 1 / 1.5e-12
"""Numbers a second that are rounded to fp8, by plain operations (31 bytes of traffic each) and in one kernel."""
TRAFFIC, TRAFFIC_COMPILED = 1 / 0.658e-12, 1 / 0.2e-12
"""Bytes a second of what norms, rotations and activation functions would keep: each is passed over several times."""
LOGITS, LOGITS_COMPILED = 1 / 14.9e-12, 1 / 1.0e-12
"""The same for logits in the loss."""
PASS_S, TENSOR_S, MICRO_S = 1.74e-3, 0.806e-3, 8.7e-3
"""Host seconds: of one pass through a block; of each of its parameters where stage 3 has hooks on every module; of a
micro batch."""
COMPILED_SHARE = 0.6
"""Of the kernels of a block that are left when it is compiled."""
STEP_S, UPDATE_BYTES, UPDATE_TENSOR_S = 6e-3, 90, 0.19e-3
"""Of a step: on the host; bytes of memory traffic a trained element; a trained tensor where stage 3 has such hooks."""
HOST_ADAM_S = 0.40e-9
"""Seconds an element of AdamW on the host: 16 cores, torch's fused one."""
PINNED, UNPINNED = 50e9, 10e9
"""Bytes a second between host and GPU."""
BOTH_WAYS = 48e9
"""The same in each direction where both are used at a time."""
SHOWN = 0.65
"""Share of its own time by which communication beside the passes makes them longer, since its kernels hold
multiprocessors that products are cut for: fitted to two H200 at stages 2 and 3."""
_SHARPNESS = 4
"""How sharply the longer of two things that run beside each other wins."""


@dataclass(frozen=True)
class Work:
    """What one micro batch takes, before any rate."""

    matmul: float
    """Operations of linear layers, recomputing included, but for those in fp8."""
    low: float
    """The same of linear layers in fp8."""
    rounded: float
    """Numbers that are rounded for them."""
    head: float
    """Operations of the output layer."""
    attention: float
    """Operations of attention's products."""
    traffic: float
    """Bytes that norms, rotations, activation functions and adapters would keep, once for each pass over them."""
    logits: float
    """Bytes of logits."""
    passes: float
    """Blocks times passes: kernels are started for each."""


@dataclass(frozen=True)
class Seconds:
    """Of an optimizer step."""

    compute: float
    """Forward and backward passes of all micro batches."""
    communication: float
    """What is not hidden behind them."""
    optimizer: float
    offload: float
    """Copies between host and GPU, and AdamW on the host."""

    @property
    def total(self) -> float:
        """One step."""
        return self.compute + self.communication + self.optimizer + self.offload


def step_of(
    config: RunConfig, model: Model, states: States, batch: Batch, kind: Kind, card: Card, ranks: int
) -> Seconds | None:
    """Seconds of a step on that card; None where its rates are not known, or fp32 would need rates of its own."""
    if card.flops is None or card.bandwidth is None or kind.element == 4:
        return None
    speed, memory = card.flops / LISTED["H200"][0], card.bandwidth / BANDWIDTH["H200"]
    work = work_of(config, model, batch, kind)
    on_gpu = (work.matmul / MATMUL + work.low / (FP8 * MATMUL) + work.head / HEAD + work.attention / ATTENTION) / speed
    on_gpu += work.traffic / (TRAFFIC_COMPILED if kind.compiled else TRAFFIC) / memory
    on_gpu += work.rounded / (ROUNDED_COMPILED if kind.compiled else ROUNDED) / memory
    on_gpu += work.logits / (LOGITS_COMPILED if kind.compiled else LOGITS) / memory
    stage, hooks = config.zero.stage, cuts_blocks(config)
    starts = work.passes * (TENSOR_S * _tensors(model) if hooks else PASS_S)
    starts *= COMPILED_SHARE if kind.compiled else 1
    gathered, reduced = (amount / card.link for amount in _traffic(config, model, ranks))
    on_gpu += SHOWN * gathered
    beside = (on_gpu**_SHARPNESS + starts**_SHARPNESS + gathered**_SHARPNESS) ** (1 / _SHARPNESS)
    micro = config.train.grad_accum or GRAD_ACCUM
    times = micro if stage >= 2 else 1
    shown = SHOWN if config.zero.overlap_comm and stage else 1.0
    trained = model.trained_elements / (ranks if stage else 1)
    optimizer, offload = STEP_S, 0.0
    if config.offload.optimizer is None:
        optimizer += UPDATE_BYTES * trained / (memory * BANDWIDTH["H200"])
    else:
        offload = _offload(config, model, states, trained, micro)
    if hooks:
        optimizer += UPDATE_TENSOR_S * len(model.trained)
    return Seconds(micro * (beside + MICRO_S), shown * times * reduced, optimizer, offload)


def work_of(config: RunConfig, model: Model, batch: Batch, kind: Kind) -> Work:
    """Forward and backward of one micro batch."""
    network, tokens = model.network, batch.places
    trained, virtual = Trained(config, model), virtual_tokens(config)
    every = dict.fromkeys(range(network.layers), 0)
    learned, rough, into, out = (dict(every) for _ in range(4))
    for one in model.parameters:
        if one.layer != REST and one.is_matrix:
            every[one.layer] += one.elements
            learned[one.layer] += one.elements * one.trained
    for one in low_matrices(config, model):
        rough[one.layer] += one.elements
        into[one.layer] += one.shape[1]
        out[one.layer] += one.shape[0]
    matmul = low = rounded = passes = attended = 0.0
    for layer in range(network.layers):
        reached = trained.reaches(layer)
        again = kind.checkpointing and reached
        matmul += 2 * tokens * ((every[layer] - rough[layer]) * (1 + reached + again) + learned[layer])
        low += 2 * tokens * rough[layer] * (1 + reached + again)
        rounded += tokens * (into[layer] * (1 + again) + out[layer] * reached)
        passes += 1 + 2 * reached + again
        attended += 1 + 2.5 * reached + again
    masked = kind.attention != "varlen" and (virtual > 0 or batch.segments > 0 or network.family == "chatglm")
    seen = batch.length + virtual
    if kind.attention == "varlen" and batch.segments:
        seen = tokens // batch.segments
    pairs = tokens * seen / (1 if masked else 2)
    head_trained = bool(trained.rest.intersection((*HEADS, "word_embeddings")))
    width = 8 * network.hidden + 3 * network.queries + 3 * network.inner
    return Work(
        matmul=matmul,
        low=low,
        rounded=rounded,
        head=2.0 * batch.labels * network.vocab * network.hidden * (2 + head_trained),
        attention=4 * network.queries * pairs * attended,
        traffic=passes * tokens * width * kind.element,
        logits=float(batch.labels * network.vocab * kind.element),
        passes=passes,
    )


def _tensors(model: Model) -> float:
    """Parameters of a block."""
    return sum(one.layer != REST for one in model.parameters) / model.network.layers


def _traffic(config: RunConfig, model: Model, ranks: int) -> tuple[float, float]:
    """Bytes over the link: of a micro batch for gathered weights, of one reduction (and gathering) for gradients."""
    if ranks == 1:
        return 0.0, 0.0
    element, share = BYTES[config.precision.dtype], (ranks - 1) / ranks
    stage = config.zero.stage
    gathered = element * model.elements * share * (2 if stage == 3 else 0)
    return gathered, element * model.trained_elements * share * (1 if stage == 3 else 2)


def _offload(config: RunConfig, model: Model, states: States, trained: float, micro: int) -> float:
    """Gradients down in float32, AdamW, weights up; at stage 3 with parameters on the host they come up twice more.
    States that pass through the GPU: they come and go at the same time, some of them beside the passes."""
    element, rate = BYTES[config.precision.dtype], PINNED if config.offload.pin_memory else UNPINNED
    if passes_gpu(config.offload):
        return max(0.0, (MASTER + MOMENTS) * trained - states.passing) / min(rate, BOTH_WAYS)
    copies = 4 * trained + element * trained * (1 + 2 * (micro - 1))
    if config.offload.params is not None:
        copies += 2 * element * model.elements * micro
    return copies / rate + HOST_ADAM_S * trained
