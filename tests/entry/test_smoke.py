"""entry=smoke passes a sound configuration and names each planted fault by its gate, and no other gate."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from glmexp.entry import smoke, smoke_gates
from glmexp.entry.smoke_gates import Continued, Gate
from tests.cli import forked, runs, status
from tests.config.helpers import config, refusal

MIB = 2**20


def _steps(count: int = 20, **changes: Any) -> dict[int, dict[str, float]]:
    """Lines of a sound run; ``changes``: key (with / as _) to a function of the step."""
    found = {}
    for step in range(1, count + 1):
        line = {
            "train/loss": 3.0 / step,
            "perf/step_s": 0.1,
            "perf/data_s": 0.01,
            "perf/tokens_per_s": 1000.0,
            "mem/process_bytes": 500.0 * MIB,
        }
        line |= {name.replace("_", "/", 1): change(step) for name, change in changes.items()}
        found[step] = line
    return found


def _failed(gates: list[Gate]) -> list[str]:
    return [gate.name for gate in gates if gate.passed is False]


def test_a_sound_run_passes_every_gate() -> None:
    gates = smoke_gates.of_training(_steps(), None)
    assert [gate.name for gate in gates] == [
        "loss is finite", "loss falls", "memory of the process is flat", "data is there in time", "step time is steady",
    ]  # fmt: skip
    assert _failed(gates) == []
    both = smoke_gates.of_training(_steps(mem_device_bytes=lambda step: 1e9), None)
    assert "memory of the GPU is flat" in [gate.name for gate in both]


@pytest.mark.parametrize(
    ("changes", "gate"),
    [
        ({"train_loss": lambda step: 1.0}, "loss falls"),
        ({"train_loss": lambda step: 1.0 + step / 100}, "loss falls"),
        ({"mem_process_bytes": lambda step: (500 + 5 * step) * MIB}, "memory of the process is flat"),
        ({"mem_device_bytes": lambda step: (90_000 + 200 * step) * MIB}, "memory of the GPU is flat"),
        ({"perf_data_s": lambda step: 0.05}, "data is there in time"),
        (
            {"perf_step_s": lambda step: 0.05 * step, "perf_tokens_per_s": lambda step: 1e4 / step},
            "step time is steady",
        ),
    ],
)
def test_each_gate_fails_by_itself(changes: dict[str, Any], gate: str) -> None:
    assert _failed(smoke_gates.of_training(_steps(**changes), None)) == [gate]


def test_a_leak_on_another_rank_is_found_beside_a_larger_one_that_is_flat() -> None:
    ranks = {step: {"process_bytes": [9000.0 * MIB, (500.0 + 5 * step) * MIB, 400.0 * MIB]} for step in range(1, 21)}
    gates = smoke_gates.of_training(_steps(), None, ranks)
    assert _failed(gates) == ["memory of the process is flat"]
    assert gates[2].measured == "40.0 MiB more over the last 10 steps, 592.5 MiB in all (rank 1)"
    flat = {step: {"process_bytes": [9000.0 * MIB, 500.0 * MIB]} for step in range(1, 21)}
    assert _failed(smoke_gates.of_training(_steps(mem_process_bytes=lambda step: 9e9 * step), None, flat)) == []


def test_growth_at_the_allowed_edge_passes() -> None:
    """32 MiB for a small process, 1 % for a large one; what comes with the last checkpoint is no leak."""
    small = _steps(mem_process_bytes=lambda step: (500 + 3 * step) * MIB)
    large = _steps(mem_process_bytes=lambda step: (50_000 + 40 * step) * MIB)
    saved = _steps(mem_process_bytes=lambda step: (500 + 500 * (step == 20)) * MIB)
    for steps in (small, large, saved):
        assert _failed(smoke_gates.of_training(steps, None)) == []


def test_a_loss_that_is_no_number_ends_the_questions() -> None:
    (gate,) = smoke_gates.of_training(_steps(2), "loss of optimizer step 3 is nan")
    assert (gate.passed, gate.measured) == (False, "loss of optimizer step 3 is nan")
    later = smoke_gates.of_training(_steps(10, train_loss=lambda step: 1 / step if step < 10 else math.nan), "nan")
    assert _failed(later) == ["loss is finite"]
    assert smoke_gates.continues({}, None, exact=True).passed is None
    assert smoke_gates.proves(None).passed is None


def test_a_checkpoint_continues_to_the_bit_on_a_cpu_and_nearly_on_a_gpu() -> None:
    steps = _steps()
    same = Continued(step=20, loss=0.15, elements=100, differing=0, difference=0.0)
    near = Continued(step=20, loss=0.15 * (1 + 1e-6), elements=100, differing=60, difference=1e-4)
    without_moments = Continued(step=20, loss=0.15, elements=100, differing=99, difference=0.7)
    assert [smoke_gates.continues(steps, one, True).passed for one in (same, near, without_moments)] == [
        True, False, False,
    ]  # fmt: skip
    assert [smoke_gates.continues(steps, one, False).passed for one in (same, near, without_moments)] == [
        True, True, False,
    ]  # fmt: skip
    broken = smoke_gates.continues(steps, "rank-0.safetensors is damaged", True)
    assert (broken.passed, broken.measured) == (False, "rank-0.safetensors is damaged")


def test_what_a_short_run_cannot_do_is_refused(tmp_path: Path) -> None:
    assert refusal("entry=smoke", "train.max_steps=7") == (
        "config error:\n"
        "  train.max_steps: 7 steps are too few for entry=smoke (from the command line)\n"
        "    -> at least 8"
    )
    assert "train.resume: without effect under entry=smoke" in refusal("entry=smoke", f"train.resume={tmp_path}")
    assert "smoke.steps: without effect under entry=train" in refusal("smoke.steps=9")
    assert "entry=smoke starts from the base model" in refusal("entry=smoke", f"artifact.path={tmp_path}")


def test_the_cap_shortens_the_run_and_leaves_the_rest() -> None:
    given = config("entry=smoke", "train.max_steps=50", "optim.warmup_steps=20", "smoke.steps=30", "tracker=wandb")
    short = smoke.cap(given)
    assert (short.train.max_steps, short.train.save_steps, short.optim.warmup_steps) == (30, 29, 3)
    assert short.tracker.name == "none"
    assert all(getattr(hook, "every", None) is None for hook in short.eval.hooks.values())
    assert (short.model, short.method, short.zero, short.data) == (given.model, given.method, given.zero, given.data)
    assert smoke.cap(config("entry=smoke", "train.max_steps=9")).train.max_steps == 9


WORDS = ("entry=smoke", "smoke.steps=12", "precision=fp32", "eval=[loss]")


def _gates(run: Path) -> dict[str, Any]:
    result = json.loads((run / "smoke.json").read_text())
    return result | {"failed": [gate["name"] for gate in result["gates"] if gate["passed"] is False]}


def test_a_sound_configuration_passes_on_two_ranks(tmp_path: Path) -> None:
    """All gates in one table, the last step again to the bit; the time line beside it; nothing is tracked."""
    done = forked(*WORDS, "smoke.steps=20", "launcher.nproc=2", "zero=stage3", "train.profile=true", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = runs(tmp_path)
    result = _gates(run)
    assert (result["passed"], result["steps"], result["failed"]) == (True, 20, [])
    assert result["seconds"] < 120
    assert len(result["gates"]) == 7
    assert all(gate["passed"] for gate in result["gates"])
    assert "; 0 of 36,864 masters and moments differ, by 0" in result["gates"][-2]["measured"]
    assert "smoke: all 7 gates passed" in done.stdout
    assert "time line of 20 steps" in done.stdout
    assert status(run)["state"] == "finished"
    assert not (run / "wandb").exists()
    assert done.stderr == ""


FAULTS = '''
"""A method whose rank leaks memory, waits for its data, saves checkpoints without Adam's moments and an adapter
without effect."""
import time
from dataclasses import dataclass, replace
from glmexp.config.registry import register
from glmexp.method.lora import Lora

KEPT = []

@register("method", "faulty")
@dataclass
class Faulty(Lora):
    def apply(self, model, family):
        import torch
        from glmexp.data.loader import Batches
        from glmexp.engine import states

        step, read = Batches.step, states.read

        def slow(self, plan, number):
            time.sleep(0.25)
            return step(self, plan, number)

        def without_moments(engine, sink):
            read(engine, lambda piece: sink(replace(piece, tensors={"master": piece.tensors["master"]}, step=0.0)))

        if not KEPT:
            Batches.step, states.read = slow, without_moments
        wrapped = super().apply(model, family)
        wrapped.register_forward_hook(lambda *_: KEPT.append(torch.ones(2**22)))  # 16 MiB
        return wrapped

    def write(self, folder, model, tensors):
        held = super().write(folder, model, {n: t * 0 if "lora_B" in n else t for n, t in tensors.items()})
        return {name: tensors[name] for name in held}
'''


def test_planted_faults_fail_their_gates_and_no_other(tmp_path: Path) -> None:
    """A leak of memory per step, a loader that sleeps, a checkpoint that lacks the optimizer, an adapter that is not
    saved: one run has them all."""
    (tmp_path / "faulty_plugin.py").write_text(FAULTS)
    (tmp_path / "options" / "method").mkdir(parents=True)
    lora = Path(__file__).parents[2] / "conf" / "method" / "lora.yaml"
    (tmp_path / "options/method/faulty.yaml").write_text(lora.read_text().replace("name: lora", "name: faulty"))
    done = forked(
        *WORDS, "--config-dir", "options", "method=faulty", "launcher=inprocess", "data.num_workers=0",
        folder=tmp_path,
        GLMEXP_PLUGINS="faulty_plugin", PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    (run,) = runs(tmp_path)
    assert _gates(run)["failed"] == [
        "memory of the process is flat",
        "data is there in time",
        "checkpoint loads and continues",
        "artifact proves itself",
    ]
    assert done.stdout.count("FAILED") == 4
    assert done.stderr.startswith("smoke: 4 of 7 gates failed: memory of the process is flat, data is there in time")
    assert "Traceback" not in done.stderr
    assert status(run)["state"] == "failed"


def test_a_learning_rate_of_1e30_fails_the_gate_of_the_loss(tmp_path: Path) -> None:
    words = ("method=full", "optim.lr=1e30", "optim.max_grad_norm=null", "launcher=inprocess")
    done = forked(*WORDS, *words, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    (run,) = runs(tmp_path)
    result = _gates(run)
    assert result["failed"] == ["loss is finite"]
    assert "the last finite loss was" in result["gates"][0]["measured"]
    assert [gate["passed"] for gate in result["gates"][-2:]] == [None, None]
