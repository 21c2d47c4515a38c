"""entry=bench: what it measures is what was generated, and its report holds all of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glmexp.config.compose import run_config
from glmexp.config.errors import ConfigError
from glmexp.engine import kv_cache
from glmexp.entry import bench, session
from glmexp.entry.console import Screen
from glmexp.entry.measure import Cell, Pace, Run, answer_lengths, copy_rate, weights_read
from tests.cli import forked, metrics, runs
from tests.model.samples import network


def test_answers_end_with_their_end_token() -> None:
    new = torch.tensor([[5, 6, 2, 0, 0], [5, 5, 5, 5, 5], [2, 0, 0, 0, 0]])
    assert answer_lengths(new, [2]) == [3, 5, 1]


def test_time_of_a_token_leaves_out_the_first_and_the_limit() -> None:
    run = Run(first_s=0.5, whole_s=2.5, steps=5, tokens=9, cache_bytes=0)
    assert run.token_s == 0.5
    assert run.tokens_per_s == 9 / 2.5
    cell = Cell("static", 2, 8, [run, Run(0.1, 1.1, 6, 12, 0), Run(0.3, 1.5, 4, 8, 0), Run(0.2, 1.4, 4, 8, 0)])
    assert cell.spread("first_s") == (0.25, 0.1, 0.5)


def test_a_batch_whose_cache_has_no_room_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "entry=bench",
        "tracker=none",
        "bench.batch_sizes=[2,1000]",
        "bench.prompt_lengths=[40]",
        "bench.new_tokens=8",
    ]
    model = network("chatglm3", "sdpa")
    served: Any = SimpleNamespace(model=model, device=model.device, cache=kv_cache.shape_of(model, torch.float32))
    bench._check(run_config(words), served)
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: 10**6)
    with pytest.raises(ConfigError, match=r"1000 rows of 48 tokens need .* and 0\.00 GB are free") as caught:
        bench._check(run_config(words), served)
    assert caught.value.problems[0].where == "bench.batch_sizes"


def test_weights_of_a_step_are_all_but_the_embedding_unless_it_is_the_output_too() -> None:
    model = network("chatglm3", "sdpa")
    every = sum(parameter.numel() for parameter in model.parameters())
    assert weights_read(model) == 4 * (every - model.get_input_embeddings().weight.numel())
    tied = network("chatglm", "sdpa")
    assert weights_read(tied) == 4 * sum(parameter.numel() for parameter in tied.parameters())
    assert copy_rate(torch.device("cpu")) > 1e8


def test_pace_tells_what_the_sizes_to_come_will_take_from_those_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours compiles 9 s and takes 1 s, the other takes 3 s; two batch sizes, one of them with two prompt lengths."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = Pace(["ours", "plain"], [1, 1, 16], each=3, grows=False, began=0.0, at=0.0)
    took = {"ours": [10.0, 1.0, 1.0], "plain": [3.0, 3.0, 3.0]}
    order = [("ours", 0), ("plain", 0), ("ours", 1), ("plain", 1), ("ours", 2), ("plain", 2)]
    for side, number in order:
        assert pace.known() == (number == 2)
        now[0] += took[side][number]
        pace.done(side)
        if side == "plain" and number == 1:
            assert pace.words() == "17 s of about 54 s", "1 + 3 here, 12 for the other prompt, 9 + 12 for the next size"
    pace.grows = True
    assert pace.left_s() == 12 + 9 + 4 * 12, "on the CPU 16 rows are taken to last 4 times as long"


def test_a_row_is_on_the_disk_before_the_next_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = network("chatglm3", "sdpa")
    cache = kv_cache.shape_of(model, torch.float32)
    facts = {"placement": "single, decoding: plain"}
    served: Any = SimpleNamespace(model=model, device=model.device, cache=cache, decoder=None, facts=lambda: facts)
    screen = Screen(active=True)
    recorded: list[int] = []
    here: Any = SimpleNamespace(
        folder=tmp_path,
        screen=screen,
        config=SimpleNamespace(bench=run_config(["entry=bench", "tracker=none"]).bench),
        record=lambda step, metrics: recorded.append(step),
    )
    report = bench.Report(here, served, rate=1e10)
    for count, batch in enumerate((1, 16), start=1):
        report.add(Cell("transformers", batch, 8, [Run(0.1, 1.1, 6, 12, 0)]))
        kept = json.loads((tmp_path / "bench.json").read_text())
        assert not kept["finished"]
        assert [cell["batch"] for cell in kept["cells"]] == [1, 16][:count]
        assert len((tmp_path / "bench.md").read_text().splitlines()) == 6 + count
    assert recorded == [0, 1]
    assert "batch 16, prompt 8, transformers: TTFT 100.00" in capsys.readouterr().out


def test_recordings_are_given_up_before_the_process_group_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a run that fails, whose traceback holds everything."""
    done: list[str] = []
    monkeypatch.setattr(session.rendezvous, "store", lambda timeout_s: None)
    monkeypatch.setattr(session.distributed, "join", lambda timeout_s, store: None)
    monkeypatch.setattr(session.distributed, "leave", lambda: done.append("left"))
    monkeypatch.setattr(session.decoder, "forget_recordings", lambda: done.append("given up"))
    config = run_config(["entry=bench", "tracker=none", "launcher=inprocess"])
    with pytest.raises(ZeroDivisionError), session.session(config, tmp_path):
        raise ZeroDivisionError
    assert done == ["given up", "left"]


def test_plain_against_nothing_is_said() -> None:
    assert bench._named(["transformers"], True).endswith(
        "bench.plain=true holds it against nothing (decoding.way=static)"
    )
    assert bench._named(["static", "transformers"], True) == "static, transformers"
    assert bench._named(["transformers"], False) == "transformers"


def test_two_ranks_share_one_network_and_the_report_has_every_cell(tmp_path: Path) -> None:
    done = forked(
        "entry=bench", "placement=tensor_parallel", "launcher.nproc=2", "precision=fp32", "decoding.way=static",
        "bench.plain=true", "bench.prompt_lengths=[12,20]", "bench.batch_sizes=[3]", "bench.new_tokens=4",
        "bench.runs=2", "bench.warm_up=1", "tracker=none", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = runs(tmp_path)
    report = json.loads((run / "bench.json").read_text())
    assert report["ranks"] == 2
    assert report["placement"] == "tensor_parallel, sums by gloo (no GPU), decoding: static"
    assert report["finished"]
    assert "measuring 4 cells, 12 generations of 4 tokens" in done.stdout
    assert " s of about " in done.stdout
    cells = report["cells"]
    assert [(cell["batch"], cell["prompt"], cell["side"]) for cell in cells] == [
        (batch, prompt, side) for batch in (3,) for prompt in (12, 20) for side in ("static", "transformers")
    ]
    for cell in cells:
        assert cell["kv_bytes_formula"] == cell["kv_bytes_measured"], cell
        assert 0 < cell["ttft_s_min"] <= cell["ttft_s"] <= cell["ttft_s_max"]
        assert cell["batch"] <= cell["generated_tokens"] <= 4 * cell["batch"]
    # One layer's keys and values of 1 of 2 groups: 4 layers x 1 group x 32 x 4 bytes, both.
    assert cells[0]["kv_bytes_measured"] == 3 * 2 * 4 * 32 * 4 * (20 + 4)
    assert len(metrics(run)) == len(cells)
    assert "of bandwidth" in done.stdout
