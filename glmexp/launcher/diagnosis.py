"""Judgement over a ``Machine``: pure functions, each finding with what to do, in the words that people search for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from glmexp.config.errors import Problem
from glmexp.config.schema import RunConfig
from glmexp.launcher.machine import Interface, Machine

_GIB = 2**30
_WORST_LINKS = ("PHB", "NODE", "SYS")
_DRIVER_OF_CUDA = {"11": "450.80", "12": "525.60", "13": "580.65"}
"""Oldest driver for each CUDA (NVIDIA's CUDA Toolkit release notes, table 2, Linux)."""
HANG = (
    'a run that hangs at "Initializing NCCL" or "Waiting for the barrier": launcher.env.NCCL_DEBUG=INFO shows where; '
    "launcher.env.NCCL_P2P_DISABLE=1 (GPU to GPU over PCIe is broken: IOMMU or ACS), launcher.env.NCCL_IB_DISABLE=1 "
    "(InfiniBand is there and does not work), launcher.env.NCCL_SOCKET_IFNAME=INTERFACE (the wrong network)"
)


@dataclass(frozen=True)
class Finding:
    """ok; note: may surprise; broken: will break a run. ``do`` is what to do about it."""

    level: Literal["ok", "note", "broken"]
    topic: str
    found: str
    do: str = ""


Judge = Callable[[Machine, RunConfig], Iterator[Finding]]


def examine(machine: Machine, config: RunConfig, lacking: list[Problem]) -> list[Finding]:
    """All findings, in the order of the table. ``lacking``: what ``needs.missing`` says of this configuration."""
    found = [finding for judge in JUDGES for finding in judge(machine, config)]
    return [*found, *_ops(machine, lacking)]


def versions(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """Python and packages."""
    there = ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version is not None)
    yield Finding("ok", "versions", f"Python {machine.python}, {there}; {machine.system}")
    for name in ("torch", "deepspeed", "transformers", "peft"):
        if machine.versions.get(name) is None:
            yield Finding("broken", "versions", f"No module named '{name}'", f"pip install {name}")


def gpus(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """GPUs, as the driver and as torch see them, and whether these fit."""
    torch = machine.torch
    if torch.error is not None:
        yield Finding("broken", "torch", torch.error, _torch_way_out(torch.error))
    if machine.hidden_gpus:
        text = f"{len(machine.gpus)} of {len(machine.gpus) + machine.hidden_gpus} are visible to a run"
        yield Finding("ok", "GPUs", f"{text}: CUDA_VISIBLE_DEVICES={machine.variables.get('CUDA_VISIBLE_DEVICES')}")
    if not machine.gpus:
        if machine.hidden_gpus:
            yield Finding("ok", "GPUs", "runs are on the CPU, over gloo")
        elif machine.device_files:
            yield Finding(
                "broken",
                "driver",
                f"{machine.device_files} device files of NVIDIA, and nvidia-smi fails: {machine.smi_error}",
                "reload the driver, or restart the machine (a driver update leaves the old module loaded: "
                "Driver/library version mismatch)",
            )
        else:
            yield Finding("ok", "GPUs", "none: runs are on the CPU, over gloo")
        return
    for gpu in machine.gpus:
        used = f", {gpu.used_bytes / _GIB:.1f} GiB in use" if gpu.used_bytes > _GIB else ""
        text = f"{gpu.index}: {gpu.name}, {gpu.memory_bytes / _GIB:.1f} GiB{used}"
        busy = gpu.used_bytes > 0.1 * gpu.memory_bytes
        do = "nvidia-smi names the processes; CUDA_VISIBLE_DEVICES chooses other GPUs (CUDA out of memory)"
        yield Finding("note" if busy else "ok", "GPU", text, do if busy else "")
        if gpu.mig:
            yield Finding(
                "note", "GPU", f"{gpu.index}: MIG is on", "CUDA_VISIBLE_DEVICES=MIG-UUID; NCCL has no P2P in MIG"
            )
    yield from _driver(machine)


def _torch_way_out(error: str) -> str:
    if "driver" in error.lower():
        return "update the driver, or install a torch for the driver's CUDA (nvidia-smi names it)"
    return "python -c 'import torch' shows the whole error; pip install --force-reinstall torch"


def _driver(machine: Machine) -> Iterator[Finding]:
    torch, driver = machine.torch, machine.gpus[0].driver
    if torch.version and torch.cuda is None:
        yield Finding(
            "broken",
            "torch",
            f"torch {torch.version} is for the CPU, and here are {len(machine.gpus)} GPUs "
            "(Torch not compiled with CUDA enabled)",
            f"install a torch for CUDA {machine.driver_cuda or ''} (its version ends in +cu...)".replace("  ", " "),
        )
        return
    wanted = (torch.cuda or "").split(".")[0]
    oldest = _DRIVER_OF_CUDA.get(wanted)
    if oldest is not None and _numbers(driver) < _numbers(oldest):
        yield Finding(
            "broken",
            "driver",
            f"{driver} runs CUDA up to {machine.driver_cuda}, and torch {torch.version} needs CUDA {torch.cuda} "
            "(The NVIDIA driver on your system is too old; CUDA driver version is insufficient)",
            f"a driver of at least {oldest}, or a torch for CUDA {machine.driver_cuda}",
        )
    elif torch.cuda is not None:
        text = f"driver {driver} (CUDA {machine.driver_cuda}), torch's CUDA {torch.cuda}, NCCL {torch.nccl}"
        yield Finding("ok", "CUDA", text)
    visible = machine.variables.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda is not None and torch.error is None and len(torch.devices) != len(machine.gpus) and visible is None:
        yield Finding(
            "broken",
            "torch",
            f"torch sees {len(torch.devices)} of {len(machine.gpus)} GPUs",
            "CUDA_VISIBLE_DEVICES, MIG, or a container without all devices (--gpus all)",
        )
    for name, capability in dict.fromkeys(torch.devices):
        if torch.archs and not any(arch // 10 == capability // 10 and arch <= capability for arch in torch.archs):
            yield Finding(
                "broken",
                "torch",
                f"{name} has compute capability {capability / 10:.1f}, and torch has code for "
                f"{', '.join(f'{arch / 10:.1f}' for arch in torch.archs)} "
                "(no kernel image is available for execution on the device)",
                "another build of torch",
            )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def topology(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """NVLink or PCIe between the GPUs."""
    if not machine.topology:
        return
    slow = {pair: link for pair, link in machine.topology.items() if link in _WORST_LINKS}
    linked = {pair: link for pair, link in machine.topology.items() if link.startswith("NV")}
    kinds = ", ".join(f"{pair} {link}" for pair, link in list(machine.topology.items())[:8])
    more = f" and {len(machine.topology) - 8} more pairs" if len(machine.topology) > 8 else ""
    if len(linked) == len(machine.topology):
        yield Finding("ok", "topology", f"NVLink between all GPUs: {kinds}{more}")
    elif slow:
        yield Finding(
            "note",
            "topology",
            f"{len(slow)} pairs of GPUs talk over PCIe and the CPU: {kinds}{more}",
            "slow, and P2P may hang there: launcher.env.NCCL_P2P_DISABLE=1 where it does; "
            "zero.overlap_comm=true and larger train.grad_accum hide some of it",
        )
    else:
        yield Finding("note", "topology", f"PCIe between GPUs: {kinds}{more}", "")


def bandwidth(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """What the ranks measured."""
    bench = machine.bench
    if bench is None:
        return
    if bench.error is not None:
        yield Finding("broken", "all-reduce", f"{bench.ranks} ranks over {bench.backend}: {bench.error}", HANG)
        return
    speed = bench.bus_bytes_per_s()
    if speed is None:
        yield Finding("ok", "all-reduce", "one rank: nothing to measure")
        return
    size = max(bench.seconds)
    text = (
        f"{speed / 1e9:.2f} GB/s bus bandwidth: {bench.ranks} ranks over {bench.backend}, {size / 2**20:.0f} MiB in "
        f"{bench.seconds[size] * 1e3:.2f} ms, {min(bench.seconds)} bytes in "
        f"{bench.seconds[min(bench.seconds)] * 1e6:.0f} us"
    )
    linked = machine.topology and all(link.startswith("NV") for link in machine.topology.values())
    if linked and config.launcher.nnodes == 1 and speed < 50e9:
        yield Finding("note", "all-reduce", text, f"NVLink is there and is not used: {HANG}")
    else:
        yield Finding("ok", "all-reduce", text)
    for line in bench.nccl_lines:
        yield Finding("ok", "NCCL", line)


def network(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """The interface that NCCL and gloo take: lo and docker0 are wrong between machines."""
    several = config.launcher.nnodes > 1
    by_name = {one.name: one for one in machine.interfaces}
    names = ", ".join(f"{one.name} ({one.address})" for one in machine.interfaces if one.address)
    variables = {**machine.variables, **config.launcher.env}
    best = best_interface(machine)
    for library, variable in (("gloo", "GLOO_SOCKET_IFNAME"), ("NCCL", "NCCL_SOCKET_IFNAME")):
        way = f"launcher.env.{variable}={best or 'INTERFACE'}"
        chosen = variables.get(variable)
        if chosen is not None and library == "gloo" and chosen not in by_name:
            yield Finding("broken", "network", f"{variable}={chosen}: there is no such interface; {names}", way)
            continue
        if chosen is not None and library == "NCCL" and not _matches(chosen, by_name):
            yield Finding("broken", "network", f"{variable}={chosen} matches no interface; {names}", way)
            continue
        taken = _taken(library, chosen, machine)
        text = f"{library} takes {taken.name} ({taken.address}, {taken.kind})" if taken else f"{library} finds none"
        text += f", as {variable} says" if chosen is not None else ""
        wrong = taken is None or taken.kind != "physical"
        if wrong and several:
            yield Finding("broken", "network", f"{text}: other machines are not reached by it; {names}", way)
        else:
            yield Finding("ok", "network", text)
    if machine.host_address is None and several:
        yield Finding("broken", "network", f"this machine's name {machine.host} has no address", "a line in /etc/hosts")
    if machine.host_lookup_s > 2:
        text = f"looking up {machine.host} took {machine.host_lookup_s:.1f} s"
        yield Finding("note", "network", text, "a line in /etc/hosts; ranks wait for it when they start")


def best_interface(machine: Machine) -> str | None:
    """The interface that other machines are reached by: the default route's, else the fastest physical one."""
    usable = [one for one in machine.interfaces if one.kind == "physical" and one.up and one.address]
    if machine.default_route in [one.name for one in usable]:
        return machine.default_route
    return max(usable, key=lambda one: one.speed_mbit or 0).name if usable else None


def _matches(wanted: str, by_name: dict[str, Interface]) -> list[Interface]:
    """NCCL_SOCKET_IFNAME: prefixes with commas between them, ``=`` for whole names, ``^`` for all others."""
    without, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    words = [word for word in wanted.lstrip("^=").split(",") if word]
    hits = [
        one for name, one in by_name.items() if (name in words if exact else any(name.startswith(w) for w in words))
    ]
    return [one for one in by_name.values() if one not in hits] if without else hits


def _taken(library: str, chosen: str | None, machine: Machine) -> Interface | None:
    """gloo: the interface that the machine's name resolves to. NCCL: ib*, then anything but docker and lo, then docker,
    then lo (NCCL's user guide, NCCL_SOCKET_IFNAME)."""
    by_name = {one.name: one for one in machine.interfaces if one.address}
    if library == "gloo":
        if chosen is not None:
            return by_name.get(chosen)
        for one in by_name.values():
            if one.address == machine.host_address:
                return one
        own = machine.host_address is not None and machine.host_address.startswith("127.")
        return by_name.get("lo") if own or machine.host_address is None else None
    pool = _matches(chosen, by_name) if chosen is not None else [*by_name.values()]

    def order(one: Interface) -> int:
        name = one.name
        return 0 if name.startswith("ib") else 3 if name == "lo" else 2 if name.startswith("docker") else 1

    return min(pool, key=order) if pool else None


def ports(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """The port of the rendezvous."""
    launcher = config.launcher
    own = launcher.master_port or (29500 if launcher.nnodes > 1 else None)
    if own is not None and own in machine.ports_taken and not launcher.node_rank:
        yield Finding(
            "broken",
            "port",
            f"{own} is in use by another process (EADDRINUSE, Address already in use)",
            "another launcher.master_port; on a single machine leave it out, and a free one is taken. "
            f"`ss -ltnp 'sport = :{own}'` names who holds it",
        )
    elif 29500 in machine.ports_taken:
        yield Finding(
            "note", "port", "29500 is in use: torchrun, deepspeed and accelerate take it by default", "--master_port"
        )
    else:
        yield Finding("ok", "port", f"{own} is free" if own is not None else "a free one is taken for each run")


def memory(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """Host memory, shared memory, open files, cores."""
    if machine.memory_bytes is not None:
        low = machine.memory_bytes < 2 * _GIB
        do = "ranks are killed (signal 9) where memory ends: end other programs, fewer ranks" if low else ""
        ranks = "one rank" if config.launcher.nproc == 1 else f"{config.launcher.nproc} ranks"
        text = f"{machine.memory_bytes / _GIB:.1f} GiB free for {ranks}, {machine.cpus} cores"
        yield Finding("broken" if low else "ok", "memory", text, do)
    shm = machine.shm_bytes
    if shm is not None and len(machine.gpus) > 1:
        low = shm < 0.25 * _GIB
        yield Finding(
            "broken" if low else "ok",
            "memory",
            f"/dev/shm has {shm / _GIB:.2f} GiB",
            "NCCL and data workers need it (unhandled system error, Bus error): docker run --ipc=host or "
            "--shm-size=8g; else launcher.env.NCCL_SHM_DISABLE=1"
            if low
            else "",
        )
    if 0 < machine.open_files < 4096 and (config.launcher.nproc or 1) * config.launcher.nnodes >= 64:
        yield Finding("note", "memory", f"{machine.open_files} open files a process (Too many open files)", "ulimit -n")


def disk(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """Free disk where a run writes."""
    for folder, free in machine.free_bytes.items():
        text = f"{free / _GIB:.1f} GiB free for {folder}"
        if free < _GIB:
            yield Finding(
                "broken", "disk", f"{text} (No space left on device)", "free some, or run.dir on another disk"
            )
        elif free < 20 * _GIB:
            do = "checkpoints of large models do not fit: train.keep_checkpoints, or run.dir on another disk"
            yield Finding("note", "disk", text, do)
        else:
            yield Finding("ok", "disk", text)


def tracker(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """Whether the package of the chosen tracker is there; the doctor adds whether somebody is logged in."""
    name = config.tracker.name
    if name == "wandb" and machine.versions.get("wandb") is None:
        yield Finding("note", "tracker", "wandb is not installed", "pip install wandb, or tracker=none")


def environment(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """Variables that change how ranks talk."""
    variables = {**machine.variables, **config.launcher.env}
    shown = {name: value for name, value in variables.items() if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))}
    if shown:
        yield Finding("ok", "environment", ", ".join(f"{name}={value}" for name, value in shown.items()))


def _ops(machine: Machine, lacking: list[Problem]) -> Iterator[Finding]:
    tools = ", ".join(f"{name} {path or 'is missing'}" for name, path in machine.tools.items())
    if not lacking:
        yield Finding("ok", "ops", f"all that this configuration compiles can be compiled; {tools}")
    for problem in lacking:
        yield Finding("broken", "ops", f"{problem.where}: {problem.message}", problem.fix)


JUDGES: tuple[Judge, ...] = (
    versions,
    gpus,
    topology,
    bandwidth,
    network,
    ports,
    memory,
    disk,
    tracker,
    environment,
)
