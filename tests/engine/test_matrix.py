"""Every method x model x ZeRO stage on two ranks equals a plain torch loop, and its artifact proves itself.

Tolerances in fp32 (same global batch, 5 steps): loss 1e-5 absolute, gradient norm 1e-4 relative, weights 5e-5. The
two sides add gradients up in another order: two ranks with two micro batches each against one batch. With its usual
eps Adam turns the rounding of a gradient that is zero on paper (a key's bias moves no softmax) into a whole step, so
eps is 1e-4.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from glmexp.entry import proof
from tests.engine.cells import Trace, all_stages, configure, plain_loop
from tests.ranks import run_on_ranks

METHODS = ["lora", "ptuning", "freeze", "full"]
MODELS = ["tiny", "tiny_qwen2", "tiny_chatglm", "tiny_chatglm2"]
# By default one model; the marker adds the rest.
CELLS = [
    pytest.param(model, method, marks=[] if model == "tiny" else pytest.mark.matrix)
    for model in MODELS
    for method in METHODS
]


@pytest.mark.parametrize(("model", "method"), CELLS)
def test_every_stage_equals_a_plain_loop(model: str, method: str, tmp_path: Path) -> None:
    overrides = [f"model={model}", f"method={method}", "optim.lr=1e-3", "optim.eps=1e-4"]
    expected = plain_loop(configure(*overrides), ranks=2)
    by_rank = run_on_ranks(all_stages, overrides, ["trainable"], str(tmp_path), folder=tmp_path)
    for stage, found in by_rank[0].items():
        _assert_equal(found, expected, f"stage {stage}")
        # This process has never seen DeepSpeed's engine: it is as fresh as a user's.
        verdict = proof.judge(tmp_path / f"stage{stage}-trainable")
        assert verdict["faults"] == [], f"stage {stage}"
        assert verdict["logits_effect_of_training"] > verdict["logits_allowed"], "training changed the logits"


def _assert_equal(found: Trace, expected: Trace, where: str) -> None:
    assert found.losses == pytest.approx(expected.losses, abs=1e-5), where
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4), where
    assert found.weights.keys() == expected.weights.keys(), where
    for name, weight in expected.weights.items():
        assert float((found.weights[name] - weight).abs().max()) <= 5e-5, f"{where}: {name}"
