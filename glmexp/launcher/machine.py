"""What this machine is, as plain data: read by ``diagnosis``, printed by the doctor. Nothing heavy is imported here."""

from __future__ import annotations

import csv
import ctypes.util
import fcntl
import io
import json
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from glmexp.launcher.environment import tools_path
from glmexp.launcher.folder import recorded_variables
from glmexp.launcher.needs import available_memory_bytes
from glmexp.launcher.ranks import gpu_count

_PACKAGES = ("torch", "deepspeed", "transformers", "peft", "accelerate", "triton", "wandb")
_LOOPBACK, _VIRTUAL, _PHYSICAL = "loopback", "virtual", "physical"
_VIRTUAL_NAMES = re.compile(r"(docker|br-|veth|virbr|cni|flannel|cali|tun|tap|wg|tailscale|podman)")


@dataclass
class Gpu:
    """One GPU as nvidia-smi tells it."""

    index: int
    name: str
    driver: str
    memory_bytes: int
    used_bytes: int
    mig: bool = False
    uuid: str = ""


@dataclass
class Torch:
    """What torch says of itself, asked in a process of its own."""

    version: str = ""
    cuda: str | None = None
    nccl: str | None = None
    devices: list[tuple[str, int]] = field(default_factory=list)
    """Name and compute capability (90 for 9.0) of each GPU that torch sees."""
    archs: list[int] = field(default_factory=list)
    """Compute capabilities that it has machine code for."""
    error: str | None = None


@dataclass
class Interface:
    """One network interface."""

    name: str
    kind: str
    """loopback, virtual (docker and the like) or physical."""
    up: bool
    address: str | None
    speed_mbit: int | None = None


@dataclass
class Bench:
    """All-reduce over the ranks of this configuration. ``seconds`` by bytes; error: why there is none."""

    ranks: int = 0
    backend: str = ""
    seconds: dict[int, float] = field(default_factory=dict)
    error: str | None = None
    joined_s: float | None = None
    nccl_lines: list[str] = field(default_factory=list)
    """What NCCL logged about the network and the transport that it takes."""

    def bus_bytes_per_s(self) -> float | None:
        """Bus bandwidth of the largest message: 2 (n-1)/n x bytes / seconds (NCCL's tests, doc/PERFORMANCE.md)."""
        if not self.seconds or self.ranks < 2:
            return None
        size = max(self.seconds)
        return 2 * (self.ranks - 1) / self.ranks * size / self.seconds[size]


@dataclass
class Machine:
    """Everything that is judged."""

    system: str = ""
    python: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    device_files: int = 0
    gpus: list[Gpu] = field(default_factory=list)
    """Those that a run may use."""
    hidden_gpus: int = 0
    """Those that CUDA_VISIBLE_DEVICES leaves out."""
    driver_cuda: str | None = None
    """Newest CUDA that the driver runs."""
    smi_error: str | None = None
    topology: dict[str, str] = field(default_factory=dict)
    """"0-1" -> NV18, PIX, PXB, PHB, NODE or SYS (nvidia-smi topo -m)."""
    torch: Torch = field(default_factory=Torch)
    interfaces: list[Interface] = field(default_factory=list)
    default_route: str | None = None
    host: str = ""
    host_address: str | None = None
    host_lookup_s: float = 0.0
    variables: dict[str, str] = field(default_factory=dict)
    tools: dict[str, str | None] = field(default_factory=dict)
    libaio: bool = False
    cpus: int = 0
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    free_bytes: dict[str, int] = field(default_factory=dict)
    """Folder -> free bytes of its disk."""
    open_files: int = 0
    ports_taken: list[int] = field(default_factory=list)
    bench: Bench | None = None


def look(folders: list[Path], ports: list[int], environ: Mapping[str, str] | None = None) -> Machine:
    """Read everything but the bench; about as long as importing torch. ``folders``: whose disks are asked."""
    environ = os.environ if environ is None else environ
    all_gpus, driver_cuda, smi_error = _gpus()
    gpus = visible(all_gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    host = socket.gethostname()
    address, lookup_s = _looked_up(host)
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions={name: _version(name) for name in _PACKAGES},
        device_files=gpu_count({}),
        gpus=gpus,
        hidden_gpus=len(all_gpus) - len(gpus),
        driver_cuda=driver_cuda,
        smi_error=smi_error,
        topology=_links(gpus),
        torch=_torch(environ),
        interfaces=_interfaces(),
        default_route=_default_route(),
        host=host,
        host_address=address,
        host_lookup_s=lookup_s,
        variables=recorded_variables(environ),
        tools={name: shutil.which(name, path=tools_path(environ)) for name in ("c++", "g++", "ninja", "nvcc")},
        libaio=ctypes.util.find_library("aio") is not None,
        cpus=os.cpu_count() or 1,
        memory_bytes=available_memory_bytes(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        free_bytes={str(one): _free(one) for one in folders},
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ports_taken=[port for port in ports if _taken(port)],
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _told(*words: str) -> tuple[str, str | None]:
    """(output, None) or ("", error)."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return "", f"{words[0]} is not on PATH"
    except subprocess.TimeoutExpired:
        return "", f"{' '.join(words)} gave no answer in 60 s"
    if done.returncode != 0:
        return "", (done.stderr or done.stdout).strip() or f"{words[0]} ended with exit code {done.returncode}"
    return done.stdout, None


def _gpus() -> tuple[list[Gpu], str | None, str | None]:
    fields = "index,name,driver_version,memory.total,memory.used,mig.mode.current,uuid"
    text, error = _told("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if error is not None:
        return [], None, error
    version = re.search(r"CUDA Version:\s*([\d.]+)", _told("nvidia-smi")[0])
    return parse_gpus(text), version[1] if version else None, None


def parse_gpus(text: str) -> list[Gpu]:
    """Lines of ``nvidia-smi --query-gpu``; memory comes in MiB."""
    found = []
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(row) == 7:
            index, name, driver, total, used, mig, uuid = row
            found.append(Gpu(int(index), name, driver, _mib(total), _mib(used), mig == "Enabled", uuid))
    return found


def visible(gpus: list[Gpu], named: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES names, by index or by (the beginning of) a UUID, in its order; None: all.

    CUDA stops reading at the first that it does not know. A part of a GPU (MIG-...) belongs to one that is not told.
    """
    if named is None or "MIG-" in named:
        return gpus
    chosen: list[Gpu] = []
    for part in map(str.strip, named.split(",")):
        by_uuid = [gpu for gpu in gpus if part.startswith("GPU-") and gpu.uuid.startswith(part)]
        known = by_uuid or [gpu for gpu in gpus if str(gpu.index) == part]
        if not known:
            break
        chosen += known
    return chosen


def _links(gpus: list[Gpu]) -> dict[str, str]:
    if len(gpus) < 2:
        return {}
    seen = {str(gpu.index) for gpu in gpus}
    found = parse_topology(_told("nvidia-smi", "topo", "-m")[0])
    return {pair: link for pair, link in found.items() if set(pair.split("-")) <= seen}


def _mib(text: str) -> int:
    return int(text) * 2**20 if text.isdigit() else 0


def parse_topology(text: str) -> dict[str, str]:
    """Pairs of GPUs and their link from the table of ``nvidia-smi topo -m``, whose header may be underlined."""
    rows = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in text.splitlines()]
    rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]  # the header has no X
    found = {}
    for row in rows:
        own = int(row[0][3:])
        for other, link in enumerate(row[1 : 1 + len(rows)]):
            if own < other and re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", link):
                found[f"{own}-{other}"] = link
    return found


_PROBE = """
import json, torch
told = {"version": torch.__version__, "cuda": torch.version.cuda, "nccl": None, "devices": [], "archs": []}
if torch.version.cuda is not None:
    told["archs"] = [int(one.split("_")[1].rstrip("af")) for one in torch.cuda.get_arch_list() if one.startswith("sm_")]
    if torch.distributed.is_nccl_available():
        told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        for number in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(number)
            told["devices"].append([torch.cuda.get_device_name(number), 10 * major + minor])
        if told["devices"]:
            (torch.ones(2, device="cuda") + 1).sum().item()
    except RuntimeError as error:
        told["error"] = str(error).splitlines()[0]
print("told:" + json.dumps(told))
"""


def _torch(environ: Mapping[str, str]) -> Torch:
    words = [sys.executable, "-W", "ignore", "-c", _PROBE]
    try:
        done = subprocess.run(words, env=dict(environ), capture_output=True, text=True, check=False, timeout=180)
    except subprocess.TimeoutExpired:
        return Torch(error="importing torch and using a GPU took more than 180 s")
    found = re.search(r"^told:(.*)$", done.stdout, re.MULTILINE)
    if found is None:
        lines = done.stderr.strip().splitlines()
        return Torch(error=lines[-1] if lines else f"importing torch ended with exit code {done.returncode}")
    told: dict[str, Any] = json.loads(found[1])
    return Torch(**{**told, "devices": [(name, capability) for name, capability in told["devices"]]})


def _interfaces() -> list[Interface]:
    found = []
    for _, name in socket.if_nameindex():
        place = Path("/sys/class/net") / name
        virtual = _VIRTUAL_NAMES.match(name) is not None
        kind = _LOOPBACK if name == "lo" else _VIRTUAL if virtual else _PHYSICAL
        speed = _text(place / "speed")
        found.append(
            Interface(
                name=name,
                kind=kind,
                up=_text(place / "operstate") in ("up", "unknown", ""),
                address=_address(name),
                speed_mbit=int(speed) if speed.isdigit() and int(speed) > 0 else None,
            )
        )
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:  # the kernel answers so for a property that this kind of interface has not
        return ""


def _address(name: str) -> str | None:
    """IPv4 address of an interface; None where it has none."""
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            packed = fcntl.ioctl(one.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(packed[20:24])


def _default_route() -> str | None:
    rows = [line.split() for line in _text(Path("/proc/net/route")).splitlines()[1:]]
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def _looked_up(host: str) -> tuple[str | None, float]:
    begun = time.monotonic()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None, time.monotonic() - begun
    return address, time.monotonic() - begun


def _free(folder: Path) -> int:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def _taken(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return True
    return False
