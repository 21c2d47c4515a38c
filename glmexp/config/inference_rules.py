"""Rules of placement, decoding and bench: which entries read them, how many ranks they have, what can be divided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from glmexp.config.entries import SERVES
from glmexp.config.errors import Problem
from glmexp.config.launch_rules import talks
from glmexp.config.schema import RunConfig

if TYPE_CHECKING:
    from glmexp.config.rules import Facts

_LAYERS_ONLY = ("gpu_bytes", "cpu_bytes", "disk_folder")


def one_rank(config: RunConfig) -> bool:
    """Where nobody says how many ranks there are, one is enough: it sees all GPUs, or measures one."""
    if config.entry.name not in SERVES:
        return False
    alone = config.entry.name == "bench" or talks(config)
    return config.placement.name == "layers" or (alone and config.placement.name == "single")


def check(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """All of them."""
    entry = config.entry.name
    if entry != "bench":
        for key in sorted(key for key in facts.explicit if key.startswith("bench.")):
            yield Problem(key, f"without effect under entry={entry}", "leave it out, or entry=bench")
    if entry not in SERVES:
        asks = ", ".join(f"entry={name}" for name in SERVES)
        for key in sorted(key for key in facts.explicit if key.startswith(("placement.", "decoding."))):
            yield Problem(key, f"without effect under entry={entry}", f"leave it out, or {asks}")
        if config.placement.name != "single":
            yield Problem("placement.name", f"{config.placement.name} without effect under entry={entry}", asks)
        return
    yield from _placement(config, facts)
    yield from _decoding(config, facts)
    if entry == "bench":
        yield from _bench(config, facts)


def _placement(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    name, ranks = config.placement.name, facts.ranks
    if name != "layers":
        for key in _LAYERS_ONLY:
            if f"placement.{key}" in facts.explicit:
                yield Problem(f"placement.{key}", f"without effect with placement={name}", "placement=layers")
    if name == "layers" and ranks > 1:
        yield Problem(
            "launcher.nproc", f"{ranks} ranks, but placement=layers is one that sees all GPUs", "launcher.nproc=1"
        )
    if name == "layers" and config.placement.gpu_bytes is not None and not facts.gpus:
        yield Problem("placement.gpu_bytes", "without effect: there is no GPU", "leave it out")
    if name == "tensor_parallel" and ranks == 1:
        yield Problem("placement.name", "tensor_parallel with 1 rank shares nothing", "launcher.nproc=2, or single")
    if name == "tensor_parallel" and config.launcher.nnodes > 1:
        yield Problem(
            "launcher.nnodes", "placement=tensor_parallel sums twice a block: one machine", "launcher.nnodes=1"
        )
    if name == "tensor_parallel" and config.model.init == "random":
        sizes = config.model.sizes
        parts = {
            "num_key_value_heads": sizes.num_key_value_heads,
            "num_attention_heads": sizes.num_attention_heads,
            "intermediate_size": sizes.intermediate_size,
        }
        for key, number in parts.items():
            if number is not None and number % ranks:
                yield Problem(
                    f"model.sizes.{key}",
                    f"{number} cannot be shared out over {ranks} ranks (placement=tensor_parallel)",
                    "a number of ranks that divides it",
                )


def _decoding(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    way = config.decoding.way
    if way in ("graph", "compiled") and not facts.gpus:
        yield Problem("decoding.way", f"{way} needs a GPU", "decoding.way=static, or null")
    if way not in (None, "plain") and config.placement.name == "layers":
        yield Problem("decoding.way", f"{way} keeps all on one device, placement=layers does not", "decoding.way=plain")


def _bench(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    bench = config.bench
    if config.placement.name == "single" and facts.ranks > 1:
        yield Problem(
            "launcher.nproc",
            f"{facts.ranks} ranks would measure the same",
            "launcher.nproc=1, or placement=tensor_parallel",
        )
    for key in ("prompt_lengths", "batch_sizes"):
        if not getattr(bench, key):
            yield Problem(f"bench.{key}", "is empty", f"bench.{key}=[1]")
    if bench.plain and config.decoding.way == "plain":
        yield Problem("bench.plain", "true, but decoding.way=plain is what it would compare with", "bench.plain=false")
    most = config.model.sizes.max_positions
    longest = max(bench.prompt_lengths, default=0) + bench.new_tokens
    if config.model.init == "random" and most is not None and longest > most:
        yield Problem(
            "bench.prompt_lengths",
            f"{longest - bench.new_tokens} and {bench.new_tokens} new tokens are {longest}, and the network ends at "
            f"model.sizes.max_positions={most}",
            "shorter ones, or a larger model.sizes.max_positions",
        )
