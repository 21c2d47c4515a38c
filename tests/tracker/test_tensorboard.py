"""TensorBoard's files hold what was tracked, read back by TensorBoard itself."""

from __future__ import annotations

import math
from pathlib import Path

from glmexp.tracker.base import RunInfo
from glmexp.tracker.tensorboard import TensorBoard


def _read(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, list[tuple[int, str]]]]:
    """(scalars, texts) by name, each with its step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    scalars = {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}
    texts = {
        name.removesuffix("/text_summary"): [
            (event.step, event.tensor_proto.string_val[0].decode()) for event in found.Tensors(name)
        ]
        for name in found.Tags()["tensors"]
    }
    return scalars, texts


def test_scalars_tables_and_a_resume_are_read_back(tmp_path: Path) -> None:
    settings = TensorBoard(name="tensorboard", dir=None)
    info = RunInfo(name="a", folder=tmp_path, config={"optim": {"lr": 1e-3}, "data": {"name": "灯"}}, group=None)
    first = settings.build()
    first.start(info)
    first.log(1, {"train/loss": 1.5, "perf/step_s": 0.25})
    first.log(2, {"train/loss": math.nan})
    first.table("samples/generate", 2, [{"prompt": "灯|什么\n颜色", "generated": "红" * 600}])
    first.table("samples/generate", 3, [])
    assert first.finish("stopped") == [f"look at the metrics: tensorboard --logdir {tmp_path}/tensorboard"]
    assert first.finish("stopped") == []
    second = settings.build()
    second.start(info)
    second.log(3, {"train/loss": 1.25})
    second.summary({"eval/loss/loss": 0.5})
    second.finish("finished")

    scalars, texts = _read(tmp_path / "tensorboard")
    losses = scalars["train/loss"]
    assert [step for step, _ in losses] == [1, 2, 3]
    assert (losses[0][1], losses[2][1]) == (1.5, 1.25)
    assert math.isnan(losses[1][1])
    assert scalars["perf/step_s"] == [(1, 0.25)]
    ((step, table),) = texts["samples/generate"]
    assert step == 2
    head, line, row = table.split("\n")
    assert (head, line) == ("| prompt | generated |", "| --- | --- |")
    assert row.startswith("| 灯\\|什么<br>颜色 | 红红")
    assert row.endswith("红… |")
    assert "lr: 0.001" in texts["config"][0][1]
    assert "灯" in texts["config"][0][1]
    assert "| eval/loss/loss | 0.5 |" in texts["summary"][0][1]
    assert [text for _, text in texts["status"]][-1] == "finished"


def test_a_folder_of_ones_own_has_a_folder_a_run(tmp_path: Path) -> None:
    tracker = TensorBoard(name="tensorboard", dir=str(tmp_path / "all")).build()
    tracker.start(RunInfo(name="a", folder=tmp_path / "run-1", config={}, group=None))
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish("finished")
    assert _read(tmp_path / "all" / "a" / "run-1")[0] == {"train/loss": [(1, 1.0)]}
