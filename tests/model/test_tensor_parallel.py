"""Two ranks give the logits and tokens of one, for every family: fused and gated layers are split by their parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glmexp.config.errors import ConfigError
from glmexp.model import peer_sum, tensor_parallel
from glmexp.model.decoder import Decoder
from tests.model.samples import network, small_config
from tests.model.test_decoder import PAD, plain, prompts
from tests.ranks import run_on_ranks

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chatglm": ("chatglm", {"vocab_size": 65}),
    "chatglm2": ("chatglm2", {"padded_vocab_size": 65}),
    "chatglm2 head by head": ("chatglm2", {"multi_query_attention": False}),
    "chatglm3 with biases": ("chatglm3", {"add_bias_linear": True}),
    "qwen2": ("qwen2", {}),
}
WITH_PREFIX = ("chatglm", "chatglm2")


def build(case: str, prefix: bool) -> tuple[str, Any]:
    family, changes = CASES[case]
    model = network(family, "sdpa", **changes)
    if prefix:
        model.add_prefix_encoder(3, prefix_projection=False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return family, model.eval()


class Summing(peer_sum.PeerMemory):
    """The kernel's part is played by the process group; rank 1's ``fault`` begins with a call."""

    def __init__(self, rank: int, fault: float, first: int) -> None:
        self.rank, self.width, self.dtype, self.device = rank, 32, torch.bfloat16, torch.device("cpu")
        self.fault, self.first, self.calls = fault if rank else 0.0, first, 0  # type: ignore[assignment]

    def sum(self, part: Any, residual: Any, weight: Any, epsilon: float = 0.0, trial: bool = False) -> Any:
        import torch.distributed as dist

        assert trial, "nothing waits for long in a trial"
        self.calls += 1
        total = part.float()
        dist.all_reduce(total)
        total = (total + residual.float()).to(self.dtype)
        if self.calls >= self.first:
            total[..., -1] += self.fault
        return total, peer_sum.rms_norm(total, weight, epsilon)


class Failing(Summing):
    """Rank 1's kernel cannot be compiled; the other's waits for it in vain."""

    def sum(self, part: Any, residual: Any, weight: Any, epsilon: float = 0.0, trial: bool = False) -> Any:
        if self.rank:
            raise RuntimeError("no compiler here")
        return part * float("nan"), part


def trials(rank: int) -> None:
    """All ranks go the same way, whichever of them finds a fault."""
    right = Summing(rank, 0.0, 0)
    assert peer_sum._agreed(right.is_right) is True
    assert right.calls == 3 + peer_sum.MOST_ROWS
    for fault, first, calls in ((1.0, 1, 1), (float("nan"), 2, 2), (1.0, 3 + peer_sum.MOST_ROWS, 67)):
        wrong = Summing(rank, fault, first)
        assert peer_sum._agreed(wrong.is_right) is None
        assert wrong.calls == calls, "over with the first round that is wrong on any rank"

    assert peer_sum._agreed(Failing(rank, 0.0, 0).is_right) is None
    assert peer_sum.words() == f"sums by gloo ({'RuntimeError: no compiler here' if rank else 'another rank cannot'})"

    def fails() -> bool:
        if rank:
            raise RuntimeError("no such memory here")
        return True

    assert peer_sum._agreed(fails) is None
    why = "RuntimeError: no such memory here" if rank else "another rank cannot"
    assert peer_sum.words() == f"sums by gloo ({why})"


def shared_out() -> list[tuple[str, float, bool]]:
    """On each rank and for each case: error of the logits; tokens equal (of the decoder, once of generate too)."""
    import torch.distributed as dist

    peer_sum.connect(32, torch.float32, torch.device("cpu"), 60.0)
    assert peer_sum.words() == "sums by gloo (no GPU)"
    peer_sum.connect(32, torch.float32, torch.device("cpu"), 60.0, wanted=False)
    assert peer_sum.words() == "sums by gloo (placement.peer_sums=false)"
    trials(dist.get_rank())
    found = []
    for case in CASES:
        for prefix in (False, True) if case in WITH_PREFIX else (False,):
            family, whole = build(case, prefix)
            ids, real = prompts(family, 9, 5)
            with torch.no_grad():
                exact = whole(input_ids=ids, attention_mask=real).logits
            tokens = plain(whole, ids, real, [63], 4)
            own = tensor_parallel.share_out(whole, family, dist.get_rank(), dist.get_world_size())
            with torch.no_grad():
                logits = own(input_ids=ids, attention_mask=real).logits
            same = Decoder(own, "static").generate(ids, real, 4, [63], PAD).equal(tokens)
            if case == "qwen2":
                same = same and plain(own, ids, real, [63], 4).equal(tokens)
            found.append((f"{case} {prefix}", (logits - exact)[real.bool()].abs().max().item(), same))
    return found


def test_two_ranks_are_one(tmp_path: Path) -> None:
    first, second = run_on_ranks(shared_out, folder=tmp_path)
    assert len(first) == 7
    for case, error, same in (*first, *second):
        assert error <= 1e-5, case
        assert same, case


@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_that_do_not_divide_the_groups_are_refused_with_the_numbers(ranks: int) -> None:
    config = small_config("chatglm3")
    with pytest.raises(ConfigError) as caught:
        tensor_parallel.check(config, ranks)
    assert f"{ranks} ranks do not divide the 2 key/value heads" in str(caught.value)
    assert "ranks that do: 1, 2" in str(caught.value)


def test_a_share_is_a_share_of_each_section() -> None:
    rows = torch.arange(12)
    assert tensor_parallel.shares(rows, (8, 2, 2), 0, 2).tolist() == [0, 1, 2, 3, 8, 10]
    assert tensor_parallel.shares(rows, (8, 2, 2), 1, 2).tolist() == [4, 5, 6, 7, 9, 11]
