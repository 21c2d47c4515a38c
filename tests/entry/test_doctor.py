"""doctor.explain tells every option there is: meaning, unit, range, values, who set it; at once and without torch.

The doctor itself: judgement is over plain data, so each fault is planted in a report; one real run on this machine.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from glmexp.config.errors import ConfigError
from glmexp.config.explain import explain
from glmexp.config.nearest import keys
from glmexp.entry.doctor import table
from glmexp.launcher import diagnosis
from glmexp.launcher.diagnosis import Finding
from glmexp.launcher.machine import Bench, Gpu, Interface, Machine, Torch, parse_gpus, parse_topology, visible
from tests.cli import environment, forked, glmexp
from tests.config.helpers import asked, config, ds_file, refusal

GIB = 2**30


def _told(key: str, *words: str) -> str:
    request = asked("entry=doctor", f"doctor.explain={key}", *words, gpus=1)
    return explain(key, request.trials[0], request.origins)


def test_elements_come_with_their_bytes_and_the_file_that_set_them() -> None:
    assert _told("zero.reduce_bucket_size") == (
        "zero.reduce_bucket_size = 200000000\n"
        "  meaning   Elements reduced at a time (stages 1 to 3).\n"
        "  unit      elements; here 200,000,000 x 2 bytes (bf16) = 400,000,000 bytes = 381.5 MiB\n"
        "  allowed   a whole number of at least 1, or null\n"
        "  default   stage0 null, stage1 200000000, stage2 200000000, stage3 200000000\n"
        "  set by    conf/zero/stage2.yaml\n"
        "  DeepSpeed zero_optimization.reduce_bucket_size"
    )
    assert "x 4 bytes (fp32) = 800,000,000 bytes" in _told("zero.reduce_bucket_size", "precision=fp32")


def test_who_set_a_value_is_told_for_overrides_files_and_repeated_values(tmp_path: Path) -> None:
    assert "set by    the command line" in _told("zero.reduce_bucket_size", "zero.reduce_bucket_size=5e8")
    assert "set by    conf/optim/adamw.yaml: ${method.lr}, set by conf/method/lora.yaml" in _told("optim.lr")
    file = ds_file(tmp_path / "mine.json", {"zero_optimization": {"overlap_comm": False}})
    told = _told("zero.overlap_comm", f"deepspeed.config_file={file}")
    assert f"set by    {file}: zero_optimization.overlap_comm" in told
    assert told.startswith("zero.overlap_comm = false")


def test_every_option_has_meaning_unit_range_and_default() -> None:
    request = asked("entry=doctor", "doctor.explain=zero.stage")
    for key in keys():
        lines = explain(key, request.trials[0], request.origins).splitlines()
        rows = {line.split()[0]: line[12:] for line in lines[1:]}
        assert lines[0].startswith(key), key
        assert rows["meaning"].endswith((".", "?")), key
        assert rows["unit"], key
        assert rows["allowed"], key
        assert rows["default"], key
        if key in request.origins:
            assert "set" in rows, key


def test_a_section_lists_its_keys_and_a_misspelt_one_is_answered() -> None:
    assert "zero.zero_hpz_partition_size" in _told("zero")
    request = asked("entry=doctor", "doctor.explain=zero.reduce_buket_size")
    with pytest.raises(ConfigError, match=r"did you mean zero\.reduce_bucket_size"):
        explain("zero.reduce_buket_size", request.trials[0], request.origins)


def test_its_keys_have_no_effect_elsewhere() -> None:
    assert "doctor.explain: without effect under entry=train" in refusal("doctor.explain=zero.stage")
    assert "doctor.json: without effect under entry=train" in refusal("doctor.json=true")


def test_it_loads_nothing_heavy_and_leaves_no_run_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from glmexp.__main__ import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'deepspeed', 'transformers', 'peft', 'wandb'} & set(sys.modules); sys.exit(code)"
    )
    words = ["entry=doctor", "doctor.explain=train.seed"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "train.seed = 42" in done.stdout
    assert not [*tmp_path.iterdir()]


def _healthy() -> Machine:
    """Two H200 in one host with NVLink."""
    return Machine(
        python="3.12.3",
        versions={"torch": "2.11.0+cu130", "deepspeed": "0.19.8", "transformers": "5.17.0", "peft": "0.21.2"},
        device_files=2,
        gpus=[Gpu(number, "NVIDIA H200", "580.159.04", 140 * GIB, 0) for number in range(2)],
        driver_cuda="13.0",
        topology={"0-1": "NV18"},
        torch=Torch("2.11.0+cu130", "13.0", "2.28.9", [("NVIDIA H200", 90)] * 2, [75, 80, 90, 100]),
        interfaces=[
            Interface("lo", "loopback", True, "127.0.0.1"),
            Interface("docker0", "virtual", True, "172.17.0.1"),
            Interface("eth0", "physical", True, "10.0.0.5", 100_000),
        ],
        default_route="eth0",
        host="gpu1",
        host_address="10.0.0.5",
        cpus=32,
        memory_bytes=200 * GIB,
        shm_bytes=100 * GIB,
        free_bytes={"outputs": 100 * GIB},
        open_files=65536,
        bench=Bench(2, "nccl", {8: 2e-5, 2**28: 0.001}, None, 3.0),
    )


def _broken(machine: Machine, *words: str) -> list[Finding]:
    found = diagnosis.examine(machine, config("entry=doctor", "tracker=none", *words, gpus=2), [])
    return [one for one in found if one.level == "broken"]


def _only(machine: Machine, *words: str) -> str:
    (one,) = _broken(machine, *words)
    return f"{one.topic}: {one.found} -> {one.do}"


NODES = ("launcher.nnodes=2", "launcher.node_rank=0", "launcher.master_addr=10.0.0.5")


def test_a_healthy_machine_has_no_finding() -> None:
    assert _broken(_healthy()) == []
    assert _broken(_healthy(), *NODES) == []
    told = table(diagnosis.examine(_healthy(), config("entry=doctor", gpus=2), []))
    shown = " ".join("\n".join(told).split())  # however wide the terminal is
    assert "NVLink between all GPUs: 0-1 NV18" in shown
    assert "268.44 GB/s bus bandwidth: 2 ranks over nccl, 256 MiB in 1.00 ms" in shown
    assert shown.endswith("nothing broken")


def test_planted_drivers_and_builds() -> None:
    old = _healthy()
    old.driver_cuda, old.gpus = "12.4", [dataclasses.replace(gpu, driver="550.54.15") for gpu in old.gpus]
    told = _only(old)
    assert "550.54.15 runs CUDA up to 12.4, and torch 2.11.0+cu130 needs CUDA 13.0" in told
    assert "The NVIDIA driver on your system is too old" in told
    assert "a driver of at least 580.65, or a torch for CUDA 12.4" in told
    cpu = _healthy()
    cpu.torch = Torch("2.11.0+cpu")
    assert "Torch not compiled with CUDA enabled" in _only(cpu)
    mismatch = _healthy()
    mismatch.gpus, mismatch.smi_error = [], "Driver/library version mismatch"
    assert "nvidia-smi fails: Driver/library version mismatch" in _only(mismatch)
    fewer = _healthy()
    fewer.torch = dataclasses.replace(fewer.torch, devices=[("NVIDIA H200", 90)])
    assert "torch sees 1 of 2 GPUs" in _only(fewer)
    young = _healthy()
    young.torch = dataclasses.replace(young.torch, archs=[75, 80])
    assert "no kernel image is available for execution on the device" in _only(young)
    bad = _healthy()
    bad.torch = dataclasses.replace(bad.torch, error="libcudnn.so.9: cannot open shared object file")
    assert "libcudnn.so.9" in _only(bad)


def test_a_planted_interface_is_found_with_the_variable_to_set() -> None:
    loop = _healthy()
    loop.host_address = "127.0.1.1"
    assert _broken(loop) == [], "on one machine the loopback is right"
    told = _only(loop, *NODES)
    assert "gloo takes lo (127.0.0.1, loopback): other machines are not reached by it" in told
    assert "launcher.env.GLOO_SOCKET_IFNAME=eth0" in told
    docker = _healthy()
    docker.variables = {"NCCL_SOCKET_IFNAME": "docker"}
    told = _only(docker, *NODES)
    assert "NCCL takes docker0 (172.17.0.1, virtual), as NCCL_SOCKET_IFNAME says: other machines" in told
    assert "launcher.env.NCCL_SOCKET_IFNAME=eth0" in told
    nosuch = _healthy()
    nosuch.variables = {"GLOO_SOCKET_IFNAME": "ib7"}
    assert "GLOO_SOCKET_IFNAME=ib7: there is no such interface; lo (127.0.0.1), docker0 (172.17.0.1)" in _only(nosuch)
    excluded = _healthy()
    excluded.variables = {"NCCL_SOCKET_IFNAME": "^docker,lo"}
    assert _broken(excluded, *NODES) == []
    assert "NCCL_SOCKET_IFNAME=eth9 matches no interface" in _only(_healthy(), "launcher.env.NCCL_SOCKET_IFNAME=eth9")


def test_planted_ports_disks_and_memory() -> None:
    port = _healthy()
    port.ports_taken = [29500]
    assert _broken(port) == []
    assert "29500 is in use by another process (EADDRINUSE" in _only(port, *NODES)
    disk = _healthy()
    disk.free_bytes = {"outputs": GIB // 2}
    assert "0.5 GiB free for outputs (No space left on device)" in _only(disk)
    shm = _healthy()
    shm.shm_bytes = 64 * 2**20
    assert "/dev/shm has 0.06 GiB" in _only(shm)
    assert "--shm-size=8g" in _only(shm)
    memory = _healthy()
    memory.memory_bytes = GIB
    assert "1.0 GiB free for 2 ranks" in _only(memory)
    missing = _healthy()
    missing.versions = {**missing.versions, "deepspeed": None}
    assert "No module named 'deepspeed'" in _only(missing)


def test_a_hanging_or_slow_network_is_told_in_the_words_of_the_logs() -> None:
    hangs = _healthy()
    hangs.bench = Bench(2, "nccl", error="rank 1 did not come")
    told = _only(hangs)
    for word in ("Initializing NCCL", "Waiting for the barrier", "NCCL_P2P_DISABLE=1", "NCCL_IB_DISABLE=1", "rank 1"):
        assert word in told
    slow = _healthy()
    slow.bench = Bench(2, "nccl", {2**28: 0.05})
    notes = [one for one in diagnosis.examine(slow, config(gpus=2), []) if one.level == "note"]
    assert any("NVLink is there and is not used" in one.do for one in notes)
    pcie = _healthy()
    pcie.topology = {"0-1": "SYS"}
    notes = [one for one in diagnosis.examine(pcie, config(gpus=2), []) if one.level == "note"]
    assert any("over PCIe and the CPU: 0-1 SYS" in one.found and "NCCL_P2P_DISABLE=1" in one.do for one in notes)


SMI = """0, NVIDIA H200, 580.159.04, 143771, 4, Disabled, GPU-aa11-22
1, NVIDIA A30, 580.159.04, 24576, 20000, Enabled, GPU-bb33-44
"""
TOPO = """\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-15\t0
GPU1\tNV18\t X \tPHB\tNODE\t0-15\t0
GPU2\tSYS\tPHB\t X \tSYS\t16-31\t1
NIC0\tPIX\tNODE\tSYS\t X
"""


def test_what_nvidia_smi_prints_is_read() -> None:
    first, second = parse_gpus(SMI)
    assert (first.name, first.memory_bytes, first.mig) == ("NVIDIA H200", 143771 * 2**20, False)
    assert (second.index, second.used_bytes, second.mig) == (1, 20000 * 2**20, True)
    assert parse_topology(TOPO) == {"0-1": "NV18", "0-2": "SYS", "1-2": "PHB"}


@pytest.mark.parametrize(
    ("named", "indices"),
    [(None, [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("", []), ("-1", []), ("0,7,1", [0]), ("GPU-bb3", [1]),
     ("MIG-5", [0, 1])],
)  # fmt: skip
def test_only_gpus_that_are_visible_are_told(named: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible(parse_gpus(SMI), named)] == indices


def test_gpus_that_are_left_out_are_counted_and_none_at_all_is_no_fault() -> None:
    one = dataclasses.replace(_healthy(), gpus=_healthy().gpus[:1], hidden_gpus=1, topology={}, device_files=2)
    one.torch.devices = one.torch.devices[:1]
    one.variables = {"CUDA_VISIBLE_DEVICES": "0"}
    told = " ".join("\n".join(table(diagnosis.examine(one, config("entry=doctor", gpus=1), []))).split())
    assert "1 of 2 are visible to a run: CUDA_VISIBLE_DEVICES=0" in told
    assert "1: NVIDIA H200" not in told
    none = dataclasses.replace(one, gpus=[], hidden_gpus=2, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert _broken(none) == []


def test_it_finds_what_is_wrong_here_and_says_so_as_json(tmp_path: Path) -> None:
    """A taken port, an interface that there is not, a compiler that there is not; no run folder is made."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("entry=doctor", "doctor.json=true", "launcher.nproc=2", f"launcher.master_port={port}")
        words += ("launcher.env.GLOO_SOCKET_IFNAME=nosuch0", "offload=optimizer", "offload.adam=deepspeed")
        done = glmexp(*words, "tracker=none", folder=tmp_path, CXX="nosuchcompiler")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    broken = {one["topic"]: one["found"] for one in told["findings"] if one["level"] == "broken"}
    assert f"{port} is in use" in broken["port"]
    assert "GLOO_SOCKET_IFNAME=nosuch0: there is no such interface" in broken["network"]
    assert "nosuchcompiler, as CXX says, is not on PATH" in broken["ops"]
    assert told["machine"]["versions"]["torch"]
    assert not [*tmp_path.iterdir()]


def test_ranks_talk_and_their_bandwidth_is_told(tmp_path: Path) -> None:
    done = forked("entry=doctor", "launcher.nproc=2", "tracker=none", folder=tmp_path)
    assert "GB/s bus bandwidth: 2 ranks over gloo, 16 MiB in" in " ".join(done.stdout.split()), done.stderr
    assert not [*tmp_path.iterdir()]
