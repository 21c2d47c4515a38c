"""Stage 3 with blocks gathered as one piece: the numbers of DeepSpeed's own way, one graph for all blocks, no memory
of gathered weights between the passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glmexp.config.ds_config import lower
from glmexp.engine import build, compiled, distributed, gather
from glmexp.engine.adapters import make_thin
from glmexp.engine.loop import Loop
from glmexp.entry import training
from tests.engine.cells import batches, configure, rows
from tests.ranks import run_on_ranks

STEPS = 2
STAGE3 = ["zero=stage3", "zero.stage3_param_persistence_threshold=1000", "optim.lr=1e-3"]
CASES = {
    "lora": ["model=tiny_qwen2", "method=lora"],
    "full": ["model=tiny", "method=full"],
    "prefixes": ["model=tiny_qwen2", "method=ptuning"],
}


def _ways(cases: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Of each case: our way with compiled blocks, then DeepSpeed's (whose linear layer stays for the whole process)."""
    found: dict[str, dict[str, Any]] = {name: {} for name in cases}
    for way, keys in (("ours", []), ("DeepSpeed's", ["zero.whole_blocks=false"])):
        for name, words in cases.items():
            found[name][way] = _run([*STAGE3, *words, *keys], way == "ours")
    return found


def _run(words: list[str], ours: bool) -> dict[str, Any]:
    config = configure(*words)
    ds_config = lower(config, distributed.world_size())
    torch.manual_seed(config.train.seed)
    model = training.network(config, ds_config)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if ours:
        assert make_thin(model) or config.method.name != "lora"  # as training.network does where it compiles
        compiled.compile_blocks(training.inner(model), backend="aot_eager")
    engine = build.initialize(model, config, ds_config, STEPS)
    losses, norms, kept = [], [], []

    def on_metrics(_: int, metrics: dict[str, float]) -> None:
        losses.append(metrics["train/loss"])
        norms.append(metrics["train/grad_norm"])

    (_, micro_batches), *_ = batches(config, *rows(config), 0, 1)
    same = [(step, micro_batches[:1] * 2) for step in range(1, STEPS + 1)]  # one shape
    blocks = getattr(engine.optimizer.parameter_offload.partition_all_parameters.__self__, "blocks", [])
    engine.module.register_forward_hook(lambda *_: kept.append([one.held_bytes for one in blocks]))
    Loop(engine, same, 1, on_metrics, lambda *_: kept.append([one.held_bytes for one in blocks])).run()
    result = {
        "losses": losses,
        "norms": norms,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "kept": kept,
        "sizes": [one.size_bytes for one in blocks],
        "weights": gather.tensors(build.trainable(engine.module)),
    }
    engine.destroy()
    return result


def test_compiled_blocks_train_to_the_numbers_of_deepspeeds_way_and_hold_nothing(tmp_path: Path) -> None:
    for name, ways in run_on_ranks(_ways, CASES, folder=tmp_path)[0].items():
        ours, plain = ways["ours"], ways["DeepSpeed's"]
        assert plain["losses"][0] != pytest.approx(plain["losses"][-1], abs=1e-3), f"{name} trains"
        assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-5), name
        assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-4), name
        # No bias: those of keys have no gradient but rounding, of which Adam makes whole steps.
        for key, weight in ((key, one) for key, one in ours["weights"].items() if not key.endswith(".bias")):
            torch.testing.assert_close(weight, plain["weights"][key], rtol=0, atol=5e-5, msg=f"{name}: {key}")
        if name != "prefixes":  # a cache knows its layers
            assert ours["graphs"] == 1, f"{name}: blocks share a graph"
        sizes = ours["sizes"]
        assert len(sizes) > 1
        assert min(sizes) > 0
        last_alone = [0] * (len(sizes) - 1) + sizes[-1:]
        assert ours["kept"] == [last_alone, last_alone, [0] * len(sizes)] * STEPS, name
