"""Offloaded training: the same numbers as without, what it needs is asked for early, and what steps is said."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from pathlib import Path

import pytest

from glmexp.config.compose import run_config
from glmexp.config.errors import ConfigError
from glmexp.config.memory import EXACT_PINNING
from glmexp.engine.host import MIB, SwapWatch, used_bytes
from glmexp.launcher import environment, needs
from glmexp.launcher.environment import usable_cores
from glmexp.launcher.needs import Host
from tests.cli import SHORT, forked, glmexp, metrics, runs
from tests.engine.cells import Trace, configure, engine_loop
from tests.ranks import run_on_ranks

GIB = 2**30
BUILT = "GLMEXP_TEST_OPS"
"""Set it to let tests compile DeepSpeed's ops, which takes minutes the first time."""


CELLS = {
    "stage 2": ["zero=stage2"],
    "stage 2, optimizer": ["zero=stage2", "offload=optimizer", "offload.adam=torch"],
    "stage 3": ["zero=stage3"],
    "stage 3, all": ["zero=stage3", "offload=all", "offload.adam=torch"],
}


def _train(folder: str) -> dict[str, Trace]:
    return {
        name: engine_loop(configure("model=tiny", "optim.lr=1e-3", *words), f"{folder}/{name}")
        for name, words in CELLS.items()
    }


def test_offloaded_steps_are_those_without(tmp_path: Path) -> None:
    """fp32 on two ranks: the same AdamW on the same float32 masters; 1e-6 since sums over ranks are in one order."""
    traces = run_on_ranks(_train, str(tmp_path), folder=tmp_path)[0]
    for offloaded in (name for name in CELLS if "," in name):
        expected, found = traces[offloaded.partition(",")[0]], traces[offloaded]
        assert found.losses == pytest.approx(expected.losses, abs=1e-6), offloaded
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5), offloaded
        for name, weight in expected.weights.items():
            assert float((found.weights[name] - weight).abs().max()) <= 1e-6, f"{offloaded}: {name}"


def test_a_leaf_module_that_the_network_has_not_is_refused() -> None:
    from torch import nn

    from glmexp.engine.build import _check_leaf_modules

    _check_leaf_modules(nn.Sequential(nn.Linear(1, 1)), ["Linear", "torch.nn.modules.linear.Linear"])
    with pytest.raises(ConfigError, match=r"zero\.leaf_modules: Expert: no module .*\n.*there are: Linear, Sequential"):
        _check_leaf_modules(nn.Sequential(nn.Linear(1, 1)), ["Linear", "Expert"])


def test_a_run_says_which_optimizer_steps_on_the_host(tmp_path: Path) -> None:
    cores = usable_cores()
    words = (*SHORT, "method=lora", "zero=stage2", "offload=optimizer")
    done = forked(*words, folder=tmp_path, OMP_NUM_THREADS=str(cores))
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: offload.optimizer: torch's AdamW steps on the host")
    (run,) = runs(tmp_path)
    assert "adam: torch" in (run / "config.yaml").read_text(), "decided once, and the run can be started again from it"
    assert metrics(run)[0]["mem/host_used_bytes"] > 0


def test_without_a_compiler_the_fall_back_is_said_and_an_asked_for_op_is_refused_before_anything_is_built(
    tmp_path: Path,
) -> None:
    """PATH without compilers and ninja; this Python's folder may hold a ninja of its own."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "uname", "git", "file"):
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    words = (*SHORT, "method=lora", "zero=stage2", "offload=optimizer")
    more = {
        "PATH": str(tools),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "ext"),
        "CXX": "",
        "OMP_NUM_THREADS": str(usable_cores()),
    }
    done = forked(*words, folder=tmp_path, **more)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "torch's AdamW steps on the host in place of DeepSpeedCPUAdam" in line
    assert "a C++ compiler (c++ or g++) is not on PATH (install one (Debian: apt-get install g++))" in line
    assert "offload=none" in line
    assert "ds_opt_adam" not in done.stdout + done.stderr
    refused = forked(*words, "offload.adam=deepspeed", f"run.dir={tmp_path}/refused", folder=tmp_path, **more)
    assert refused.returncode == 2
    assert "offload.adam: needs DeepSpeed's cpu_adam op, which is compiled here, and a C++ compiler" in refused.stderr
    assert "else offload.adam=torch (torch's AdamW on the host, slower), or offload=none" in refused.stderr
    assert not (tmp_path / "refused").exists(), "before the run folder is made"


def _host(gpus: int, path: Path, memory_gib: float | None = None, **environ: str) -> Host:
    memory = None if memory_gib is None else int(memory_gib * GIB)
    return Host(gpus, {"PATH": str(path), **environ}, memory)


def _tools(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("#!/bin/sh\nexit 0\n")
        (folder / name).chmod(0o755)
    return folder


def test_on_a_gpu_deepspeeds_adam_steps_where_it_can_be_compiled(tmp_path: Path) -> None:
    config = run_config(["zero=stage2", "offload=optimizer"], gpus=1)
    decided, said = needs.with_adam(config, _host(1, _tools(tmp_path / "all", "c++", "ninja")))
    assert decided.offload.adam == "deepspeed"
    assert needs.ops(decided) == ["cpu_adam"]
    assert "DeepSpeedCPUAdam steps on the host" in said
    chosen = dataclasses.replace(config, offload=dataclasses.replace(config.offload, adam="torch"))
    assert needs.with_adam(chosen, _host(1, tmp_path)) == (chosen, ""), "nothing to say about what the user chose"


@pytest.mark.skipif(sys.platform != "linux", reason="libaio is Linux's")
def test_nvme_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    words = ["zero=stage3", "offload=nvme", f"offload.nvme_path={tmp_path}/new/swap"]
    problems = [*needs.missing(run_config(words), _host(0, _tools(tmp_path / "no")))]
    text = "\n".join(map(str, problems))
    for part in ("a C++ compiler (c++ or g++) is not on PATH", "libaio is not there", "apt-get install libaio-dev"):
        assert part in text
    assert "offload=all keeps in host memory what would go to nvme" in text
    assert {problem.where for problem in problems} == {"offload.nvme_path"}


def test_a_disk_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["zero=stage3", "offload=nvme", f"offload.nvme_path={tmp_path}/file/swap"]
    assert "is no folder that can be written to" in str([*needs.missing(run_config(words), _host(0, tmp_path))])


def test_a_buffer_smaller_than_the_embedding_is_refused_with_the_size_that_fits(tmp_path: Path) -> None:
    words = ["model=tiny", "model.init=random", "zero=stage3", "offload=nvme", f"offload.nvme_path={tmp_path}"]
    small = run_config([*words, "offload.nvme_buffer_size=50000"], ranks=2)
    found = [one for one in needs.missing(small, _host(2, tmp_path)) if one.where == "offload.nvme_buffer_size"]
    assert found[0].message == (
        "50,000 elements, and a rank's part of transformer.embedding.word_embeddings.weight has 81,920 "
        "(1,280 x 128 on 2 ranks)"
    )
    assert found[0].fix == "offload.nvme_buffer_size=81920"
    enough = run_config([*words, "offload.nvme_buffer_size=81920"], ranks=2)
    assert not [one for one in needs.missing(enough, _host(2, tmp_path)) if one.where == "offload.nvme_buffer_size"]


SIX_B = ["model=chatglm3", "model.init=random", "zero=stage2", "offload=optimizer"]


def _short_of_memory(path: Path, gib: float, *words: str, method: str = "full", ranks: int = 1) -> str:
    config = run_config([*SIX_B, f"method={method}", *words], ranks=ranks, gpus=ranks)
    problems = needs.missing(config, _host(ranks, path, memory_gib=gib))
    return " ".join(str(one) for one in problems if one.where == "offload")


def test_host_memory_is_counted_before_a_model_is_built(tmp_path: Path) -> None:
    """ChatGLM3-6B has 6,243,584,000 parameters at 18 bytes; 1.4 GiB are a rank's own."""
    exactly = "needs about 106.56 GiB of host memory, and 105.00 GiB are free"
    said = _short_of_memory(tmp_path, 105)
    assert "needs about 110.92 GiB of host memory" in said, "groups of nearly 2**29 elements, rounded up"
    assert "offload.pin_memory=false, zero=stage3 offload=nvme, method=lora, more hosts" in said
    for exact in (
        "offload.pin_memory=false",
        f"launcher.env={{PYTORCH_ALLOC_CONF: '{EXACT_PINNING}'}}",
        "launcher.env={DS_PIN_MEMORY_BACKEND: native}",
    ):
        said = _short_of_memory(tmp_path, 105, exact)
        assert exactly in said, "torch is told not to round, or not asked"
        assert "pin_memory" not in said
    assert not _short_of_memory(tmp_path, 107, "offload.pin_memory=false")
    said = _short_of_memory(tmp_path, 105, "offload.pin_memory=false", ranks=8)
    assert "119.83 GiB" in said, "each rank's own, and its buffer for the largest gradient"
    assert not _short_of_memory(tmp_path, 4, method="lora"), "LoRA is small"
    passing = ("offload.adam=gpu", "launcher.env={DS_PIN_MEMORY_BACKEND: native}")
    said = _short_of_memory(tmp_path, 71, *passing)
    assert "needs about 71.18 GiB of host memory" in said, "12 bytes, in memory of that size"
    assert "pin_memory" not in said
    assert not needs.ops(run_config([*SIX_B, "method=full", *passing], gpus=1)), "nothing is compiled"
    assert not [*needs.missing(run_config([*SIX_B, "method=full"], gpus=1), _host(0, tmp_path, memory_gib=1))], (
        "all of it is the host's"
    )


def test_an_op_that_does_not_compile_leaves_torchs_adam_or_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "compiled", lambda op: "fatal error: no such header")
    monkeypatch.setattr(Host, "here", lambda: Host(1, {"PATH": os.environ["PATH"]}, None))
    monkeypatch.setattr(Host, "compilers", lambda self: iter(()))
    assert needs.prepare(run_config(["zero=stage2", "offload=optimizer"], gpus=1)).offload.adam == "torch"
    with pytest.raises(ConfigError, match="could not be compiled: fatal error: no such header"):
        needs.prepare(run_config(["zero=stage2", "offload=optimizer", "offload.adam=deepspeed"], gpus=1))


def test_adamw_on_the_host_gets_the_cores_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 16)
    assert [environment.threads_a_rank(ranks) for ranks in (1, 2, 32)] == [16, 8, 1]
    for name in ("OMP_NUM_THREADS", "DS_ACCELERATOR", "PATH", *environment._QUIET):
        monkeypatch.setenv(name, "set here to be undone by the fixture")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    environment.set_defaults()
    assert os.environ["OMP_NUM_THREADS"] == "8"
    offloaded = run_config(["zero=stage2", "offload=optimizer"], ranks=2)
    text = needs.few_threads(offloaded, {"OMP_NUM_THREADS": "1"})
    assert text.startswith("AdamW steps on the host with 1 of 8 threads that a rank could have: OMP_NUM_THREADS=1.")
    assert needs.few_threads(offloaded, {}) == needs.few_threads(offloaded, {"OMP_NUM_THREADS": "8"}) == ""
    assert needs.few_threads(run_config(["zero=stage2"], ranks=2), {"OMP_NUM_THREADS": "1"}) == ""
    own = run_config(["zero=stage2", "offload=optimizer", "launcher.env={OMP_NUM_THREADS:'4'}"], ranks=2)
    assert "with 4 of 8 threads" in needs.few_threads(own, {})


def test_a_quota_of_cores_counts(tmp_path: Path) -> None:
    """A container may see all cores of its host and may use few of them: AdamW's threads would wait for one another."""
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000\n")
    assert environment.usable_cores(quota) == 1
    quota.write_text("max 100000\n")
    assert environment.usable_cores(quota) == environment.usable_cores(tmp_path / "none") >= 1


def test_a_host_that_begins_to_swap_is_said_and_not_at_every_step() -> None:
    amounts = iter([100 * MIB, 100 * MIB, 101 * MIB, 400 * MIB, 401 * MIB, 900 * MIB])
    watch = SwapWatch(lambda: next(amounts))
    lines = [watch.line(step) for step in range(1, 6)]
    assert [line is not None for line in lines] == [False, False, True, False, True]
    assert "300 MiB written to swap by step 3" in str(lines[2])
    assert used_bytes() > 0


needs_ops = pytest.mark.skipif(os.environ.get(BUILT) is None, reason=f"compiles for minutes: set {BUILT}=1")


@needs_ops
def test_deepspeeds_adam_trains_as_torchs(tmp_path: Path) -> None:
    """fp32: DeepSpeedCPUAdam has other kernels; 1e-4 of a loss of 3."""
    losses = []
    for adam in ("torch", "deepspeed"):
        words = (*SHORT, "train.max_steps=4", "zero=stage2", "offload=optimizer", f"offload.adam={adam}")
        done = glmexp(*words, f"run.dir={tmp_path}/{adam}", folder=tmp_path, timeout_s=280)
        assert done.returncode == 0, done.stderr
        losses.append([line["train/loss"] for line in metrics(tmp_path / adam)])
        assert {"torch": "AdamW", "deepspeed": "DeepSpeedCPUAdam"}[adam] in done.stdout
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


@needs_ops
@pytest.mark.skipif(bool([*Host.here().libaio()]), reason="libaio-dev is not installed")
def test_nvme_trains_as_host_memory(tmp_path: Path) -> None:
    """On a network whose weights are large enough: DeepSpeed keeps tensors below 1 MiB in memory."""
    losses = []
    network = ("method=full", "model.init=random", "model.sizes.hidden_size=512", "model.sizes.num_layers=2")
    for offload in ("all", "nvme"):
        more = [f"offload.nvme_path={tmp_path}/swap", "offload.nvme_buffer_size=1000000"] if offload == "nvme" else []
        words = (
            *SHORT,
            *network,
            "train.max_steps=4",
            "zero=stage3",
            f"offload={offload}",
            "offload.adam=torch",
            *more,
        )
        done = glmexp(*words, f"run.dir={tmp_path}/{offload}", folder=tmp_path, timeout_s=280)
        assert done.returncode == 0, done.stderr
        losses.append([line["train/loss"] for line in metrics(tmp_path / offload)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    on_disk = {path.parent.parent.name for path in (tmp_path / "swap").rglob("*.swp")}
    assert on_disk == {"optimizer", "float32params"}
