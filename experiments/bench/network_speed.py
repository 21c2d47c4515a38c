"""Speed of the ChatGLM2/3 network itself beside transformers' GlmForCausalLM, forward and backward, on one GPU.

    python experiments/bench/network_speed.py [--tokens 2048 8192] [--repeats 5] [--layers 28] [--small]

Both hold the same random weights of ChatGLM3-6B's sizes in bfloat16 and get the same rows (batch 1, sdpa, no mask, loss
over all positions by the same function); no optimizer step, no checkpointing. Full training: all weights have
gradients. LoRA: PEFT, rank 8, on query_key_value (ours) and on q_proj, k_proj, v_proj (theirs). The two take turns in
one process, and who goes first changes with each repeat.

One JSON line a case: milliseconds of one forward and backward (median, least and most of the repeats, by CUDA events)
and ``speed``, ours in multiples of theirs (median over the repeats of their time / our time). Wanted: at least 0.97 in
every case; measured on one H200 (results/network_speed_h200.jsonl): 0.98 to 1.10. Where a case does not fit into
memory its layers are halved, and the line says so. ``--small`` is a rehearsal with two narrow layers, on a CPU where
there is no GPU: its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch import Tensor
from transformers import GlmForCausalLM

from glmexp.engine.loss import loss_sum
from glmexp.model.configuration import ChatGLM2Config
from glmexp.model.glm_layout import glm_config, to_glm
from glmexp.model.random_init import build

SMALL = {"hidden_size": 64, "num_layers": 2, "kv_channels": 16, "num_attention_heads": 4, "ffn_hidden_size": 96}
TARGETS = {"ours": ["query_key_value"], "glm": ["q_proj", "k_proj", "v_proj"]}
ITERATIONS = 3
WARM_UP = 2


def main() -> None:
    """All cases, one JSON line each."""
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    networks = pair(options)
    say(
        kind="setting",
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        torch=torch.__version__,
        transformers=transformers.__version__,
        peft=peft.__version__,
        dtype="bfloat16",
        parameters={name: sum(p.numel() for p in one.parameters()) for name, one in networks.items()},
        repeats=options.repeats,
        iterations=ITERATIONS,
    )
    if "lora" in options.methods:
        adapted = {name: with_lora(network, TARGETS[name]) for name, network in networks.items()}
        for tokens in options.tokens:
            case(adapted, "lora", tokens, options.repeats, device)
        networks = {name: network.unload() for name, network in adapted.items()}
    if "full" in options.methods:
        for network in networks.values():
            network.requires_grad_(True)
        for tokens in options.tokens:
            case(networks, "full", tokens, options.repeats, device)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--methods", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--small", action="store_true")
    return parser.parse_args()


def say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


def pair(options: argparse.Namespace) -> dict[str, Any]:
    """The two networks with the same weights."""
    sizes = {**SMALL, "padded_vocab_size": 512} if options.small else {"num_layers": options.layers}
    ours = build(ChatGLM2Config(**sizes), torch.bfloat16, "sdpa", 0)
    weights = to_glm(ours.state_dict(), ours.config)
    with torch.device("meta"):
        glm = GlmForCausalLM._from_config(glm_config(ours.config), dtype=torch.bfloat16, attn_implementation="sdpa")
    # The inverse frequencies are no weights: they are made again where the network will be.
    glm.load_state_dict(weights, assign=True)
    with torch.device(ours.device):
        glm.model.rotary_emb = type(glm.model.rotary_emb)(glm.config)
    return {"ours": ours.train(), "glm": glm.train()}


def with_lora(network: Any, targets: list[str]) -> Any:
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.0, target_modules=targets)
    return peft.get_peft_model(network, settings, autocast_adapter_dtype=False)


def case(networks: dict[str, Any], method: str, tokens: int, repeats: int, device: torch.device) -> None:
    """Measure one case, with fewer layers where memory asks for it."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(3, 500, (1, tokens), generator=generator).to(device)
    while True:
        try:
            measured = alternate(networks, ids, repeats, device)
            break
        except torch.OutOfMemoryError:
            halve(networks)
        gc.collect()
        torch.cuda.empty_cache()
    times, losses, peaks = measured
    speeds = [glm / ours for ours, glm in zip(times["ours"], times["glm"], strict=True)]
    say(
        kind="case",
        method=method,
        tokens=tokens,
        layers=len(layers(networks["ours"])),
        trained={name: sum(p.numel() for p in one.parameters() if p.requires_grad) for name, one in networks.items()},
        adapters=sorted({str(p.dtype) for one in networks.values() for n, p in one.named_parameters() if "lora_" in n}),
        ms={name: spread(values) for name, values in times.items()},
        speed=round(statistics.median(speeds), 4),
        speed_of_repeats=[round(speed, 4) for speed in speeds],
        loss=losses,
        peak_gib=peaks,
    )


def alternate(
    networks: dict[str, Any], ids: Tensor, repeats: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, float]]:
    """Milliseconds of each repeat, the losses, the peak memory in GiB."""
    losses: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for name, network in networks.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UP):
            losses[name] = round(float(step(network, ids)), 5)
        if device.type == "cuda":
            peaks[name] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    times: dict[str, list[float]] = {name: [] for name in networks}
    for repeat in range(repeats):
        for name in sorted(networks, reverse=repeat % 2 == 1):
            times[name].append(timed(lambda network=networks[name]: step(network, ids), device))
    return times, losses, peaks


def step(network: Any, ids: Tensor) -> Tensor:
    """One forward and backward; gradients do not add up. Returns the loss without waiting for it."""
    network.zero_grad(set_to_none=True)
    logits = network(input_ids=ids, use_cache=False).logits
    loss = loss_sum(logits, ids) / (ids.shape[1] - 1)
    loss.backward()
    return loss.detach()


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call, the mean over ITERATIONS."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(ITERATIONS):
            work()
        return (time.perf_counter() - start) * 1000 / ITERATIONS
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(ITERATIONS):
        work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / ITERATIONS


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)}


def layers(network: Any) -> Any:
    plain = network.get_base_model() if hasattr(network, "get_base_model") else network
    return plain.transformer.encoder.layers if hasattr(plain, "transformer") else plain.model.layers


def halve(networks: dict[str, Any]) -> None:
    """Drop the second half of the layers of both; their order stays."""
    for network in networks.values():
        network.zero_grad(set_to_none=True)
        kept = layers(network)
        del kept[len(kept) // 2 :]


if __name__ == "__main__":
    main()
