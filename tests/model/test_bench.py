"""The benchmarks of the networks run; their numbers mean something on a GPU only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "experiments" / "bench"


def lines(script: str, *words: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, str(BENCH / script), "--small", *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_speed_has_a_line_a_case_and_both_networks_compute_the_same() -> None:
    setting, *cases = lines("network_speed.py", "--tokens", "32", "64", "--repeats", "2")
    assert setting["parameters"]["ours"] == setting["parameters"]["glm"]
    assert [(case["method"], case["tokens"]) for case in cases] == [
        ("lora", 32),
        ("lora", 64),
        ("full", 32),
        ("full", 64),
    ]
    for case in cases:
        # bfloat16 rounds the two norms at different places.
        assert case["loss"]["ours"] == pytest.approx(case["loss"]["glm"], abs=5e-3)
        assert len(case["speed_of_repeats"]) == 2
        assert case["speed"] > 0
        assert case["adapters"] == (["torch.bfloat16"] if case["method"] == "lora" else [])


def test_precision_is_finite_and_near_float32_in_every_release() -> None:
    _, *cases = lines("network_precision.py", "--tokens", "48")
    assert len(cases) == 6
    for case in cases:
        assert case["finite"], case
        assert case["generated"] == 16
        assert case["logits_relative"] < {"bf16": 2e-2, "fp16": 3e-3}[case["format"]]
        if case["release"] != "chatglm":
            assert case["logits_relative"] < 1.2 * case["glm_logits_relative"]
        assert case["gradients_relative"] < {"bf16": 3e-2, "fp16": 5e-3}[case["format"]]
