"""The plan of a configuration as a whole, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from glmexp.config.memory import BYTES, EXACT_PINNING, MASTER, MOMENTS, exact_pinning, passes_gpu
from glmexp.config.schema import RunConfig
from glmexp.plan.activations import Batch
from glmexp.plan.cards import Card
from glmexp.plan.estimate import Memory, memory_of, whole_batch
from glmexp.plan.shapes import Model, model_of
from glmexp.plan.states import States
from glmexp.plan.timing import Seconds, step_of

GIB, GB = 2**30, 10**9
HOST_PROCESS = 1.4 * GIB
"""Of a rank beside what an offload keeps: Python, torch, CUDA (measured on an H200)."""
CHECKPOINT = MASTER + MOMENTS
"""Bytes a trained element in a checkpoint."""
RULES = {"full": 16.0, "lora": 0.1}
"""What people quote, in GB for 1e9 parameters: all of full fine-tuning's states; what LoRA adds to the weights."""


@dataclass(frozen=True)
class Shape:
    """What is known of the rows beside the configuration."""

    longest: int
    """Tokens of the longest row, cut to data.max_length."""
    label_share: float
    """Of its tokens, those that are learned."""
    mean: float
    """Tokens of a row on the average."""
    source: str

    @staticmethod
    def unknown(config: RunConfig) -> Shape:
        """Rows of data.max_length, all of whose tokens are learned: the most that can come."""
        longest = config.data.max_length
        return Shape(longest, 1.0, longest, "nothing is known of the rows: each is data.max_length tokens, all learned")

    @staticmethod
    def in_place_of_the_demo(config: RunConfig) -> Shape:
        """The same where the rows are the shipped demo's: a few words each, which no large model is trained on."""
        source = (
            f"each is data.max_length={config.data.max_length} tokens, all learned, in place of "
            f"{config.data.train_file} (a few words each); data.train_file=FILE plans for yours"
        )
        return replace(Shape.unknown(config), source=source)

    def batch(self, config: RunConfig) -> Batch:
        """The largest micro batch."""
        if config.data.packing:
            return whole_batch(config, self.label_share, max(1, round(config.data.max_length / self.mean)))
        length = min(self.longest, config.data.max_length)
        short = replace(config, data=replace(config.data, max_length=length))
        return whole_batch(short, self.label_share)


@dataclass(frozen=True)
class Plan:
    """One configuration on one kind of card."""

    config: RunConfig
    ranks: int
    card: Card | None
    memory: Memory
    seconds: Seconds | None
    host_bytes: int
    """Of one host, all its ranks."""
    host_limit: int | None
    disk_bytes: int
    """Checkpoints, artifact and what is offloaded to a disk."""

    @property
    def fits(self) -> bool:
        """On the card and in the host; True where no limit is known."""
        return (self.card is None or self.memory.fits(self.card)) and (
            self.host_limit is None or self.host_bytes <= self.host_limit
        )


def plan_of(
    config: RunConfig,
    ranks: int,
    card: Card | None,
    shape: Shape,
    host_limit: int | None = None,
    model: Model | None = None,
) -> Plan:
    """The plan of a configuration whose batch numbers are derived."""
    model = model or model_of(config)
    batch = shape.batch(config)
    memory = memory_of(config, ranks, batch, model)
    seconds = None if card is None else step_of(config, model, memory.states, batch, memory.kind, card, ranks)
    host = on_host(memory.states, min(ranks, config.launcher.nproc or ranks))
    return Plan(config, ranks, card, memory, seconds, host, host_limit, _disk(config, model, memory))


def on_host(states: States, here: int) -> int:
    """Bytes of one host's memory, with ``here`` ranks on it."""
    return round(here * (states.host_bytes + HOST_PROCESS))


def _disk(config: RunConfig, model: Model, memory: Memory) -> int:
    element, trained = BYTES[config.precision.dtype], model.trained_elements
    kept = 1 + config.train.keep_checkpoints if config.train.save_steps else 0
    whole = model.elements if config.gather.name == "full16" else trained
    return kept * CHECKPOINT * trained + element * whole + memory.states.disk


def size(number: float) -> str:
    """Bytes for people."""
    return f"{number / GIB:,.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:,.1f} MiB"


def table(plan: Plan) -> list[str]:
    """Bytes of one rank's GPU: a line a phase, the worst marked, terms largest first."""
    worst = plan.memory.worst
    lines = []
    for phase in plan.memory.phases:
        terms = sorted(phase.terms.items(), key=lambda term: -term[1])
        shown = ", ".join(f"{name} {size(value)}" for name, value in terms if value >= max(1, phase.total // 1000))
        mark = "*" if phase is worst else " "
        lines.append(f"{mark} {phase.name:<16}{size(phase.total):>12}   {shown}")
    return lines


def verdict(plan: Plan) -> str:
    """One line: fits or not, and by how much."""
    memory, card = plan.memory, plan.card
    name, value = max(memory.worst.terms.items(), key=lambda term: term[1])
    peak = f"peak {size(memory.peak)} in {memory.worst.name}, most of it {name} ({size(value)})"
    if card is None:
        return f"{peak}; no card to hold it against (entry=plan plan.gpu=24GB, or a name)"
    of = f"{size(card.usable_bytes)} that torch can have of {card.name}"
    if not memory.fits(card):
        return f"{peak}: does not fit into {of}"
    return f"{peak}: fits into {of}, {1 - memory.reserved() / card.usable_bytes:.0%} are left"


def rules_of_thumb(plan: Plan) -> str:
    """What people quote for the method, beside the plan's own."""
    model, states = plan.memory.model, plan.memory.states
    billions = model.elements / GB
    own = states.kept + states.gradients + states.host_bytes
    if plan.config.method.name == "full":
        quoted = RULES["full"] * billions * GB
        return (
            f'rule of thumb "16 GB per billion for full": {quoted / GB:.1f} GB over all ranks; here weights, '
            f"gradients, masters and moments are {own / GB:.1f} GB a rank (GPU and host), and the peak is "
            f"{plan.memory.peak / GB:.1f} GB"
        )
    added = own - BYTES[plan.config.precision.dtype] * sum(one.elements for one in model.frozen)
    quoted = RULES["lora"] * billions * GB
    return (
        f'rule of thumb "0.1 GB per billion for LoRA" beside the weights: {quoted / GB:.2f} GB; here what '
        f"{plan.config.method.name} adds is {max(0, added) / GB:.3f} GB, and the peak is {plan.memory.peak / GB:.1f} GB"
    )


def price(plan: Plan) -> str:
    """What a configuration takes: peak, host memory where something is kept there, seconds of a step."""
    host = f", {size(plan.host_bytes)} of host memory" if plan.memory.states.host else ""
    time = "" if plan.seconds is None else f", {plan.seconds.total:.3g} s a step"
    return f"peak {size(plan.memory.peak)}{host}{time}"


def short(plan: Plan) -> list[str]:
    """The first lines of a training."""
    seconds = plan.seconds
    time = "" if seconds is None else f"; a step {seconds.total:.3g} s"
    host = f"; host {size(plan.host_bytes)}" if plan.memory.states.host else ""
    return [f"plan: {verdict(plan)}{time}{host}"]


def terms_of(plan: Plan) -> list[str]:
    """For the message of a run that is out of memory."""
    return ["planned:", *table(plan), verdict(plan)]


def as_json(plan: Plan) -> dict[str, Any]:
    """All numbers; bytes and seconds."""
    states = plan.memory.states
    return {
        "fits": plan.fits,
        "ranks": plan.ranks,
        "card": None if plan.card is None else asdict(plan.card) | {"usable_bytes": plan.card.usable_bytes},
        "parameters": plan.memory.model.elements,
        "trainable_parameters": plan.memory.model.trained_elements,
        "micro_batch": asdict(plan.memory.batch),
        "attention": plan.memory.kind.attention,
        "compiled": plan.memory.kind.compiled,
        "peak_bytes": plan.memory.peak,
        "peak_phase": plan.memory.worst.name,
        "phases": {phase.name: {"total_bytes": phase.total, **phase.terms} for phase in plan.memory.phases},
        "host_bytes": plan.host_bytes,
        "host": states.host | {"pinned rounding": states.pinned_rounding},
        "host_limit_bytes": plan.host_limit,
        "disk_bytes": plan.disk_bytes,
        "step_s": None if plan.seconds is None else asdict(plan.seconds) | {"total": plan.seconds.total},
    }


def host_ways_out(config: RunConfig) -> str:
    """What makes an offload smaller in host memory."""
    offload, ways = config.offload, ["more hosts"]
    if config.method.name == "full":
        ways.insert(0, "method=lora")
    if offload.nvme_path is None:
        ways.insert(0, "offload=nvme" if config.zero.stage == 3 else "zero=stage3 offload=nvme")
    if offload.pin_memory and not exact_pinning(config.launcher.env) and not passes_gpu(offload):
        ways.insert(
            0, f"launcher.env={{PYTORCH_ALLOC_CONF: '{EXACT_PINNING}'}} (torch 2.13) or offload.pin_memory=false"
        )
    return ", ".join(ways)
