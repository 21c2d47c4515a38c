"""Sums through the other GPUs' memory: as exact as NCCL's, the same bits on all ranks, recorded and replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glmexp.model import peer_sum
from tests.ranks import run_on_ranks

REPLAYS = 40


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("width", "rows", "dtype"), [(4096, 1, torch.bfloat16), (3584, 5, torch.float16)])
def test_ranks_on_streams_of_one_gpu_sum_in_a_graph(
    width: int, rows: int, dtype: torch.dtype, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The protocol and the arithmetic; what lies between GPUs is not in it."""
    monkeypatch.setattr(peer_sum, "TRIAL_NS", 500_000_000)
    memory = torch.zeros(ranks, peer_sum.PeerMemory.size_of(width, ranks), dtype=torch.int64, device="cuda")
    members = [peer_sum.PeerMemory([row.data_ptr() for row in memory], rank, width, dtype) for rank in range(ranks)]
    parts = torch.empty(2, ranks, rows, width, dtype=dtype, device="cuda")
    residual = torch.empty(rows, width, dtype=dtype, device="cuda")
    weight = torch.rand(width, dtype=dtype, device="cuda")
    streams = [torch.cuda.Stream() for _ in members]

    def chain() -> list[tuple[torch.Tensor, ...]]:
        results = []
        for rank, (one, stream) in enumerate(zip(members, streams, strict=True)):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                total, normed = one.sum(parts[0, rank], residual, weight, 1e-5, trial=True)
                results.append((total, normed, one.sum(parts[1, rank], total, None, trial=True)[0]))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return results

    for _ in range(2):  # at first ranks are late, as each compiles: what they wait for is NaN, and counted all the same
        chain()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = chain()
    for _ in range(REPLAYS):
        parts.normal_()
        residual.normal_()
        graph.replay()
        first, second = (sum(one.float() for one in call) for call in parts)
        total = (first + residual.float()).to(dtype)
        norm, further = peer_sum.rms_norm(total, weight, 1e-5), (second + total.float()).to(dtype)
        step = 2 * torch.finfo(dtype).eps
        for found in recorded:
            assert torch.equal(found[0], total)
            assert torch.allclose(found[1].float(), norm.float(), rtol=step, atol=step)
            assert torch.equal(found[1], recorded[0][1]), "the same bits on all ranks"
            assert torch.equal(found[2], further)


def replayed(width: int, rows: int, dtype: torch.dtype) -> tuple[str, float, float, bool]:
    """How sums go, largest error of the kernel and of NCCL's way over all replays, all ranks have the same bits."""
    import torch.distributed as dist

    from glmexp.engine import distributed

    device = distributed.device()
    peer_sum.connect(width, dtype, device, 60.0)
    own = peer_sum.memory
    chance = torch.Generator(device).manual_seed(dist.get_rank())
    common = torch.Generator(device).manual_seed(7)
    parts = torch.empty(2, rows, width, dtype=dtype, device=device)
    residual, weight = torch.empty_like(parts[0]), torch.rand(width, generator=common, dtype=dtype, device=device)

    def chain() -> tuple[torch.Tensor, ...]:
        total, normed = torch.ops.glmexp.sum_and_norm(parts[0], residual, weight, 1e-5)
        return total, normed, torch.ops.glmexp.sum_over_ranks(parts[1], total)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = chain()
    worst, allowed, same = 0.0, 0.0, True
    for _ in range(REPLAYS):
        parts.normal_(generator=chance)
        residual.normal_(generator=common)
        graph.replay()
        first, second = parts.float().unbind()
        for one in (first, second):
            dist.all_reduce(one)
        truth = first + residual.float()
        exact = (truth, peer_sum.rms_norm(truth, weight.float(), 1e-5), truth + second)
        peer_sum.memory = None
        plain = chain()
        peer_sum.memory = own
        errors = [
            max((one.float() - true).abs().max().item() for one, true in zip(found, exact, strict=True))
            for found in (results, plain)
        ]
        worst, allowed = max(worst, errors[0]), max(allowed, errors[1])
        for one in results:
            other = one.clone()
            dist.broadcast(other, 0)
            same &= bool(torch.equal(one, other))
    return peer_sum.words(), worst, allowed, same


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("width", "rows", "dtype"), [(4096, 1, torch.bfloat16), (3584, 64, torch.float16)])
def test_the_kernel_is_as_exact_as_nccl(tmp_path: Path, width: int, rows: int, dtype: torch.dtype) -> None:
    for words, error, allowed, same in run_on_ranks(replayed, width, rows, dtype, folder=tmp_path, timeout_s=120):
        assert words == "sums by one kernel through the other GPUs' memory"
        assert error <= allowed
        assert same
