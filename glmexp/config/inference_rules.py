"""Rules of placement, decoding and bench: which entries read them, how many ranks they have, what can be divided."""

from __future__ import annotations

from collections.abc import Iterator

from glmexp.config import folders
from glmexp.config.entries import SERVES
from glmexp.config.errors import Problem
from glmexp.config.facts import Facts
from glmexp.config.families import FAMILIES
from glmexp.config.launch_rules import talks
from glmexp.config.schema import RunConfig

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
    if entry not in SERVES:
        asks = ", ".join(f"entry={name}" for name in SERVES)
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
    if name != "tensor_parallel" and "placement.peer_sums" in facts.explicit:
        yield Problem("placement.peer_sums", f"without effect with placement={name}", "placement=tensor_parallel")
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
    if name == "tensor_parallel":
        yield from _shares(config, ranks)
    if name != "single" and prefix_of_peft(config):
        yield Problem("placement.name", f"{name} has no place for a prefix of PEFT", "placement=single")


def prefix_of_peft(config: RunConfig) -> bool:
    """What answers has a prefix in the cache that PEFT puts there: an artifact of P-Tuning on Qwen2."""
    method = config.method.name == "ptuning" and not FAMILIES[config.model.family].native_prefix
    return method and config.artifact.path is not None


def _shares(config: RunConfig, ranks: int) -> Iterator[Problem]:
    """Each rank has whole heads, whole groups of keys and values and whole columns of the MLP."""
    section = folders.answering(config)
    sizes = folders.sizes_of(section)
    if sizes is None:  # on a hub: the network itself is asked, once it is there
        return
    heads = sizes.num_attention_heads
    parts = {
        "key/value heads": sizes.num_key_value_heads or heads,
        "query heads": heads,
        "columns of the MLP": sizes.intermediate_size,
    }
    known = {words: number for words, number in parts.items() if number is not None}
    fit = [str(count) for count in range(2, 65) if not any(number % count for number in known.values())]
    words = next((words for words, number in known.items() if number % ranks), None)
    if words is not None:
        yield Problem(
            "launcher.nproc",
            f"{ranks} ranks do not divide the {known[words]} {words} of {section.path} (placement=tensor_parallel)",
            f"ranks that do: {', '.join(fit) or 'none, placement=single'}",
        )


def _decoding(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    way = config.decoding.way
    if way in ("graph", "compiled") and not facts.gpus:
        yield Problem("decoding.way", f"{way} needs a GPU", "decoding.way=static, or null")
    if way not in (None, "plain") and prefix_of_peft(config):
        yield Problem("decoding.way", f"{way} does not apply to a prefix of PEFT", "decoding.way=plain, or null")
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
    longest, new, most = max(bench.prompt_lengths, default=0), bench.new_tokens, positions(config)
    if most is not None and longest + new > most:
        yield Problem(
            "bench.prompt_lengths",
            f"{longest} and {new} new tokens are {longest + new}, and the network ends at {most}",
            f"{most - new} at most" if most > new else f"bench.new_tokens={most // 2}, and shorter prompts",
        )


def positions(config: RunConfig) -> int | None:
    """Positions of the network that will answer; None where only its checkpoint on a hub knows them."""
    sizes = folders.sizes_of(folders.answering(config))
    return None if sizes is None else sizes.max_positions
