"""Keys of the zero section change how fast and with how much memory a run trains, and no number of it.

fp32 on two ranks: losses within 1e-5 of the plain stage, gradient norms within 1e-4. Quantized weights and gradients
(ZeRO++) need CUDA and are refused here (see ``config/test_rules.py``); streams (overlap_comm) exist on a GPU only, so
that such a key shows here that it trains.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.engine.cells import short_runs
from tests.ranks import run_on_ranks

SMALL = ["reduce_bucket_size=1000", "overlap_comm=false", "reduce_scatter=false"]
STAGE2 = ["allgather_bucket_size=1000", "round_robin_gradients=true"]
PLAIN = ["whole_blocks=false"]
FETCHED = [
    *PLAIN,
    "stage3_prefetch_bucket_size=0",
    "stage3_model_persistence_threshold=1000",
    "stage3_max_live_parameters=1",
    "stage3_max_reuse_distance=1",
    "sub_group_size=10000",
]
REDUCED = [
    "contiguous_gradients=false",
    "stage3_use_all_reduce_for_fetch_params=true",
    "stage3_param_persistence_threshold=0",
    "memory_efficient_linear=false",
]
GROUPED = [
    "stage3_allgather_sequential=true",
    "zero_hpz_partition_size=2",
    "stage3_module_granularity_threshold=17000",
    "communication_data_type=fp32",
]
LEAF = ["leaf_modules=[Block]", "memory_efficient_linear=false"]
TOGETHER = {
    "stage3 fetched": [*SMALL, *FETCHED],
    "stage3 reduced": REDUCED,
    "stage3 grouped": GROUPED,
    "stage3 leaf": LEAF,
    "stage2 small": [*SMALL, *STAGE2],
    "stage2 as they lie": ["contiguous_gradients=false"],
    "stage1 to each rank": ["use_multi_rank_bucket_allreduce=false"],
}
"""Keys side by side, so that few runs take many."""
CHECKPOINTED = "train.gradient_checkpointing=true"


def _words(stage: str, keys: list[str], *more: str) -> list[str]:
    return ["optim.lr=1e-3", f"zero={stage}", *(f"zero.{key}" for key in keys), *more]


def _equal(found: dict, plain: str) -> None:
    losses, norms = found.pop(plain)
    assert losses[0] != pytest.approx(losses[-1], abs=1e-3), "it trains"
    for name, traced in found.items():
        assert not isinstance(traced, str), f"{name}: {traced}"
        assert traced[0] == pytest.approx(losses, abs=1e-5), name
        assert traced[1] == pytest.approx(norms, rel=1e-4), name


def test_every_key_trains_to_the_numbers_of_the_plain_stage(tmp_path: Path) -> None:
    """LoRA: under frozen weights a leaf module of DeepSpeed's crashed in its first backward pass (see build)."""
    cells = {"plain": _words("stage3", PLAIN), "blocks": _words("stage3", [], CHECKPOINTED)}
    cells |= {name: _words(name.split()[0], keys) for name, keys in TOGETHER.items()}
    cells["stage3 leaf, checkpointed"] = _words("stage3", LEAF, CHECKPOINTED)
    cells["too small"] = _words("stage3", ["stage3_module_granularity_threshold=1"])
    cells["too large"] = _words("stage3", ["stage3_module_granularity_threshold=1000000"])
    found = run_on_ranks(short_runs, cells, 2, folder=tmp_path)[0]
    small, large = found.pop("too small"), found.pop("too large")
    assert "zero.stage3_module_granularity_threshold: 1 without effect: no module has so few elements" in small
    assert "zero.stage3_module_granularity_threshold: PeftModelForCausalLM is trained as a leaf module" in large
    _equal(found, "plain")


def test_deepspeed_gathers_updated_weights_at_once() -> None:
    """``ds_rules.gathering`` says so: a version that reads the size of a bucket must be looked at again."""
    from deepspeed.runtime import utils
    from deepspeed.runtime.zero import stage_1_and_2

    begins = inspect.getsource(utils.all_gather_dp_groups).split("has_all_gather_into_tensor():\n")[1]
    assert begins.strip().startswith("return all_gather_into_tensor_dp_groups(")
    lines = inspect.getsource(stage_1_and_2.DeepSpeedZeroOptimizer).splitlines()
    uses = {line.strip() for line in lines if "self.allgather_bucket_size" in line}
    kept, handed_on = "self.allgather_bucket_size = int(allgather_bucket_size)", "=self.allgather_bucket_size)"
    assert uses == {kept, f"allgather_bucket_size{handed_on}"}, "to all_gather_dp_groups alone"


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["full", "lora", "freeze"])
def test_each_key_alone(method: str, tmp_path: Path) -> None:
    """Minutes; both networks' blocks as leaf modules, with and without checkpointing, included."""
    cells = {"plain": _words("stage3", PLAIN, f"method={method}"), "blocks": _words("stage3", [], f"method={method}")}
    for name, keys in TOGETHER.items():
        stage = name.split()[0]
        cells |= {f"{stage} {key}": _words(stage, [key], f"method={method}") for key in keys}
    cells |= {"checkpointed": _words("stage3", LEAF, f"method={method}", CHECKPOINTED)}
    _equal(run_on_ranks(short_runs, cells, 3, folder=tmp_path)[0], "plain")
    qwen2 = ["model=tiny_qwen2", f"method={method}"]
    leaf = ["leaf_modules=[Qwen2DecoderLayer]"]
    cells = {"plain": _words("stage3", PLAIN, *qwen2), "leaf": _words("stage3", leaf, *qwen2)}
    cells |= {"blocks": _words("stage3", [], *qwen2), "again": _words("stage3", [], *qwen2, CHECKPOINTED)}
    cells["checkpointed"] = _words("stage3", leaf, *qwen2, CHECKPOINTED)
    _equal(run_on_ranks(short_runs, cells, 3, folder=tmp_path)[0], "plain")
