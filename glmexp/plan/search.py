"""What would fit: the ladder of changes by what they cost, and the fastest configuration of all that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from glmexp.config import registry
from glmexp.config.derived import GRAD_ACCUM, MICRO_BATCH_SIZE
from glmexp.config.families import FAMILIES
from glmexp.config.memory import passes_gpu
from glmexp.config.schema import RunConfig
from glmexp.plan.cards import Card
from glmexp.plan.report import Plan, Shape, plan_of

Offload = tuple[Literal["cpu"] | None, Literal["cpu"] | None, Literal["gpu"] | None]
"""Where optimizer and parameters are kept, and where the optimizer steps if not there."""
MORE_RANKS = (2, 4, 8, 16, 32, 64)
PER_HOST = 8
"""GPUs of one host, beyond which more ranks are more hosts."""
SHORTEST = 256
_LARGE = ("full", "freeze")
"""Methods that train weights of the network itself."""


@dataclass(frozen=True)
class Change:
    """Overrides that make another configuration of this one."""

    words: tuple[str, ...]
    config: RunConfig
    ranks: int

    @property
    def text(self) -> str:
        """The overrides, for people."""
        return " ".join(self.words) or "as it is"

    def then(self, *words: str, ranks: int | None = None, **sections: Any) -> Change:
        """One more change behind this one."""
        return Change((*self.words, *words), replace(self.config, **sections), ranks or self.ranks)


def first_that_fits(plan: Plan, shape: Shape) -> tuple[Change, Plan] | None:
    """The cheapest change of the ladder that makes the plan fit. None: nothing on it does."""
    assert plan.card is not None, "everything fits where there is no limit"
    for change in ladder(plan.config, plan.ranks):
        found = _planned(change, plan.card, shape, plan.host_limit)
        if found.fits:
            return change, found
    return None


def fitting(plan: Plan, shape: Shape) -> list[tuple[Change, Plan]]:
    """All combinations of micro batch, checkpointing, stage and offload that fit, with the same global batch; the
    fastest first. Without known rates the cheapest first."""
    assert plan.card is not None, "a search needs a card"
    found = []
    for change in _combinations(plan.config, plan.ranks):
        other = _planned(change, plan.card, shape, plan.host_limit)
        if other.fits:
            found.append((change, other))
    if all(one[1].seconds is not None for one in found):
        return sorted(found, key=lambda one: one[1].seconds.total if one[1].seconds is not None else 0.0)
    return sorted(found, key=_cost)


def best(found: list[tuple[Change, Plan]], count: int) -> list[tuple[Change, Plan]]:
    """The first ``count`` of those that fit. Without known rates the first of each stage and offload is among them."""
    if all(plan.seconds is not None for _, plan in found):
        return found[:count]
    places = [_cost(one)[:2] for one in found]
    first = [number for number, place in enumerate(places) if places.index(place) == number]
    rest = [number for number in range(len(found)) if number not in first]
    return [found[number] for number in sorted([*first, *rest][:count])]


def _cost(one: tuple[Change, Plan]) -> tuple[int, int, bool, int]:
    """What a configuration costs where no seconds are known: offload, stage, checkpointing, small micro batches."""
    config = one[0].config
    offloads = (config.offload.optimizer is not None) + (config.offload.params is not None)
    train = config.train
    return offloads, config.zero.stage, train.gradient_checkpointing, -(train.micro_batch_size or MICRO_BATCH_SIZE)


def ladder(config: RunConfig, ranks: int) -> Iterator[Change]:
    """Changes in the order of what they cost: micro batch, checkpointing, length, stage, offload, fewer trained
    parameters, more GPUs. Each later kind is tried with the earlier ones."""
    start = Change((), config, ranks)
    for base in (start, *_shorter(start)):
        yield from _smaller(base)
    bases = [*_stages(start)]
    for base in bases:
        yield from _smaller(base)
    fewer = [*_fewer(start)]
    for base in (*fewer, *(place for one in fewer for place in _stages(one))):
        yield from _smaller(base)
    for more in (number for number in MORE_RANKS if number > ranks):
        for base in _with_ranks(start, more):
            yield from _smaller(base)
    for more in (number for number in MORE_RANKS if number > ranks):
        for cheap in fewer:
            for base in _with_ranks(cheap, more):
                yield from _smaller(base)


def _smaller(base: Change) -> Iterator[Change]:
    """Smaller micro batches with the same global batch; then checkpointing, with each of them."""
    yield base
    yield from _micro(base)
    if not base.config.train.gradient_checkpointing and _may_checkpoint(base.config):
        train = replace(base.config.train, gradient_checkpointing=True)
        again = base.then("train.gradient_checkpointing=true", train=train)
        yield again
        yield from _micro(again)


def _micro(base: Change) -> Iterator[Change]:
    train = base.config.train
    micro, accum = train.micro_batch_size or MICRO_BATCH_SIZE, train.grad_accum or GRAD_ACCUM
    for number in range(micro // 2, 0, -1):
        if micro % number == 0:
            times = accum * micro // number
            words = (f"train.micro_batch_size={number}", f"train.grad_accum={times}")
            yield base.then(*words, train=replace(train, micro_batch_size=number, grad_accum=times))


def _shorter(base: Change) -> Iterator[Change]:
    length = base.config.data.max_length // 2
    while length >= SHORTEST:
        yield base.then(f"data.max_length={length}", data=replace(base.config.data, max_length=length))
        length //= 2


def _stages(base: Change) -> Iterator[Change]:
    """Higher stages where there are several ranks, and what is kept in host memory."""
    config = base.config
    plain: Offload = (None, None, None)
    places: list[tuple[int, Offload]] = []
    if base.ranks > 1:
        places += [(stage, plain) for stage in (2, 3) if stage > config.zero.stage]
    if config.offload.optimizer is None:
        steps: list[Literal["gpu"] | None] = ["gpu", None] if config.zero.stage < 3 else [None]
        places += [(max(config.zero.stage, 2), ("cpu", None, step)) for step in steps]
        places += [(3, ("cpu", "cpu", None))]
    elif config.offload.optimizer == "cpu":
        places += [(config.zero.stage, ("cpu", None, None))] if passes_gpu(config.offload) else []
        places += [(3, ("cpu", "cpu", None))] if config.offload.params is None else []
    for stage, offload in places:
        yield _place(base, stage, offload)


def _lower(base: Change) -> Iterator[Change]:
    """Stage 1 in place of 2, which has all of its keys: it holds whole gradients and reduces them once a step. Those of
    adapters are no matter."""
    config = base.config
    if config.zero.stage == 2 and base.ranks > 1 and config.offload.optimizer is None and config.method.name in _LARGE:
        yield _place(base, 1, (None, None, None))


def _place(base: Change, stage: int, offload: Offload) -> Change:
    config, words = base.config, []
    if stage != config.zero.stage:
        words.append(f"zero=stage{stage}")
    # What the user set stays on the command line; at stage 0 nothing of it is set.
    zero = replace(config.zero, stage=stage)
    if config.zero.stage == 0:
        zero = replace(zero, reduce_bucket_size=200_000_000, overlap_comm=True, contiguous_gradients=True)
    before = kept = config.offload
    if offload[0] is not None:
        kept = replace(kept, optimizer=offload[0], params=offload[1], pin_memory=True)
    if (before.optimizer, before.params) != (kept.optimizer, kept.params):
        words.append("offload=all" if offload[1] else "offload=optimizer")
    if passes_gpu(before) and (stage == 3 or offload[0] is not None):
        kept = replace(kept, adam=None)
    elif offload[2] is not None:
        kept = replace(kept, adam=offload[2])
    if kept.adam != before.adam:
        words.append(f"offload.adam={kept.adam or 'null'}")
    if offload[1] is not None and zero.whole_blocks:
        words.append("zero.whole_blocks=null")
        zero = replace(zero, whole_blocks=None)
    return base.then(*words, zero=zero, offload=kept)


def _fewer(base: Change) -> Iterator[Change]:
    """LoRA in place of a method that trains more."""
    method = base.config.method
    if method.name not in _LARGE:
        return
    settings = {"rank": 8, "alpha": 16, "dropout": 0.0, "target_modules": None, "modules_to_save": [], "lr": method.lr}
    lora = registry.option("method", "lora")(name="lora", **settings)  # as conf/method/lora.yaml, but for the rate
    yield base.then("method=lora", method=lora)


def _with_ranks(base: Change, ranks: int) -> Iterator[Change]:
    """The same global batch on more ranks, states and then weights split over them."""
    train = base.config.train
    per_rank = max(1, (train.batch_size or MICRO_BATCH_SIZE) // ranks)
    micro = min(train.micro_batch_size or MICRO_BATCH_SIZE, per_rank)
    accum = max(1, per_rank // micro)
    launcher = base.config.launcher
    hosts = max(launcher.nnodes, -(-ranks // max(PER_HOST, launcher.nproc or 1)))
    if ranks % hosts:
        return
    here = ranks // hosts
    placed = [f"launcher.nproc={here}"] + ([f"launcher.nnodes={hosts}"] if hosts != launcher.nnodes else [])
    words = [*placed, f"train.micro_batch_size={micro}", f"train.grad_accum={accum}"]
    wide = base.then(
        *words,
        ranks=ranks,
        train=replace(train, micro_batch_size=micro, grad_accum=accum, batch_size=micro * accum * ranks),
        launcher=replace(launcher, nproc=here, nnodes=hosts),
    )
    yield _place(wide, max(2, base.config.zero.stage), (None, None, None))
    yield _place(wide, 3, (None, None, None))


def _may_checkpoint(config: RunConfig) -> bool:
    """PEFT's prefix is a cache, which checkpointing drops."""
    return config.method.name != "ptuning" or FAMILIES[config.model.family].native_prefix


def _combinations(config: RunConfig, ranks: int) -> Iterator[Change]:
    """Every micro batch that divides the rows of a rank, with and without checkpointing, at each stage and offload."""
    start = Change((), config, ranks)
    train = config.train
    rows = (train.micro_batch_size or MICRO_BATCH_SIZE) * (train.grad_accum or GRAD_ACCUM)
    for place in (start, *_lower(start), *_stages(start)):
        for checkpointing in (False, True) if _may_checkpoint(config) else (False,):
            for micro in (number for number in range(rows, 0, -1) if rows % number == 0):
                words = []
                if micro != train.micro_batch_size:
                    words += [f"train.micro_batch_size={micro}", f"train.grad_accum={rows // micro}"]
                if checkpointing != train.gradient_checkpointing:
                    words += [f"train.gradient_checkpointing={str(checkpointing).lower()}"]
                own = replace(
                    train, micro_batch_size=micro, grad_accum=rows // micro, gradient_checkpointing=checkpointing
                )
                yield place.then(*words, train=own)


def _planned(change: Change, card: Card, shape: Shape, host_limit: int | None) -> Plan:
    return plan_of(change.config, change.ranks, card, shape, host_limit)
