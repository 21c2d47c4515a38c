"""What each way of decoding costs and how exact it is; what a sum over ranks costs inside of a CUDA graph.

    python experiments/bench/decoding.py --part ways [--batch 1 16] [--prompt 128] [--ways plain graph compiled tuned]
    python experiments/bench/decoding.py --part error
    torchrun --nproc-per-node 2 experiments/bench/decoding.py --part sums shared ways --ways compiled compiled_nccl

One JSON line each. ``ways``: ChatGLM3-6B's shape with random weights in bf16; seconds of the first generation
(compiling and recording), then the median TPOT of five generations of 64 tokens, the share of the bandwidth that a
device copy has in the same call, and the kernels of one step by time. ``tuned`` is compiled with
coordinate_descent_tuning; ``..._masked`` attends with a mask over all slots, ``..._library`` with PyTorch's kernels and
multiplies with cuBLAS, ``..._attend`` does the latter alone, and in ``..._apart`` rotation, cache and gate have kernels
of their own. ``error``: two
layers of each family's true widths; the largest error of the logits of a decoding step against the same weights in
float32, relative to those of transformers' generate in bf16 (1.2 is allowed). Measured: results/decoding_h200.jsonl.
With several ranks ``ways`` is tensor parallel; ``..._nccl`` sums by NCCL, not through the other GPUs' memory, and
``whole`` is ``compiled`` on each GPU alone, measured before. ``sums``: 56 sums of a token's hidden states, with the
residual and norm that follow and without, in one graph. ``shared``: the error of ``error``, ChatGLM3 shared out.
``--small``: narrow layers on the CPU, for a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glmexp.entry.measure import Asked, copy_rate, ours, synchronize, transformers_generate, weights_read
from glmexp.model import decoder as decoder_module
from glmexp.model import one_row, peer_sum, slots, tensor_parallel
from glmexp.model.auto import register_networks
from glmexp.model.configuration import ChatGLM2Config, ChatGLMConfig
from glmexp.model.decoder import Decoder, Way
from glmexp.model.one_row import class_for_rows as one_row_class
from glmexp.model.one_row import takes_rows
from glmexp.model.random_init import build
from glmexp.model.slots import LayerSlots
from glmexp.model.step_ops import HAS_TRITON
from glmexp.model.varlen import has_kernel

WAYS: dict[str, tuple[Way, dict[str, Any] | None]] = {
    "static": ("static", None),
    "graph": ("graph", None),
    "compiled": ("compiled", None),
    "tuned": ("compiled", {"coordinate_descent_tuning": True}),
    "graph_masked": ("graph", None),
    "compiled_masked": ("compiled", None),
    "graph_nccl": ("graph", None),
    "compiled_nccl": ("compiled", None),
    "static_nccl": ("static", None),
    "whole": ("compiled", None),
    "compiled_attend": ("compiled", None),
    "compiled_library": ("compiled", None),
    "compiled_apart": ("compiled", None),
}
NEW = 64
LIMIT_S = 20.0
"""For the other rank."""
ATTEND_AT_ONCE = LayerSlots.attend_at_once
STOP, PAD = [1], 0
GMASK, SOP = 130001, 130004


def main() -> None:
    """One part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["ways", "error", "sums", "shared"], nargs="+", required=True)
    parser.add_argument("--ways", nargs="*", default=["plain", "graph", "compiled", "tuned"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    register_networks()
    for part in args.part:
        {"ways": ways, "error": error, "sums": sums, "shared": shared}[part](args)
    if dist.is_initialized():
        dist.destroy_process_group()


def say(**values: Any) -> None:
    """One JSON line from rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(values), flush=True)


def place() -> torch.device:
    """This rank's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def chatglm3(layers: int, small: bool) -> Any:
    """Its true sizes, or narrow ones."""
    if small:
        sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16, "ffn_hidden_size": 96}
        return ChatGLM2Config(num_layers=2, padded_vocab_size=512, release="chatglm3", **sizes)
    return ChatGLM2Config(num_layers=layers, release="chatglm3")


def ways(args: argparse.Namespace) -> None:
    """TPOT of each way at each batch size."""
    dtype = torch.float32 if args.small else torch.bfloat16
    network: Any = build(chatglm3(28, args.small), dtype, "sdpa", 0).to(place()).eval()
    for name in args.ways:
        if name.startswith("whole"):
            each_alone(network, args, name)
    if dist.is_initialized():
        share_out(network)
    rate, read = copy_rate(place()), weights_read(network)
    say(copy_tb_per_s=rate / 1e12, weight_gb=read / 1e9, ranks=dist.get_world_size() if dist.is_initialized() else 1)
    for batch in args.batch:
        chance = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 500, (batch, args.prompt), generator=chance).to(place())
        for name in (name for name in args.ways if not name.startswith("whole")):
            try:
                one_way(network, name, Asked(ids, NEW, args.prompt + NEW, STOP, PAD), rate, read)
            except Exception as error:  # noqa: BLE001 - the other ways are still worth their numbers
                say(way=name, batch=batch, failed=f"{type(error).__name__}: {error}"[:600])


def each_alone(network: Any, args: argparse.Namespace, name: str) -> None:
    """The whole network on each GPU: what sharing out is held against."""
    ids = torch.randint(3, 500, (1, args.prompt), generator=torch.Generator().manual_seed(0)).to(place())
    asked = Asked(ids, NEW, args.prompt + NEW, STOP, PAD)
    one_way(network, "static" if args.small else name, asked, copy_rate(place()), weights_read(network))


def share_out(network: Any) -> None:
    """This rank's share, in place."""
    tensor_parallel.share_out(network, "chatglm3", dist.get_rank(), dist.get_world_size())
    peer_sum.connect(network.config.hidden_size, network.dtype, place(), LIMIT_S)
    say(shared=peer_sum.words())


@contextmanager
def summing(name: str) -> Iterator[None]:
    """``..._nccl``: the process group sums."""
    kept = peer_sum.memory
    if name.endswith("_nccl"):
        peer_sum.memory = None
    yield
    peer_sum.memory = kept


def one_way(network: Any, name: str, asked: Asked, rate: float, read: int) -> None:
    """First generation, five more, kernels of a step."""
    decoder = None if name == "plain" else Decoder(network, *WAYS[name])
    library = name.endswith("_library")
    slots.HAS_TRITON = HAS_TRITON and not library  # type: ignore[attr-defined]
    decoder_module.takes_rows = (lambda _: False) if library or name.endswith("_attend") else takes_rows
    slots.has_kernel = (lambda _: False) if name.endswith("_masked") else has_kernel  # type: ignore[attr-defined]
    apart = name.endswith("_apart")
    LayerSlots.attend_at_once = (lambda *_: False) if apart else ATTEND_AT_ONCE  # type: ignore[method-assign]
    one_row.class_for_rows = linear_alone if apart else one_row_class
    side = transformers_generate(network) if decoder is None else ours(decoder)
    began = time.perf_counter()
    with summing(name):
        side(asked)
        synchronize()
        first = time.perf_counter() - began
        runs = sorted(side(asked).token_s for _ in range(5))
    say(
        way=name, batch=asked.ids.shape[0], first_s=round(first, 1), tpot_ms=round(1e3 * runs[2], 3),
        least=round(1e3 * runs[0], 3), most=round(1e3 * runs[-1], 3), of_bandwidth=round(read / runs[2] / rate, 3),
    )  # fmt: skip
    if decoder is not None and decoder.step is not None and decoder.step.graph is not None:
        kernels(decoder.step.replay, name)


def linear_alone(module: Any) -> type[torch.nn.Module] | None:
    """Of a block that sees one row nothing but the linear layers is another one."""
    return one_row.RowLinear if type(module) is torch.nn.Linear else None


def kernels(step: Callable[[], None], name: str) -> None:
    """Kernels of one step by time."""
    from torch.profiler import ProfilerActivity, profile

    step()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.device_time_total)
    say(
        way=name, kernels=sum(row.count for row in rows), busy_ms=round(sum(r.device_time_total for r in rows) / 1e3, 3)
    )
    for row in rows[:14]:
        say(us=round(row.device_time_total, 1), count=row.count, kernel=row.key[:110])


def error(args: argparse.Namespace) -> None:
    """Error of one decoding step in bf16, relative to the plain way's."""
    from transformers import Qwen2Config

    two = {"num_layers": 2}
    narrow = {"hidden_size": 64, "num_attention_heads": 4, "num_layers": 2}
    configs = {
        "chatglm3": chatglm3(2, args.small),
        "chatglm": ChatGLMConfig(
            **(narrow | {"inner_hidden_size": 96, "vocab_size": 130528} if args.small else two),
            bos_token_id=SOP, gmask_token_id=GMASK, mask_token_id=130000, eos_token_id=130005, pad_token_id=3,
        ),
        "qwen2": Qwen2Config(
            hidden_size=64 if args.small else 3584, intermediate_size=96 if args.small else 18944,
            num_attention_heads=4 if args.small else 28, num_key_value_heads=2 if args.small else 4,
            num_hidden_layers=2, vocab_size=512 if args.small else 152064, max_position_embeddings=4096,
        ),
    }  # fmt: skip
    for family, config in configs.items():
        exact: Any = build(config, torch.float32, "sdpa", 0).to(place()).eval()
        network: Any = build(config, torch.bfloat16, "sdpa", 0).to(place()).eval()
        exact.load_state_dict({name: tensor.float() for name, tensor in network.state_dict().items()})
        recorded = ["static"] if args.small else ["static", "graph", "compiled"]
        for batch, names in ((8, recorded), (1, recorded[:2])):
            ids, real = padded(family, batch, args.prompt)
            plain = step_logits(network, ids, real, None)
            for name in names:
                found = step_logits(network, ids, real, Decoder(network, *WAYS[name]))
                off, allowed, rows = errors(exact, ids, real, found, plain)
                ratio = round(off / allowed, 3)
                say(family=family, way=name, batch=batch, error=off, plain=allowed, ratio=ratio, rows=rows)


Found = tuple[Tensor, Tensor]
"""Of ``step_logits``."""


def errors(exact: Any, ids: Tensor, real: Tensor, found: Found, plain: Found) -> tuple[float, float, int]:
    """Largest error of ``found`` and of ``plain`` where both wrote the same first token, and in how many rows."""
    same = (found[1] == plain[1]).flatten()
    whole, mask = torch.cat((ids, plain[1]), dim=1), torch.cat((real, torch.ones_like(plain[1])), dim=1)
    with torch.no_grad():
        truth = exact(input_ids=whole, attention_mask=mask, use_cache=False).logits[:, -1]
    off, allowed = ((one[0].float() - truth)[same].abs().max().item() for one in (found, plain))
    return off, allowed, int(same.sum())


def padded(family: str, batch: int, longest: int) -> tuple[Tensor, Tensor]:
    """Prompts of several lengths, pads in front."""
    chance = torch.Generator().manual_seed(0)
    ids, real = torch.randint(3, 500, (batch, longest), generator=chance), torch.ones(batch, longest, dtype=torch.int64)
    for row in range(batch):
        real[row, : row * longest // (2 * batch)] = 0
    if family == "chatglm":
        ids[:, -2:] = torch.tensor([GMASK, SOP])
    return ids.to(place()), real.to(place())


def step_logits(network: Any, ids: Tensor, real: Tensor, decoder: Decoder | None) -> tuple[Tensor, Tensor]:
    """Logits (batch, vocabulary) of the second token, and the first one (batch, 1)."""
    if decoder is not None:
        new = decoder.generate(ids, real, 2, STOP, PAD)
        assert decoder.step is not None
        assert decoder.step.logits is not None
        return decoder.step.logits.clone(), new[:, :1]
    with torch.no_grad():
        out = network.generate(
            input_ids=ids, attention_mask=real, max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=PAD,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return out.logits[1], out.sequences[:, ids.shape[1] : ids.shape[1] + 1]


def shared(args: argparse.Namespace) -> None:
    """Error of a step of ChatGLM3 shared out, by each way of summing, relative to the plain way's on one GPU."""
    config = chatglm3(2, args.small)
    exact: Any = build(config, torch.float32, "sdpa", 0).to(place()).eval()
    network: Any = build(config, torch.bfloat16, "sdpa", 0).to(place()).eval()
    exact.load_state_dict({name: tensor.float() for name, tensor in network.state_dict().items()})
    asked = {batch: padded("chatglm3", batch, args.prompt) for batch in (1, 8)}
    plain = {batch: step_logits(network, *one, None) for batch, one in asked.items()}
    share_out(network)
    for name in (
        "static",
        "static_nccl",
        *([] if args.small else ["graph", "graph_nccl", "compiled", "compiled_nccl"]),
    ):
        for batch, (ids, real) in asked.items():
            with summing(name):
                found = step_logits(network, ids, real, Decoder(network, *WAYS[name]))
            off, allowed, rows = errors(exact, ids, real, found, plain[batch])
            mine = [found[0].double().sum().item(), off]
            both: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(both, mine)
            say(shared=name, batch=batch, error=off, plain=allowed, ratio=round(off / allowed, 3), rows=rows,
                same_on_all=all(one == both[0] for one in both))  # fmt: skip


def sums(args: argparse.Namespace) -> None:
    """56 sums over the ranks of one token's hidden states, in one CUDA graph."""
    if not dist.is_initialized():
        sums_on_one()
        return
    began = time.perf_counter()
    peer_sum.connect(4096, torch.bfloat16, place(), LIMIT_S)
    say(sums=peer_sum.words(), connect_s=round(time.perf_counter() - began, 2))
    own = peer_sum.memory
    for rows in (1, 16, 64):
        part = torch.ones(rows, 1, 4096, dtype=torch.bfloat16, device=place())
        weight = part[0, 0].clone()
        ways: dict[str, Callable[[], Any]] = {"nccl": lambda part=part: by_nccl(part), "one_shot": one_shot(part)}
        if own is not None:
            ways["own"] = lambda part=part: own.sum(part, None, None)
            ways["own with residual"] = lambda part=part: own.sum(part, part, None)
            ways["own with residual and norm"] = lambda part=part, weight=weight: own.sum(part, part, weight, 1e-5)
        for name, one in ways.items():
            for warps in (32, 16, 8) if name.startswith("own") and own is not None and rows == 1 else (32,):
                if own is not None:
                    own.warps = warps
                try:
                    say(sum=name, rows=rows, warps=warps, us_each=round(timed(one, 56), 2))
                except Exception as error:  # noqa: BLE001 - what this machine does not offer
                    say(sum=name, rows=rows, failed=f"{type(error).__name__}: {error}"[:600])


def sums_on_one() -> None:
    """Two ranks as two streams of one GPU: the kernel without what lies between GPUs."""
    memory = torch.zeros(2, peer_sum.PeerMemory.size_of(4096, 2), dtype=torch.int64, device=place())
    two = [peer_sum.PeerMemory([row.data_ptr() for row in memory], rank, 4096, torch.bfloat16) for rank in range(2)]
    streams = [torch.cuda.Stream() for _ in two]
    part = torch.ones(1, 1, 4096, dtype=torch.bfloat16, device=place())
    peer_sum.TRIAL_NS = 1_000_000_000

    def chain(weight: Tensor | None) -> None:
        for one, stream in zip(two, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(56):
                    one.sum(part, part, weight, 1e-5, trial=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    for name, weight in (("residual", None), ("residual and norm", part[0, 0].clone())):
        for one in two:  # compiled before one waits for the other
            one.sum(part, part, weight, 1e-5, trial=True)
        synchronize()
        say(sum=f"own with {name}, two ranks on one GPU", us_each=round(timed(lambda w=weight: chain(w), 1) / 56, 2))


def by_nccl(part: Tensor) -> Tensor:
    """As it was done before: a copy, and the sum in place."""
    total = part.clone()
    dist.all_reduce(total)
    return total


def one_shot(part: Tensor) -> Callable[[], Tensor]:
    """The sum by torch's symmetric memory, without NVLink multicast."""
    ready: list[Tensor] = []

    def run() -> Tensor:
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD
        assert group is not None
        if not ready:
            ready.append(symmetric.empty(part.numel(), dtype=part.dtype, device=part.device))
            symmetric.rendezvous(ready[0], group)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(ready[0], part.flatten(), "sum", group.group_name)

    return run


def timed(one: Callable[[], Any], count: int) -> float:
    """Microseconds of one call among ``count`` in a graph."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        one()
        return 1e6 * (time.perf_counter() - began)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        one()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            one()
    times = []
    for _ in range(20):
        synchronize()
        began = time.perf_counter()
        graph.replay()
        synchronize()
        times.append(time.perf_counter() - began)
    return 1e6 * sorted(times)[len(times) // 2] / count


if __name__ == "__main__":
    main()
