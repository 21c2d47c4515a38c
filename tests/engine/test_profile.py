"""The time line adds up, finds who waits for whom, and reads NCCL's share out of a trace."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from statistics import median

import pytest
import torch

from glmexp.data.batches import StepPlan, pick
from glmexp.data.collate import collate
from glmexp.engine import distributed, profile
from glmexp.engine.loop import Loop
from tests.engine import cells
from tests.ranks import run_on_ranks

SLEEP_S = 0.15


def _one_rank_has_slow_data(folder: str) -> list[dict[str, float]]:
    """Six steps at stage 2 and six at stage 3; rank 1's loader sleeps. This rank's rows."""
    found: list[dict[str, float]] = []
    for stage in (2, 3):
        config = cells.configure("model=tiny", f"zero=stage{stage}", ranks=distributed.world_size())
        engine = cells._engine(config, 6)
        examples, pad_id = cells.rows(config)
        plan = StepPlan(len(examples), 2, 2, distributed.world_size(), distributed.rank(), 1, True)

        def steps(plan=plan, examples=examples, pad_id=pad_id):
            for step in range(6):
                time.sleep(SLEEP_S * distributed.rank())
                yield step + 1, [collate(pick(examples, places), pad_id) for places in plan.micro_batches(step)]

        run_folder = Path(folder) / str(stage)
        run_folder.mkdir(exist_ok=True)
        watch = profile.TimeLine(run_folder if distributed.rank() == 0 else None, lambda _, row: found.append(row))

        def after(_: int, reason: str | None, watch=watch) -> str | None:
            with watch.phase("save"):
                time.sleep(0.01)
            return reason

        before = torch.distributed.all_reduce
        Loop(engine, steps(), 1, lambda *_: None, after, watch=watch).run()
        lines = watch.close()
        assert torch.distributed.all_reduce is not before, "the clocks are off again"
        assert bool(lines) == (distributed.rank() == 0)
        engine.destroy()
    return found


def test_the_split_adds_up_and_waiting_for_a_slow_rank_is_communication(tmp_path: Path) -> None:
    """Within 5 %. The slow rank has its sleep as data wait; the other one has it as communication."""
    quick, slow = run_on_ranks(_one_rank_has_slow_data, str(tmp_path), folder=tmp_path)
    for rows in (quick, slow):
        assert len(rows) == 12
        for row in rows:
            parts = [row[f"{name}_s"] for name in profile.PHASES if name != profile.OTHER]
            assert min(parts) >= 0
            assert row["save_s"] >= 0.01
            assert row["eval_s"] == 0
            assert sum(parts) + row["other_s"] == pytest.approx(row["step_s"], abs=1e-9)
        # Not each step: on a machine with other work a rank may be set aside between two phases.
        assert median(row["other_s"] / row["step_s"] for row in rows) < 0.05
        assert sum(row["other_s"] for row in rows) < 0.05 * sum(row["step_s"] for row in rows)
    # The median: after writing its trace the quick rank is late once.
    assert median(row["data_s"] for row in quick) < 0.3 * SLEEP_S < median(row["communication_s"] for row in quick)
    # A step's time holds the wait for the next one's batches; the first one's comes before it, and the last has none.
    assert [round(row["data_s"] / SLEEP_S) for row in slow] == [2, 1, 1, 1, 1, 0] * 2
    summary = json.loads((tmp_path / "2" / "profile" / "summary.json").read_text())
    assert (summary["steps"], summary["largest"], summary["traced"]) == (6, "communication", True)
    with gzip.open(tmp_path / "3" / "profile" / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert names.count("glmexp/optimizer") == profile.TRACED
    assert names.count("glmexp/forward") == 2 * profile.TRACED
    assert any("allgather" in str(name) or "all_gather" in str(name) for name in (e.get("name") for e in events))


def test_only_what_nccl_does_alone_is_communication() -> None:
    """Kernels that run beside others cost nothing; a phase's share is of its own time."""

    def event(cat: str, name: str, begin: float, end: float) -> dict[str, object]:
        return {"cat": cat, "name": name, "ts": begin, "dur": end - begin, "ph": "X"}

    events = [
        event("user_annotation", "glmexp/forward", 0, 100),
        event("user_annotation", "glmexp/backward", 100, 300),
        event("user_annotation", "other", 0, 300),
        event("kernel", "gemm", 0, 80),
        event("kernel", "ncclDevKernel_AllGather", 60, 90),  # 10 alone
        event("kernel", "gemm", 120, 200),
        event("kernel", "ncclDevKernel_ReduceScatter", 150, 250),  # 50 alone
        event("kernel", "ncclDevKernel_AllReduce", 240, 260),  # 10 more
        {"ph": "M", "name": "process_name"},
    ]
    assert profile.exposed(events) == pytest.approx({"forward": 0.10, "backward": 0.30})


def test_every_phase_says_what_helps() -> None:
    assert set(profile.HELPS) == set(profile.PHASES)
