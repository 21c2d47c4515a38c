"""What bfloat16 and float16 cost in the three ChatGLM networks at true size, against the same weights in float32.

    python experiments/bench/network_precision.py [--tokens 1024] [--small]

For each release and each 16-bit format: random weights of the 6B sizes, forward, backward (float16 with its loss scaled
by 1024) and 16 generated tokens; then the same (rounded) weights in float32 on the same row, without TF32. One JSON
line each: the largest difference of the logits beside their largest size, the relative differences ||a - b|| / ||b|| of
logits and of all gradients together, the difference of the loss, the share of positions whose best token is the same,
and how many of the generated tokens agree (greedy; random weights give near ties, so these may part early). For
ChatGLM2/3 ``glm_logits_relative`` is what transformers' GlmForCausalLM makes of the same weights in the same format.

Measured on one H200 (results/network_precision_h200.jsonl): all finite; relative logits differences in bfloat16 and
float16 0.021 and 0.0026 (ChatGLM), 0.053 and 0.0067 (ChatGLM2/3); the weights are ready in under a second. Memory: 25
GB for float32 weights, as much for their gradients. Half a minute.
``--small``: two narrow layers, for a rehearsal on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import time
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GlmForCausalLM

from glmexp.model.configuration import ChatGLM2Config, ChatGLMConfig
from glmexp.model.glm_layout import glm_config, to_glm
from glmexp.model.random_init import build

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = {"bf16": 1.0, "fp16": 1024.0}
NEW_TOKENS = 16
SMALL_2: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 2,
    "kv_channels": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 96,
    "padded_vocab_size": 512,
}
SMALL_1: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 4,
    "inner_hidden_size": 96,
    "vocab_size": 512,
    "bos_token_id": 504,
    "eos_token_id": 505,
}


def main() -> None:
    """All releases in both formats, one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--releases", nargs="+", default=["chatglm", "chatglm2", "chatglm3"])
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    say(kind="setting", device=place, torch=torch.__version__, transformers=transformers.__version__)
    for release in options.releases:
        for name in FORMATS:
            say(**compare(release, name, options.tokens, options.small))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


def compare(release: str, name: str, tokens: int, small: bool) -> dict[str, Any]:
    """One release in one 16-bit format against float32."""
    start = time.perf_counter()
    config: Any
    if release == "chatglm":
        config = ChatGLMConfig(**(SMALL_1 if small else {}))
    else:
        config = ChatGLM2Config(release=release, **(SMALL_2 if small else {}))
    network = build(config, FORMATS[name], "sdpa", 0)
    synchronize()
    ready = time.perf_counter() - start
    ids, prompt = row(config, tokens)
    ids = ids.to(network.device)
    exact = copy.deepcopy(network).float()
    found = passed(network, ids, SCALE[name])
    expected = passed(exact, ids, 1.0)
    rounded_logits, exact_logits = found["logits"], expected["logits"]
    result: dict[str, Any] = {
        "kind": "case",
        "release": release,
        "format": name,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "ready_s": round(ready, 2),
        "tokens": tokens,
        "loss": found["loss"],
        "loss_difference": abs(found["loss"] - expected["loss"]),
        "largest_logit": float(exact_logits.abs().max()),
        "logits_difference": float((rounded_logits - exact_logits).abs().max()),
        "logits_relative": float((rounded_logits - exact_logits).norm() / exact_logits.norm()),
        "same_best_token": float((rounded_logits.argmax(-1) == exact_logits.argmax(-1)).float().mean()),
        **gradients(network, exact, SCALE[name]),
    }
    for one in (network, exact):
        one.zero_grad(set_to_none=True)
    if release != "chatglm":
        theirs = glm_logits(network, ids)
        result["glm_logits_relative"] = float((theirs - exact_logits).norm() / exact_logits.norm())
    written, wanted = generated(network, prompt), generated(exact, prompt)
    return {
        **result,
        "finite": bool(rounded_logits.isfinite().all()) and result["gradients_finite"],
        "generated": len(written),
        "generated_alike": sum(one == other for one, other in zip(written, wanted, strict=False)),
        "seconds": round(time.perf_counter() - start, 1),
    }


def row(config: Any, tokens: int) -> tuple[Tensor, Tensor]:
    """A row of random ids, and the part of it that a generation starts from (v1: with [gMASK] sop at its end)."""
    ids = torch.randint(5, 400, (1, tokens), generator=torch.Generator().manual_seed(1))
    if config.release != "chatglm":
        return ids, ids[:, : tokens // 2]
    half = tokens // 2
    ids[:, half - 2], ids[:, half - 1] = config.gmask_token_id, config.bos_token_id
    return ids, ids[:, :half]


def passed(network: Any, ids: Tensor, scale: float) -> dict[str, Any]:
    """Forward and backward over all positions; logits in float32."""
    labels = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) < ids.shape[1] // 2, -100)
    output = network(input_ids=ids, labels=labels, use_cache=False)
    (output.loss * scale).backward()
    return {"loss": output.loss.item(), "logits": output.logits.detach().float()}


@torch.no_grad()
def glm_logits(network: Any, ids: Tensor) -> Tensor:
    """What GlmForCausalLM gives with the same weights, in float32."""
    with torch.device("meta"):
        glm = GlmForCausalLM._from_config(glm_config(network.config), dtype=network.dtype, attn_implementation="sdpa")
    glm.load_state_dict(to_glm(network.state_dict(), network.config), assign=True)
    # Inverse frequencies are no weights: they are made again where the network is.
    with torch.device(network.device):
        glm.model.rotary_emb = type(glm.model.rotary_emb)(glm.config)
    return glm.eval()(input_ids=ids, use_cache=False).logits.float()


def gradients(network: Any, exact: Any, scale: float) -> dict[str, Any]:
    """Relative difference of all gradients together, the parameter with the largest one, and whether all are finite."""
    difference = size = 0.0
    worst, finite = ("", 0.0), True
    for (name, parameter), other in zip(network.named_parameters(), exact.parameters(), strict=True):
        found, wanted = parameter.grad.float() / scale, other.grad
        finite = finite and bool(found.isfinite().all())
        one, norm = float((found - wanted).norm()), float(wanted.norm())
        difference, size = difference + one**2, size + norm**2
        if norm and one / norm > worst[1]:
            worst = (name, one / norm)
    return {
        "gradients_relative": (difference / size) ** 0.5,
        "gradients_worst": {worst[0]: worst[1]},
        "gradients_finite": finite,
    }


@torch.no_grad()
def generated(network: Any, prompt: Tensor) -> list[int]:
    """Greedy, with the cache; no end token stops it."""
    prompt = prompt.to(network.device)
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    mask = torch.ones_like(prompt)
    sequences = network.generate(prompt, attention_mask=mask, **settings)
    return sequences[0, prompt.shape[1] :].tolist()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
