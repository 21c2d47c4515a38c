"""The plan of one rank: bytes by phase and what they are for, of a configuration whose batch numbers are derived."""

from __future__ import annotations

from dataclasses import dataclass

from glmexp.config.derived import MICRO_BATCH_SIZE
from glmexp.config.ds_config import cuts_blocks, memory_efficient_linear
from glmexp.config.memory import BYTES
from glmexp.config.model_rules import attention_kind
from glmexp.config.schema import RunConfig
from glmexp.plan.activations import LOSS_CHUNK, ROUNDING, Activations, Batch, Kind, activations_of
from glmexp.plan.cards import Card
from glmexp.plan.shapes import Model, model_of
from glmexp.plan.states import States, low_matrices, states_of

WORKSPACE = 66 * 2**20
"""cuBLAS's workspaces and small tensors."""
RANDOM_CHUNK = 0.68 * 2**30
"""What filling random weights takes on the GPU (``model.random_init``)."""
FRAGMENTS = 1.03
"""What the allocator takes for what is asked of it near the limit, measured on a ladder of growing batches."""
COMPILED_FROM = 1_000_000_000
"""Parameters from which blocks are compiled by themselves (``engine.compiled.WORTHWHILE_PARAMETERS``)."""

Terms = dict[str, int]


@dataclass(frozen=True)
class Phase:
    """Bytes that stand at the worst moment of a phase, by what they are for."""

    name: str
    terms: Terms

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class Memory:
    """What one rank needs."""

    model: Model
    states: States
    activations: Activations
    batch: Batch
    kind: Kind
    phases: tuple[Phase, ...]

    @property
    def worst(self) -> Phase:
        """The phase with the peak."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of all."""
        return self.worst.total

    def reserved(self) -> int:
        """With what the allocator adds."""
        return round(FRAGMENTS * self.peak)

    def fits(self, card: Card) -> bool:
        """Whether the card's memory suffices."""
        return self.reserved() <= card.usable_bytes


def kind_of(config: RunConfig, model: Model, on_gpu: bool = True) -> Kind:
    """How the network would be run on a GPU."""
    compiled = config.train.compile
    if compiled is None:
        compiled = on_gpu and config.data.packing and not cuts_blocks(config) and model.elements >= COMPILED_FROM
    return Kind(
        BYTES[config.precision.dtype],
        attention_kind(config)[0],
        compiled,
        config.train.gradient_checkpointing,
        inputs_kept=config.zero.stage == 3 and memory_efficient_linear(config) is not False,
    )


def memory_of(
    config: RunConfig, ranks: int, batch: Batch, model: Model | None = None, rank: int | None = None
) -> Memory:
    """Memory of a training run: of ``rank`` (None: the one that takes most), with micro batches of that shape."""
    model = model or model_of(config)
    states = states_of(config, model, ranks, rank)
    kind = kind_of(config, model)
    activations = activations_of(config, model, batch, kind)
    return Memory(model, states, activations, batch, kind, tuple(_phases(config, states, activations, batch, model)))


def whole_batch(config: RunConfig, labelled: float = 1.0, segments: int = 0) -> Batch:
    """The largest micro batch that can come: rows of ``data.max_length`` of which a share predicts labels."""
    rows = config.train.micro_batch_size or MICRO_BATCH_SIZE
    length = config.data.max_length
    packed = max(1, segments) * rows if config.data.packing else 0
    return Batch(rows, length, round(rows * length * labelled), packed)


def _phases(config: RunConfig, states: States, act: Activations, batch: Batch, model: Model) -> list[Phase]:
    steady = {
        "weights": states.weights,
        "masters": states.masters,
        "moments": states.moments,
        **({"states that pass through": states.passing} if states.passing else {}),
        "workspace": WORKSPACE,
    }
    always = steady | ({"gradients": states.gradients, "buckets": states.buckets} if states.bucket_is_kept else {})
    between = always | {"gradients so far": states.accumulated}
    further = {} if states.adds_in_place else {"gradients so far": states.accumulated}
    filled = always | further | {"gradients": states.gradients, "buckets": states.buckets}
    blocks = {"activations": act.blocks + act.rest}
    gathered = {"gathered": states.gathered}
    reduced = filled if states.early else between | {"buckets": states.buckets}
    element = BYTES[config.precision.dtype]
    return [
        Phase("load", _load(config, states, model)),
        Phase("leak gate", always | {"logits": _gate(batch, model, element)} | gathered),
        Phase(
            "forward",
            between | blocks | {"logits": act.logits, "loss": act.loss_forward} | gathered,
        ),
        Phase(
            "loss",
            between | blocks | {"logits": act.logits, "loss": act.loss_backward} | gathered,
        ),
        Phase("backward", _in_blocks(states, act, model.network.layers, between, reduced) | gathered),
        Phase("end of backward", filled | {"largest gradient": states.largest_gradient + states.on_their_way}),
        Phase("step", always | {"gradients": states.gradients, "copies of gradients": states.update}),
    ]


def _in_blocks(states: States, act: Activations, layers: int, before: Terms, reduced: Terms) -> Terms:
    """The worst moment of the blocks' backward pass; ``before``, ``reduced``: what stands before and with gradients."""
    kept, in_block = {"activations": act.blocks + act.rest}, act.one_block + act.backward + states.waiting
    moments = [reduced | kept | {"one block": max(in_block, states.largest_gradient + states.on_their_way)}]
    if act.rounding:
        # In the last block's MLP there is no gradient yet where only adapters of attention are trained; in the next
        # one a block less is kept.
        rounding = {"one block": in_block + act.rounding}
        less = {"activations": act.blocks - act.blocks // layers + act.rest}
        moments += [before | kept | rounding, reduced | less | rounding]
    return max(moments, key=lambda terms: sum(terms.values()))


def _load(config: RunConfig, states: States, model: Model) -> Terms:
    """Random weights are made on the GPU, whole and in 16 bit; a checkpoint's come there when the engine is made."""
    made = states.initial
    if config.model.init == "random":
        made = max(made, states.weights + round(RANDOM_CHUNK))
        low = low_matrices(config, model)
        if low:
            whole = BYTES[config.precision.dtype] * model.elements
            made = max(made, whole + ROUNDING * max(one.elements for one in low))
    return {"weights": states.weights, "while the engine is made": made - states.weights}


def _gate(batch: Batch, model: Model, element: int) -> int:
    """The leak gate holds the logits of one row's labels three times, and a block's inner states without gradients."""
    network, labels = model.network, batch.labels // batch.rows
    chunk = 4 * min(LOSS_CHUNK, labels * network.vocab)
    return 3 * labels * network.vocab * element + 2 * chunk + 4 * batch.length * network.inner * element


def at(memory: Memory, phase: str) -> Phase:
    """The phase of that name."""
    return next(one for one in memory.phases if one.name == phase)
