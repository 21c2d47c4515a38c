"""Tensor parallel inference: every rank has a share of each layer's heads and of the MLP's width (Shoeybi et al. 2019,
arXiv:1909.08053).

Libraries split a fused ``query_key_value`` or a gate that lies on its value by rows alone, which mixes them up, so each
linear layer names the sections that its rows consist of, and a rank takes its share of each. Two sums over the ranks a
block, and the logits put together at the end: nothing else is said between them, and all of it can be recorded in a
CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.schema import Family
from glmexp.model import peer_sum
from glmexp.model.chatglm2 import Block
from glmexp.model.prefix import PrefixEncoder


@dataclass(frozen=True)
class Cut:
    """How one kind of linear layer is shared out."""

    suffix: str
    """Last part of its name."""
    sections: tuple[int, ...] | None
    """Rows of each section of its output, a rank takes its share of each; None: it sums over its input's columns."""


def heads_of(config: Any) -> tuple[int, int]:
    """Query heads, and key/value heads (groups), of a network's configuration."""
    return config.num_attention_heads, config.num_key_value_heads


def check(config: Any, ranks: int) -> None:
    """ConfigError where heads or groups cannot be shared out over that many ranks."""
    heads, groups = heads_of(config)
    width = inner_width(config)
    for number, words in ((groups, "key/value heads"), (heads, "query heads"), (width, "columns of the MLP")):
        if number % ranks:
            fit = ", ".join(str(n) for n in range(1, groups + 1) if not (groups % n or heads % n or width % n))
            raise ConfigError(
                Problem(
                    "launcher.nproc",
                    f"{ranks} ranks do not divide the {number} {words} of this network (placement=tensor_parallel)",
                    f"ranks that do: {fit}",
                )
            )


def inner_width(config: Any) -> int:
    """Columns of the MLP's inner layer, of one half where it has a gate."""
    for name in ("ffn_hidden_size", "inner_hidden_size", "intermediate_size"):
        found = getattr(config, name, None)
        if found is not None:
            return int(found)
    raise AssertionError("a configuration names the width of its MLP")


def cuts(family: Family, config: Any) -> tuple[Cut, ...]:
    """The linear layers of a block."""
    heads, groups = heads_of(config)
    inner = inner_width(config)
    if family == "qwen2":
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return (
            Cut("q_proj", (heads * size,)),
            Cut("k_proj", (groups * size,)),
            Cut("v_proj", (groups * size,)),
            Cut("o_proj", None),
            Cut("gate_proj", (inner,)),
            Cut("up_proj", (inner,)),
            Cut("down_proj", None),
        )
    size = config.head_size
    fused: tuple[int, ...]
    if family == "chatglm" or not config.multi_query_attention:
        fused, gated = (3 * heads * size,), family != "chatglm"  # head by head its q, k and v
    else:
        fused, gated = (heads * size, groups * size, groups * size), True
    return (
        Cut("query_key_value", fused),
        Cut("dense", None),
        Cut("dense_h_to_4h", (inner, inner) if gated else (inner,)),
        Cut("dense_4h_to_h", None),
    )


def _frozen(part: Tensor) -> nn.Parameter:
    """A copy of its own: a view would keep the whole tensor in memory."""
    return nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)


def shares(rows: Tensor, sections: tuple[int, ...], rank: int, ranks: int) -> Tensor:
    """This rank's share of each section of ``rows`` (rows, ...), one behind the other."""
    assert rows.shape[0] == sum(sections), f"{rows.shape[0]} rows, and sections of {sections}"
    return torch.cat([part.chunk(ranks)[rank] for part in rows.split(sections)])


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with copies of ``weight`` (out, in) and ``bias`` (out,)."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = _frozen(weight)
    layer.bias = None if bias is None else _frozen(bias)  # type: ignore[assignment]  # as torch has it
    return layer


def column_parallel(whole: nn.Linear, sections: tuple[int, ...], rank: int, ranks: int) -> nn.Linear:
    """A share of a linear layer's outputs."""
    bias = None if whole.bias is None else shares(whole.bias, sections, rank, ranks)
    return _linear(shares(whole.weight, sections, rank, ranks), bias)


class RowParallel(nn.Module):
    """A linear layer over a share of its inputs; the ranks' results are added up, here or by the block."""

    def __init__(self, whole: nn.Linear, rank: int, ranks: int, sums: bool) -> None:
        super().__init__()
        self.sums = sums
        # Rank 0 brings the bias, so that it is added once.
        self.part = _linear(whole.weight.chunk(ranks, dim=1)[rank], None if rank else whole.bias)

    def forward(self, states: Tensor) -> Tensor:
        """``states`` (..., share of in) to (..., out)."""
        part = self.part(states)
        return torch.ops.glmexp.sum_over_ranks(part, None) if self.sums else part


class OutputParallel(nn.Module):
    """The output layer: each rank makes the logits of a part of the vocabulary, and gets those of all."""

    weight: nn.Parameter

    def __init__(self, whole: nn.Linear, rank: int, ranks: int) -> None:
        super().__init__()
        assert whole.bias is None, "output layers have no bias"
        self.rows: int = whole.weight.shape[0]
        part = -(-self.rows // ranks)
        own = whole.weight[rank * part : (rank + 1) * part]
        padded = torch.zeros(part, whole.weight.shape[1], dtype=own.dtype, device=own.device)
        padded[: len(own)] = own
        self.weight = _frozen(padded)

    def forward(self, states: Tensor) -> Tensor:
        """``states`` (batch, length, hidden) to (batch, length, vocabulary)."""
        own = nn.functional.linear(states, self.weight)
        ranks = dist.get_world_size()
        parts = torch.empty(ranks, *own.shape, dtype=own.dtype, device=own.device)
        dist.all_gather_into_tensor(parts.view(ranks * own.shape[0], *own.shape[1:]), own.contiguous())
        return parts.movedim(0, -2).flatten(-2)[..., : self.rows]


class SharedPrefix(nn.Module):
    """A P-Tuning prefix of which each rank has its groups' keys and values."""

    def __init__(self, whole: PrefixEncoder, rank: int, ranks: int) -> None:
        super().__init__()
        self.whole, self.rank, self.ranks, self.pre_seq_len = whole, rank, ranks, whole.pre_seq_len

    def forward(self, slots: Tensor, batch: int) -> Tensor:
        """As ``PrefixEncoder``: (2 * layers, batch, share of groups, virtual tokens, head_size)."""
        return self.whole(slots, batch).chunk(self.ranks, dim=2)[self.rank]


def share_out(network: Any, family: Family, rank: int, ranks: int) -> Any:
    """Leave this rank's share of ``network`` (a plain one: adapters are merged before), on its device. In place.

    Raises ConfigError where heads or groups cannot be shared out.
    """
    peer_sum.define()
    check(network.config, ranks)
    kinds = {cut.suffix: cut for cut in cuts(family, network.config)}
    blocks = [module for module in network.modules() if isinstance(module, Block)]
    for block in blocks:
        block.sums = True
    found = set()
    for parent, name, layer in list(_linears(network)):
        cut = kinds.get(name)
        if cut is None:
            continue
        found.add(name)
        if cut.sections is None:
            setattr(parent, name, RowParallel(layer, rank, ranks, sums=not blocks))
        else:
            setattr(parent, name, column_parallel(layer, cut.sections, rank, ranks))
    assert found == set(kinds), f"no linear layer is called {sorted(set(kinds) - found)}"
    _share_heads(network, ranks)
    network.set_output_embeddings(OutputParallel(network.get_output_embeddings(), rank, ranks))
    encoder = getattr(getattr(network, "transformer", None), "prefix_encoder", None)
    if encoder is not None:
        network.transformer.prefix_encoder = SharedPrefix(encoder, rank, ranks)
    return network


def _linears(network: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in network.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child


def _share_heads(network: nn.Module, ranks: int) -> None:
    """Attention modules that count their heads count their share; Qwen2's reads it off the shapes."""
    for module in network.modules():
        if hasattr(module, "num_key_value_groups"):
            for name in ("heads", "groups"):
                if hasattr(module, name):
                    setattr(module, name, getattr(module, name) // ranks)
