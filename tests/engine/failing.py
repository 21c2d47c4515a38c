"""What goes wrong with checkpoints and in steps, on the product's own path; results as plain values for the tests."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch

from glmexp.config.errors import ArtifactError
from glmexp.engine import checkpoint, checkpoint_files
from glmexp.engine.gradients import NoGradientError
from glmexp.engine.out_of_memory import OutOfMemory, explained
from glmexp.engine.stop import StopPoint
from tests.engine import cells, keeping

SIZES = ["train.micro_batch_size=2", "train.grad_accum=2", "data.max_length=48"]


def bad_saves(folder: str) -> dict[str, Any]:
    """One engine, several saves that end badly, and what is found afterwards."""
    run = Path(folder)
    config = cells.configure("zero=stage2", *SIZES, ranks=1)
    engine = cells._engine(config, 4)
    keeping._steps(engine, config, 0, 1)
    saver = keeping.saver(engine, run)
    found: dict[str, Any] = {}

    def save(step: int) -> None:
        saver.save(step, keeping.ABOUT)
        saver.wait()

    checkpoint.ROOM = 1e-12  # a host without room for a copy: the same bytes, straight from where they lie
    save(2)
    checkpoint.ROOM = 0.8
    straight, saver._host = saver._host, None
    kept = (run / "checkpoints" / "step-2" / "rank-0.safetensors").read_bytes()
    save(2)
    found["without a copy"] = (
        type(straight).__name__, kept == (run / "checkpoints" / "step-2" / "rank-0.safetensors").read_bytes()
    )  # fmt: skip
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        save(4)
    except checkpoint.CheckpointError as error:
        found["full disk"] = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found["after the full disk"] = (_newest(run), [path.name for path in (run / "checkpoints").glob(".*")])

    save(4)
    file = run / "checkpoints" / "step-4" / "rank-0.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    found["truncated"] = _newest(run)
    try:
        checkpoint.find(run, "step-4")
    except ArtifactError as error:
        found["truncated and named"] = str(error)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    found["another byte"] = _newest(run)
    file.unlink()
    found["without its file"] = _newest(run)
    file.write_bytes(whole)
    found["whole again"] = _newest(run)

    master = engine.optimizer.single_partition_of_fp32_groups[0]
    kept = master.data[3].clone()
    master.data[3] = float("nan")
    try:
        save(6)
    except checkpoint.NonFiniteState as error:
        found["nan"] = str(error)
    try:
        checkpoint.check_finite(engine, 6)
    except checkpoint.NonFiniteState as error:
        found["nan before the artifact"] = str(error)
    master.data[3] = kept
    checkpoint.check_finite(engine, 6)
    found["steps after nan"] = checkpoint_files.steps(run)
    engine.destroy()
    return found


def keeps_the_best(folder: str) -> list[tuple[list[int], Any]]:
    """(checkpoints, best) after each of several saves with their held-out losses."""
    run = Path(folder)
    config = cells.configure("zero=stage2", *SIZES, ranks=1)
    engine = cells._engine(config, 4)
    keeping._steps(engine, config, 0, 1)
    saver = keeping.saver(engine, run, keep=1)
    found = []
    for step, loss in ((2, 3.0), (4, 1.0), (6, 2.0), (8, float("nan")), (10, 1.5)):
        saver.save(step, keeping.ABOUT)
        saver.judge(step, "eval/loss/loss", loss)
        saver.wait()
        best = checkpoint_files.read_best(run)
        found.append((checkpoint_files.steps(run), best and best["step"]))
    checkpoint.forget_after(run, 4)
    found.append((checkpoint_files.steps(run), checkpoint_files.read_best(run)["step"]))
    found.append(((run / "checkpoints" / "latest").read_text(), None))
    engine.destroy()
    return found


def _newest(run: Path) -> tuple[int, list[str]]:
    found = checkpoint.find(run, None)
    assert found is not None
    return found.step, [note.replace(str(run), "RUN") for note in found.notes]


def unreached(stages: list[int]) -> dict[int, str]:
    """By stage, what is said where a trained parameter is not part of the network's computation."""
    said = {}
    for stage in stages:
        config = cells.configure(f"zero=stage{stage}", *SIZES)
        apply = type(config.method).apply

        def with_an_idle_one(self: Any, network: Any, family: Any, apply: Any = apply) -> Any:
            model = apply(self, network, family)
            model.get_base_model().idle = torch.nn.Parameter(torch.zeros(8))
            return model

        type(config.method).apply = with_an_idle_one
        try:
            engine = cells._engine(config, 3)
        finally:
            type(config.method).apply = apply
        try:
            keeping._steps(engine, config, 0, 1)
        except NoGradientError as error:
            said[stage] = str(error)
        engine.destroy()
    return said


def out_of_memory() -> str:
    """What is said when a forward pass gets no memory."""
    config = cells.configure("zero=stage2", "train.micro_batch_size=4", "train.grad_accum=1", ranks=1)
    engine = cells._engine(config, 3)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    handle = engine.module.register_forward_pre_hook(full)
    try:
        keeping._steps(engine, config, 0, 1, guard=lambda phase: explained(phase, config, lambda: engine.module))
    except OutOfMemory as error:
        return str(error)
    finally:
        handle.remove()
        engine.destroy()
    return ""


def stops() -> list[tuple[int, str | None]]:
    """(steps taken, reason) with a planned stop, with none, and with a signal that one of two ranks has not seen."""
    from glmexp.engine import distributed

    config = cells.configure("zero=stage2", *SIZES)
    engine = cells._engine(config, 9)
    asked = [0]

    def late() -> bool:  # rank 1 knows two steps later than rank 0
        asked[0] += 1
        return asked[0] > 1 + 2 * distributed.rank()

    found = []
    for stop in (StopPoint(after_step=2), StopPoint(after_s=1e-9), StopPoint(signalled=late), StopPoint()):
        taken: list[int] = []
        reason = keeping._loop(engine, config, 0, 5, stop, taken)
        found.append((len(taken), reason))
    engine.destroy()
    return found


def overflows(folder: str) -> dict[int, dict[str, Any]]:
    """By stage, fp16 with a loss scale that is far too large: what is said, what a checkpoint keeps, where it ends."""
    from deepspeed.accelerator import get_accelerator

    from glmexp.engine import states
    from glmexp.engine.loop import NonFiniteError

    type(get_accelerator()).is_fp16_supported = lambda self: True
    found: dict[int, dict[str, Any]] = {}
    for stage in (0, 2):
        one = found[stage] = {"said": []}
        words = ["precision=fp16", "precision.initial_scale_power=32", "precision.hysteresis=1", f"zero=stage{stage}"]
        sizes = ["train.micro_batch_size=1", "train.grad_accum=1", "data.max_length=48"]
        config = cells.configure(*words, *sizes, "precision.min_loss_scale=536870912", ranks=1, gpus=1)
        engine = cells._engine(config, 9)
        keeping._steps(engine, config, 0, 2, notice=one["said"].append)
        saver = keeping.saver(engine, Path(folder, str(stage)))
        saver.save(2, keeping.ABOUT)
        saver.close()
        one["kept"] = states.counters(engine)
        try:
            keeping._steps(engine, config, 2, 5)
        except NonFiniteError as error:
            one["end"] = str(error)
        engine.destroy()
        engine = cells._engine(config, 9)
        state = checkpoint.find(Path(folder, str(stage)), None)
        assert state is not None
        checkpoint.load(engine, state, 1, 1)
        one["back"] = states.counters(engine)
        engine.destroy()
    return found
