"""What the rivals share: the networks at true size with random weights, the rows, the metrics file."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GlmConfig, GlmForCausalLM, Qwen2Config, Qwen2ForCausalLM

IGNORED = -100
SIZES: dict[str, dict[str, Any]] = {
    "chatglm3": {
        "vocab_size": 65024, "hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "attention_bias": True, "partial_rotary_factor": 0.5, "pad_token_id": 0, "eos_token_id": 2,
    },
    "qwen2": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
        "num_key_value_heads": 4, "max_position_embeddings": 32768,
    },
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1408
}  # fmt: skip
TARGETS = {"chatglm3": ["q_proj", "k_proj", "v_proj"], "qwen2": ["q_proj", "k_proj", "v_proj", "o_proj"]}
ALL_TARGETS = {"qwen2": [*TARGETS["qwen2"], "gate_proj", "up_proj", "down_proj"]}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), required=True)
    parser.add_argument("--ids", type=Path, required=True, help="ids.npz of instruction_data.py")
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--small", action="store_true", help="narrow layers, for a rehearsal on a CPU")
    parser.add_argument("--seven", action="store_true", help="LoRA on all seven projections (qwen2)")
    return parser


def network(asked: argparse.Namespace, attention: str) -> Any:
    """Random bf16 weights where the work is done."""
    sizes = {
        **SIZES[asked.model],
        "num_hidden_layers": asked.layers,
        "use_cache": False,
        **(SMALL if asked.small else {}),
    }
    if asked.small and "head_dim" in sizes:
        sizes["head_dim"] = 16
    made = GlmConfig(**sizes) if asked.model == "chatglm3" else Qwen2Config(**sizes, tie_word_embeddings=False)
    made._attn_implementation = attention
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        built = (GlmForCausalLM if asked.model == "chatglm3" else Qwen2ForCausalLM)(made)
    torch.set_default_dtype(torch.float32)
    return built


def targets(asked: argparse.Namespace) -> list[str]:
    return (ALL_TARGETS if asked.seven else TARGETS)[asked.model]


def rows(file: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, labels) of each row."""
    with np.load(file) as held:
        ends = np.cumsum(held["lengths"])[:-1]
        ids = held["ids"].astype(np.int64)
        labels = np.where(held["learned"], ids, IGNORED)
        return list(zip(np.split(ids, ends), np.split(labels, ends), strict=True))


class Steps:
    """metrics.jsonl under the names that glmexp uses. The clock runs from one ``done`` to the next, without writing."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._step = file, 0
        self._started = time.perf_counter()

    def done(self, tokens: float) -> None:
        """An optimizer step over ``tokens`` real tokens has been given to the device."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        self._step += 1
        peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
        line = {
            "step": self._step,
            "perf/step_s": seconds,
            "perf/tokens_per_s": tokens / seconds,
            "mem/peak_bytes": peak,
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._started = time.perf_counter()
