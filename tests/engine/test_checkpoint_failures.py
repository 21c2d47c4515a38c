"""A save that ends badly leaves the earlier checkpoints as they were, and says what happened; so does a bad step."""

from __future__ import annotations

from pathlib import Path

import pytest

from glmexp.engine import checkpoint
from glmexp.engine import checkpoint_files as files
from glmexp.engine.out_of_memory import Terms, next_change
from glmexp.plan.cards import GIB
from tests.engine import cells, failing
from tests.ranks import run_on_ranks


def test_a_bad_save_leaves_the_earlier_checkpoint_and_says_why(tmp_path: Path) -> None:
    (found,) = run_on_ranks(failing.bad_saves, str(tmp_path / "run"), folder=tmp_path, ranks=1)
    assert found["without a copy"] == ("NoCopy", True)
    full = found["full disk"]
    assert full.startswith(
        f"the checkpoint of step 4 could not be written to {tmp_path}/run/checkpoints: File too large"
    )
    assert "the last whole one is step 2. Make room there" in full
    assert found["after the full disk"] == ((2, []), []), "nothing of the broken save stays"
    step, (note,) = found["truncated"]
    assert (step, "step-4 is damaged: rank-0.safetensors has 1,000 bytes, " in note) == (2, True), note
    assert "name another one: step-2" in found["truncated and named"]
    step, (note,) = found["another byte"]
    assert (step, "rank-0.safetensors holds other bytes than were written" in note) == (2, True), note
    step, (note,) = found["without its file"]
    assert (step, "rank-0.safetensors is not there" in note) == (2, True), note
    assert found["whole again"] == (4, [])
    assert found["nan"].startswith("weights or moments after optimizer step 6 are not finite (master:")
    assert found["nan before the artifact"].startswith("weights or moments after optimizer step 6 are not finite")
    assert found["steps after nan"] == [2, 4], "spoiled weights are not saved"


def test_a_checkpoint_that_was_being_taken_away_is_no_save_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / files.FOLDER / "step-2").mkdir(parents=True)
    (tmp_path / files.FOLDER / ".step-6.a9959cce").mkdir()
    monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: None)  # killed before it
    files.remove(tmp_path, 2)
    monkeypatch.undo()
    assert files.unfinished(tmp_path) == [tmp_path / files.FOLDER / ".step-6.a9959cce"]
    checkpoint.forget_after(tmp_path, 0)
    assert not list((tmp_path / files.FOLDER).iterdir()), "both are taken away"


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    (found,) = run_on_ranks(failing.keeps_the_best, str(tmp_path / "run"), folder=tmp_path, ranks=1)
    assert found == [
        ([2], 2),
        ([2, 4], 4),  # 2 was the best while 4 was written
        ([4, 6], 4),
        ([4, 8], 4),
        ([4, 10], 4),
        ([4], 4),
        ("step-4\n", None),
    ]


def test_a_trained_tensor_that_nothing_reaches_is_named_at_every_stage(tmp_path: Path) -> None:
    for said in run_on_ranks(failing.unreached, [0, 2, 3], folder=tmp_path):
        assert set(said) == {0, 2, 3}
        for text in said.values():
            assert "1 of 9 trained tensors got no gradient in the first step: base_model.model.idle" in text


def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    """Planned, by time, and by a signal that the ranks see at different steps."""
    for found in run_on_ranks(failing.stops, folder=tmp_path):
        assert found == [
            (2, "train.stop_after=2"),
            (1, "train.stop_after_s=1e-09"),
            (4, "asked by a signal"),
            (5, None),
        ]


def test_out_of_memory_says_where_it_went_and_what_to_change(tmp_path: Path) -> None:
    (text,) = run_on_ranks(failing.out_of_memory, folder=tmp_path, ranks=1)
    lines = text.splitlines()
    assert lines[0] == "rank 0 ran out of device memory in forward"
    assert lines[1].startswith("  a rank holds, largest first: weights ")
    assert lines[2].startswith("  next: train.micro_batch_size=2 train.grad_accum=2")
    assert lines[3] == "  torch: CUDA out of memory. Tried to allocate 3.00 GiB."


def test_the_next_change_is_the_cheapest_that_helps() -> None:
    roomy, crowded = Terms(GIB, GIB, GIB, 80 * GIB, 80 * GIB), Terms(30 * GIB, 20 * GIB, 28 * GIB, 80 * GIB, 80 * GIB)
    full = ["method=full", "data.max_length=512", "zero=stage0"]

    def said(where: Terms, *words: str, ranks: int = 2) -> str:
        sizes = [] if any("micro_batch" in word for word in words) else ["train.micro_batch_size=4"]
        config = cells.configure(
            *full[: -1 if any("zero" in word for word in words) else 3], *sizes, *words, ranks=ranks
        )
        return next_change(config, where, ranks)

    one = "train.micro_batch_size=1"
    assert said(roomy) == "train.micro_batch_size=2 train.grad_accum=2"
    assert said(roomy, one) == "train.gradient_checkpointing=true"
    assert said(roomy, one, "train.gradient_checkpointing=true") == "data.max_length=256"
    assert said(crowded) == "zero=stage2", "what stands fixed fills the device: smaller batches cannot help"
    assert said(crowded, "zero=stage2") == "zero=stage3"
    assert said(crowded, "zero=stage3") == "offload=optimizer"
    assert said(crowded, "zero=stage3", "offload=all") == "method=lora"
    assert said(crowded, ranks=1) == "zero=stage2 offload=optimizer offload.adam=gpu"
    passing = ("zero=stage2", "offload=optimizer", "offload.adam=gpu")
    assert said(crowded, *passing, ranks=1) == "offload.adam=null", "gradients leave the GPU as well"
    assert said(crowded, *passing[:2], ranks=1) == "zero=stage3 offload=all"
    prefix = cells.configure("model=tiny_qwen2", "method=ptuning", "data.max_length=512", one, ranks=1)
    assert next_change(prefix, roomy, 1) == "data.max_length=256", "its prefix is a cache, which checkpointing drops"


@pytest.mark.parametrize("name", ["weights", "gradients", "optimizer"])
def test_terms_are_those_of_the_plan_for_the_live_model(name: str) -> None:
    """A trained tensor of 8 and a frozen one of 4, bf16, by stage on two ranks; at stage 3 both stay whole beside."""
    import torch

    from glmexp.engine.out_of_memory import terms

    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.zeros(8))
    model.b = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
    expected = {"weights": [24, 24, 24, 12 + 24], "gradients": [16, 16, 16, 8], "optimizer": [96, 48, 48, 48]}
    found = [getattr(terms(cells.configure(f"zero=stage{s}", "precision=bf16"), model, 2), name) for s in range(4)]
    assert found == expected[name]


def test_fp16_counts_what_it_skips_keeps_its_scale_and_stops_at_the_least(tmp_path: Path) -> None:
    """From 2^32 halved at each step down to 2^29, at which gradients still overflow."""
    (found,) = run_on_ranks(failing.overflows, str(tmp_path), folder=tmp_path, ranks=1)
    for stage, one in found.items():
        assert len(one["said"]) == 2, stage
        assert (
            "step 2: gradients overflow fp16 at a loss scale of 2.14748e+09, the step is skipped (2 so far)"
            in (one["said"][1])
        )
        assert one["kept"]["skipped_steps"] == 2
        assert one["kept"]["schedule_steps"] == 0, "the schedule waits for a step that is taken"
        assert one["kept"]["loss_scale"]["cur_scale"] == 2.0**30
        assert one["back"] == one["kept"]
        assert (
            "gradients of optimizer step 4 overflow fp16 at a loss scale of 5.36871e+08, which gets no sm" in one["end"]
        )
        assert "precision=bf16" in one["end"]
