"""The composed run, end to end, as the README has it."""

from __future__ import annotations

import csv
import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli import SHORT, forked, glmexp, metrics, runs, status
from tests.engine.whole_runs import whole_runs
from tests.ranks import run_on_ranks

LAMPS = [
    {"prompt": f"第{n}号灯是什么颜色？", "response": f"第{n}号灯是{c}色。"} for n, c in enumerate("红橙黄绿青蓝紫白")
]


def _write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_the_default_run_teaches_the_demo(tmp_path: Path) -> None:
    """Base below 10 % exact match on held-out prompts, tuned at least 90 %; one wandb run; the proof passed; in a
    process of its own the artifact answers as the live model did at the end."""
    done = glmexp(folder=tmp_path, timeout_s=280)
    assert done.returncode == 0, done.stderr
    (run,) = runs(tmp_path)
    matches = [line["eval/generate/exact_match"] for line in metrics(run) if "eval/generate/exact_match" in line]
    assert all("mem/planned_bytes" in line for line in metrics(run) if "mem/peak_bytes" in line)
    assert "plan: peak" in done.stdout
    assert matches[0] < 0.10
    assert matches[-1] >= 0.90
    assert json.loads((run / "proof.json").read_text())["passed"] is True
    assert status(run)["state"] == "finished"
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1
    for word in ("of them trained", "ranks", "batch", "steps", "base against tuned", "wandb leet run", "next:"):
        assert word in done.stdout, word
    assert done.stderr == "", "no library warns on the terminal"
    words = ("entry=generate", f"artifact.path={run}", "generate.prompts_file=builtin:demo/eval.jsonl")
    sizes = ("generate.batch_size=16", "generate.max_new_tokens=64")  # as the eval hook has them: bf16 rounds alike
    again = forked(*words, *sizes, f"generate.output={tmp_path}/answers.jsonl", folder=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    live = max((run / "samples").glob("step-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    found, expected = (
        [json.loads(line)[key] for line in path.read_text(encoding="utf-8").splitlines()]
        for path, key in ((tmp_path / "answers.jsonl", "answer"), (live, "generated"))
    )
    assert found == expected


def test_one_seed_gives_bit_equal_losses(tmp_path: Path) -> None:
    losses = []
    for name, start in (("one", glmexp), ("two", forked)):  # forks would share the order of sets
        words = ("train.max_steps=6", "eval=none", "tracker=none", f"run.dir={tmp_path}/{name}")
        assert start(*words, folder=tmp_path).returncode == 0
        losses.append([line["train/loss"] for line in metrics(tmp_path / name)])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose numbers are compared with one another, in one process: accumulation, hooks, checkpointing."""
    folder = tmp_path_factory.mktemp("side")
    answers = [{"prompt": f"题{2**n}", "response": "答" * 2**n} for n in range(6)]
    six = ("method=full", "data.shuffle=false", "train.max_steps=1", "optim.lr=1e-3", "eval=none", "precision=fp32")
    rows = f"data.train_file={_write(folder / 'six.jsonl', answers)}"
    cells = {
        f"accumulation-{micro}": [*six, rows, f"train.micro_batch_size={micro}", f"train.grad_accum={6 // micro}"]
        for micro in (6, 3, 2, 1)
    }
    curve = ["train.max_steps=4", "method.dropout=0.1"]
    often = ["eval.loss.every=1", "eval.generate.every=2", "eval.generate.max_prompts=3"]
    cells["hooks-without"] = [*curve, "eval=none"]
    cells["hooks-with"] = [*curve, "eval=[loss,generate]", *often]
    short = ["train.max_steps=2", "eval=none", "precision=fp32"]
    cells |= {f"checkpointing-{on}": [*short, f"train.gradient_checkpointing={on}"] for on in ("true", "false")}
    (faults,) = run_on_ranks(whole_runs, cells, str(folder), ("tracker=none",), folder=folder, ranks=1)
    assert faults == {cell: [] for cell in cells}
    return folder


def test_hooks_do_not_change_the_training_curve(side_by_side: Path) -> None:
    """Dropout draws random numbers; an evaluation between two steps must not change which."""
    without, with_hooks = (
        [line["train/loss"] for line in metrics(side_by_side / f"hooks-{name}") if "train/loss" in line]
        for name in ("without", "with")
    )
    assert without == with_hooks
    assert len(without) == 4


def test_accumulation_is_the_same_step(side_by_side: Path) -> None:
    """Six rows of very different lengths: loss 1e-5, gradient norm 1e-4 relative, weights 1e-5 against 6 x 1."""
    folders = [side_by_side / f"accumulation-{micro}" for micro in (6, 3, 2, 1)]
    found = [(metrics(run)[0], load_file(run / "artifact" / "model.safetensors")) for run in folders]
    (one, weights), *others = found
    for other, other_weights in others:
        assert other["train/loss"] == pytest.approx(one["train/loss"], abs=1e-5)
        assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-4)
        # Adam's first step is the gradient's sign times the rate: an entry that is all rounding may turn.
        turned = sum(int(((weights[n] - other_weights[n]).abs() > 1e-5).sum()) for n in weights)
        assert turned <= 1e-4 * sum(tensor.numel() for tensor in weights.values())


def test_checkpointing_trains_the_same_adapter(side_by_side: Path) -> None:
    curves = {}
    for checkpointing in ("true", "false"):
        run = side_by_side / f"checkpointing-{checkpointing}"
        curves[checkpointing] = [line["train/loss"] for line in metrics(run)]
        adapter = load_file(run / "artifact" / "adapter_model.safetensors")
        assert all(float(tensor.norm()) > 0 for name, tensor in adapter.items() if "lora_B" in name)
    assert curves["true"] == pytest.approx(curves["false"], abs=1e-5)


def test_an_artifact_acts_in_another_process_and_a_renamed_one_is_refused(tmp_path: Path) -> None:
    rows = _write(tmp_path / "one.jsonl", LAMPS[:1])
    words = (*SHORT, "train.max_steps=60", "optim.lr=5e-3", "train.micro_batch_size=1", "eval=[loss]")
    trained = forked(
        *words, f"data.train_file={rows}", f"data.eval_file={rows}", f"run.dir={tmp_path}/a", folder=tmp_path
    )
    assert trained.returncode == 0, trained.stderr
    before, *_, after = [line["eval/loss/loss"] for line in metrics(tmp_path / "a") if "eval/loss/loss" in line]
    evaluate = ("entry=evaluate", "tracker=none", "eval=[loss]", f"data.eval_file={rows}")
    again = forked(*evaluate, "artifact.path=a/artifact", f"run.dir={tmp_path}/e", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    (line,), last = metrics(tmp_path / "e"), metrics(tmp_path / "a")[-1]["step"]
    found = line["eval/loss/loss"]
    assert line["step"] == last > 0, "the step that it was trained for"
    assert f"eval at step {last}: loss" in again.stdout
    assert found == pytest.approx(after, abs=1e-4)
    assert found < before / 2

    shutil.copytree(tmp_path / "a", tmp_path / "b")
    file = tmp_path / "b" / "artifact" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n.replace("base_model.model.", "base_model.model.module."): t for n, t in tensors.items()}, file)
    refused = forked(*evaluate, "artifact.path=b/artifact", folder=tmp_path)
    assert refused.returncode == 2
    assert f"{len(tensors)} of its {len(tensors)} keys fit nothing in the model" in refused.stderr
    assert f"{len(tensors)} of the model's {len(tensors)} would stay at their start values" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_planned_stop_goes_on_in_the_folder_and_under_the_tracker_s_id(tmp_path: Path) -> None:
    """zero3-03, tracking-02: 8 rows, two epochs, stopped after step 6 in the first; resumed from another folder."""
    data = f"data.train_file={_write(tmp_path / 'lamps.jsonl', LAMPS)}"
    sizes = ("train.micro_batch_size=1", "train.grad_accum=1", "train.epochs=2", "train.save_steps=4")
    common = ("eval=none", "precision=fp32", data, *sizes)
    first = forked(*common, "train.stop_after=6", f"run.dir={tmp_path}/a", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    assert status(tmp_path / "a")["state"] == "stopped"
    assert "stopped after step 6 (train.stop_after=6)" in first.stdout
    assert not (tmp_path / "a" / "artifact").exists()
    tracker_id = json.loads((tmp_path / "a" / "tracker.json").read_text())["id"]
    (tmp_path / "elsewhere").mkdir()
    second = forked(f"train.resume={tmp_path}/a", folder=tmp_path / "elsewhere")
    assert second.returncode == 0, second.stderr
    assert "going on from step-6" in second.stdout
    assert [line["step"] for line in metrics(tmp_path / "a")] == list(range(1, 17))
    assert json.loads((tmp_path / "a" / "tracker.json").read_text())["id"] == tracker_id
    straight = forked(*common, "tracker=none", f"run.dir={tmp_path}/b", folder=tmp_path)
    assert straight.returncode == 0, straight.stderr
    for name in ("train/loss", "train/lr", "train/epoch"):
        resumed, whole = ([line[name] for line in metrics(tmp_path / run)] for run in ("a", "b"))
        assert resumed == whole, name
    saves = [line["step"] for line in metrics(tmp_path / "b") if "perf/save_copy_s" in line]
    assert saves == [5, 9, 13], "the step after a save says what it cost"


def test_a_sweep_runs_every_trial_on_its_slot_and_says_which_blew_up(tmp_path: Path) -> None:
    """Two of four are not finite, which is a result: the others finish, two at a time, and the exit code says so."""
    words = ("-m", *SHORT, "method.rank=2,4", "optim.lr=1e30,1e-3", "optim.max_grad_norm=null", "train.max_steps=4")
    done = forked(*words, "launcher.slots=2", folder=tmp_path, timeout_s=240)
    assert done.returncode == 3, done.stderr
    states = {run.name: status(run)["state"] for run in runs(tmp_path)}
    assert len(states) == 4
    assert all((state == "failed") == ("1e30" in name or "1e-30" in name) for name, state in states.items()), states
    assert "2 of 4 trials finished; 2 non finite" in done.stdout
    assert "step 1/4" not in done.stdout
    assert all("step 1/4" in log.read_text() for log in tmp_path.rglob("0_*1e-3*/logs/trial.log"))
    (table,) = tmp_path.rglob("sweep.csv")
    rows = list(csv.DictReader(table.open()))
    assert [row["state"] for row in rows] == ["finished"] * 2 + ["non_finite"] * 2
    assert float(rows[0]["train/loss"]) < float(rows[1]["train/loss"])


def test_uneven_rows_take_the_same_number_of_steps_on_each_rank(tmp_path: Path) -> None:
    """5 rows, 2 ranks, batches of 2: nothing hangs, nothing is counted twice; eval equals that of one rank to 1e-4."""
    rows = _write(tmp_path / "five.jsonl", [{"prompt": "写" * n, "response": "好" * n} for n in (1, 3, 9, 20, 40)])
    sizes = ("train.micro_batch_size=2", "train.grad_accum=1", "train.epochs=2", "train.max_steps=null")
    words = (*SHORT, *sizes, f"data.train_file={rows}", f"data.eval_file={rows}", "eval=[loss]")
    evals = {}
    for ranks in (1, 2):
        done = forked(*words, f"launcher.nproc={ranks}", f"run.dir={tmp_path}/{ranks}", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        evals[ranks] = next(line["eval/loss/loss"] for line in metrics(tmp_path / str(ranks)))
    assert "5 rows, 2 steps an epoch; the last step of an epoch has 1 of 4 rows" in done.stdout
    assert [line["step"] for line in metrics(tmp_path / "2") if "train/loss" in line] == [1, 2, 3, 4]
    assert evals[2] == pytest.approx(evals[1], abs=1e-4)


def test_a_full_artifact_is_a_checkpoint_that_others_load(tmp_path: Path) -> None:
    done = forked(*SHORT, "gather=full16", f"run.dir={tmp_path}/a", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    importlib.import_module("glmexp.model")  # registers the classes

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "artifact")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a" / "artifact")
    assert model.dtype == torch.bfloat16
    ids = torch.tensor([tokenizer.encode("你好")])
    assert model(input_ids=ids).logits.isfinite().all()
