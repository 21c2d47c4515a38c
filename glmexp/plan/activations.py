"""What the forward pass keeps for the backward pass, and what stands beside it at the worst moment.

Counted tensor by tensor for the blocks of each family, as autograd keeps them (a tensor that two operations keep counts
once): what of a block is trained, and whether anything before it is, decides what is kept. Where blocks are compiled,
inductor computes what is cheap again: norms, rotations and, under a frozen weight, the product with the gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glmexp.config.schema import RunConfig
from glmexp.plan.shapes import HEADS, REST, Model, Network
from glmexp.plan.states import low_matrices

LOSS_CHUNK = 1 << 26
"""Logits in float32 at a time (``engine.loss.CHUNK_ELEMENTS``)."""
FORWARD_CHUNKS, BACKWARD_CHUNKS = 2.0, 3.25
"""Float32 chunks of logits that stand at a time in the plain loss: logits and their exponentials; in its backward pass
shares, hits (as flags, too) and their difference."""


ROUNDING = 9
"""Bytes of a number while it is rounded to fp8: in float32, that times its row's scale, and the result."""


@dataclass(frozen=True)
class Batch:
    """One micro batch of one rank."""

    rows: int
    length: int
    labels: int
    """Positions that predict a token that is learned: these alone get logits."""
    segments: int = 0
    """Examples in all rows, where they are packed; 0: not packed."""

    @property
    def places(self) -> int:
        """Tokens and padding."""
        return self.rows * self.length


@dataclass(frozen=True)
class Kind:
    """How the network is run."""

    element: int
    """Bytes of a number."""
    attention: str
    compiled: bool
    checkpointing: bool
    inputs_kept: bool = False
    """Stage 3's own linear layer keeps its input whatever is trained (``zero.memory_efficient_linear``)."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one rank."""

    blocks: int
    """Kept by all blocks (with checkpointing: their inputs) from the forward pass on."""
    rest: int
    """Kept outside of the blocks: masks, rotations, final norm, what the output layer sees."""
    logits: int
    """Logits of labelled positions, kept for the loss's backward pass."""
    loss_forward: int
    """More, while the loss is taken: chunks in float32."""
    loss_backward: int
    """More, when its gradient is taken: as many bytes as the logits have, and chunks."""
    one_block: int
    """With checkpointing: what one block keeps while it is computed again."""
    backward: int
    """Gradients that one block's backward pass has at a time."""
    rounding: int
    """Copies of one of them while it is rounded to fp8."""


def activations_of(config: RunConfig, model: Model, batch: Batch, kind: Kind) -> Activations:
    """Of one micro batch."""
    network, tokens, element = model.network, batch.places, kind.element
    trained = Trained(config, model)
    virtual = virtual_tokens(config)
    masks = _masks(network.family, kind, batch, virtual)
    by_layer = []
    for layer in range(network.layers):
        per_token = sum(_block(config, model, trained, layer, kind, batch, virtual))
        by_layer.append(round(per_token * tokens) + (masks.per_layer if trained.reaches(layer) else 0))
    blocks, one_block = sum(by_layer), 0
    if kind.checkpointing:
        inputs = [tokens * element * network.hidden * trained.reaches(layer) for layer in range(network.layers)]
        blocks, one_block = sum(inputs), max(by_layer)
    head_in = batch.labels * element * network.hidden * bool(trained.rest.intersection(HEADS))
    logits = batch.labels * element * network.vocab
    chunk = 0 if kind.compiled else 4 * min(LOSS_CHUNK, batch.labels * network.vocab)
    final = sum(_final_norm(trained, model, kind)) * tokens
    prefix = 2 * virtual * batch.rows * network.layers * network.keys * element if virtual else 0
    return Activations(
        blocks=blocks,
        rest=round(final) + head_in + masks.shared + prefix + _rotation(model, batch, kind),
        logits=logits,
        loss_forward=round(FORWARD_CHUNKS * chunk),
        loss_backward=logits + round(BACKWARD_CHUNKS * chunk),
        one_block=one_block,
        backward=round(_backward(model, kind) * tokens),
        rounding=round(_rounding(config, model, trained, kind) * tokens),
    )


class Trained:
    """Which modules of a block are trained, and how far back gradients go."""

    def __init__(self, config: RunConfig, model: Model) -> None:
        self.by_layer: dict[int, set[str]] = {}
        for one in model.trained:
            self.by_layer.setdefault(one.layer, set()).add(one.module)
        embedding = any("embed" in one.name and one.layer == REST for one in model.trained)
        layers = [layer for layer in self.by_layer if layer != REST]
        self.prefix = config.method.name == "ptuning"
        self.first = -1 if embedding else 0 if self.prefix else min(layers, default=model.network.layers)
        """Layer before whose output nothing needs a gradient; -1: the first block's input does."""
        self.rest = self.by_layer.get(REST, set())

    def reaches(self, layer: int) -> bool:
        """Something in this layer or before it is trained."""
        return layer >= self.first

    def input(self, layer: int) -> bool:
        """The layer's input needs a gradient."""
        return layer > self.first

    def has(self, layer: int, *names: str) -> bool:
        """One of the layer's modules is trained, or has an adapter."""
        return any(name in self.by_layer.get(layer, ()) for name in names)


def virtual_tokens(config: RunConfig) -> int:
    """Length of a trained prefix."""
    return config.method.num_virtual_tokens if config.method.name == "ptuning" else 0


def _block(
    config: RunConfig, model: Model, trained: Trained, layer: int, kind: Kind, batch: Batch, virtual: int
) -> Iterator[float]:
    """Bytes a token that one block keeps."""
    network, element = model.network, kind.element
    hidden, inner, queries = network.hidden, network.inner, network.queries
    if not trained.reaches(layer):
        return
    into, own = trained.input(layer), trained.has
    rank = config.method.rank * element if config.method.name == "lora" else 0
    qkv = own(layer, "query_key_value", "q_proj", "k_proj", "v_proj")
    norm1, norm2 = own(layer, "input_layernorm"), own(layer, "post_attention_layernorm")
    yield from _norm(network.family, hidden, kind, into, norm1)
    if qkv or (kind.inputs_kept and into):
        yield hidden * element
        yield rank * sum(own(layer, name) for name in ("query_key_value", "q_proj", "k_proj", "v_proj"))
    attends = into or norm1 or qkv or trained.prefix
    yield from _attention(network, kind, batch, virtual, attends)
    if own(layer, "dense", "o_proj"):
        yield rank
    if kind.inputs_kept and attends:
        yield queries * element
    after = attends or own(layer, "dense", "o_proj")
    yield from _norm(network.family, hidden, kind, after, norm2)
    first, second = ("gate_proj", "down_proj") if network.family == "qwen2" else ("dense_h_to_4h", "dense_4h_to_h")
    if own(layer, first, "up_proj") or kind.inputs_kept:
        yield hidden * element + rank * (own(layer, first) + own(layer, "up_proj"))
    if after or norm2 or own(layer, first, "up_proj"):
        # The gate and what it is multiplied with; the gate after its activation function.
        yield element * inner * ((2 if kind.compiled else 3) if network.gated else 1)
    if own(layer, second) or kind.inputs_kept:
        # What is multiplied in the backward pass is not computed again, in compiled blocks either.
        yield rank * own(layer, second) + inner * element


def _norm(family: str, width: int, kind: Kind, into: bool, own: bool) -> Iterator[float]:
    """What a norm keeps: RMSNorm its input in float32, and again where its weight is trained."""
    if not into and not own:
        return
    if family == "chatglm":
        yield width * kind.element + 8
    elif kind.compiled:
        yield width * kind.element + 4
    else:
        if into:
            yield width * 4 + 4
        if own:
            yield width * (kind.element if family == "qwen2" else 4)


def _attention(network: Network, kind: Kind, batch: Batch, virtual: int, attends: bool) -> Iterator[float]:
    """Queries, keys, values, what comes out, and a number a head and token."""
    if not attends:
        return
    element, queries, keys = kind.element, network.queries, network.keys
    grown = (batch.length + virtual) / batch.length
    masked = kind.attention == "sdpa" and (virtual > 0 or batch.segments > 0 or network.family == "chatglm")
    if kind.attention == "eager":
        width = batch.length + virtual
        # Scores in float32 twice (masked, softmax), in the run's dtype once.
        yield network.heads * width * (8 + element)
    # With a mask each key and value is repeated for its queries.
    width = queries if masked or kind.attention == "eager" else keys
    yield element * queries + element * width * grown
    fused = network.family != "qwen2"
    repeats = masked and network.heads != network.groups
    if virtual or repeats:
        yield element * width * grown
    else:
        # A value is a view of the fused rows, all of which stay.
        yield element * (queries + 2 * keys if fused else keys)
    yield element * queries + 4 * network.heads


@dataclass(frozen=True)
class _Masks:
    shared: int
    per_layer: int


def _masks(family: str, kind: Kind, batch: Batch, virtual: int) -> _Masks:
    """Dense masks: a boolean one a batch, and sdpa's own copy in numbers in each layer."""
    needed = kind.attention != "varlen" and (batch.segments > 0 or virtual > 0 or family == "chatglm")
    if not needed:
        return _Masks(0, 0)
    rows = batch.rows if batch.segments > 0 or family == "chatglm" else 1
    places = rows * batch.length * (batch.length + virtual)
    return _Masks(places, places * kind.element if kind.attention == "sdpa" else 0)


def _final_norm(trained: Trained, model: Model, kind: Kind) -> Iterator[float]:
    into = any(trained.reaches(layer) for layer in range(model.network.layers))
    own = bool({"final_layernorm", "norm"} & trained.rest)
    yield from _norm(
        model.network.family, model.network.hidden, Kind(kind.element, kind.attention, False, False), into, own
    )


def _rotation(model: Model, batch: Batch, kind: Kind) -> int:
    """Cosines and sines, once for all layers."""
    network = model.network
    width = 2 * network.head_size * kind.element if network.family == "qwen2" else 2 * network.head_size
    return width * batch.length * (batch.rows if batch.segments else 1)


def _backward(model: Model, kind: Kind) -> float:
    """Bytes a token of gradients that stand at a time in a block: those of the MLP's inner width, and of its output."""
    network, element = model.network, kind.element
    return element * ((2 if network.gated else 1) * network.inner + network.hidden)


def _rounding(config: RunConfig, model: Model, trained: Trained, kind: Kind) -> float:
    """Bytes a token of float32 copies of the widest gradient that is rounded to fp8, where no compiler puts that into
    one kernel: that of the MLP's first layer, less what the MLP had kept until then."""
    network = model.network
    low = [one for one in low_matrices(config, model) if trained.reaches(one.layer)]
    if kind.compiled or not low:
        return 0.0
    widest = max(one.shape[0] for one in low)
    freed = 3 if network.gated and widest > network.inner else 2
    return ROUNDING * widest - freed * kind.element * network.inner
