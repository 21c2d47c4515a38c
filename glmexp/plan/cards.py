"""Cards: memory and speed, by name or as a plain amount of memory; this machine's through nvidia-smi."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from glmexp.config.errors import ConfigError, Problem

MIB, GIB, GB = 2**20, 2**30, 10**9
LISTED = {
    "H200": (989.4e12, 66.9e12),
    "H20": (148e12, 44e12),
    "H100 NVL": (835.5e12, 60e12),
    "H100 PCIe": (756e12, 51.2e12),
    "H100": (989.4e12, 66.9e12),
    "H800": (989.4e12, 66.9e12),
    "B200": (2250e12, 75e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "A40": (149.7e12, 37.4e12),
    "A30": (165e12, 10.3e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "RTX A6000": (154.8e12, 38.7e12),
    "RTX 4090": (165.2e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
}
"""Operations a second as NVIDIA's data sheets list them, dense: 16 bit on tensor cores with float32 sums, and float32
(not TF32, which torch does not use unless told). A part of the name that torch gives the device -> both."""
MEMORY_MIB = {
    "H200": 143771,
    "H20": 97871,
    "H100 NVL": 95830,
    "H100 PCIe": 81559,
    "H100": 81559,
    "H800": 81559,
    "B200": 183359,
    "A100": 81920,
    "A800": 81920,
    "A40": 46068,
    "A30": 24576,
    "L40S": 46068,
    "L4": 23034,
    "RTX A6000": 49140,
    "RTX 4090": 24564,
    "RTX 3090": 24576,
}
"""MiB as nvidia-smi tells them. The A100 with 40 GB is ``plan.gpu=A100-40GB``."""
BANDWIDTH = {
    "H200": 4.8e12,
    "H20": 4.0e12,
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "H800": 3.35e12,
    "B200": 8.0e12,
    "A100": 2.04e12,
    "A800": 2.04e12,
    "A40": 0.696e12,
    "A30": 0.933e12,
    "L40S": 0.864e12,
    "L4": 0.3e12,
    "RTX A6000": 0.768e12,
    "RTX 4090": 1.008e12,
    "RTX 3090": 0.936e12,
}
"""Bytes a second of the card's own memory, from the same data sheets."""
LINK = {"H200": 295e9, "H100": 295e9, "H100 NVL": 180e9, "B200": 590e9, "A100": 195e9, "H800": 130e9, "A800": 130e9}
"""Bytes a second of an all-reduce between the cards of one host (bus bandwidth). H200: measured by entry=doctor; the
others in proportion to NVLink's listed rate. Cards that are not named here go over PCIe."""
FP8_CAPABILITY = (8, 9)
"""Compute capability from which a GPU has products in fp8: Ada, Hopper and later."""
BEFORE_FP8 = ("A100", "A800", "A40", "A30", "RTX A6000", "RTX 3090")
"""Cards above that are older."""
PCIE_LINK = 18e9
DRIVER_BYTES = 2320 * MIB
"""What torch's allocator does not get of what nvidia-smi tells: 615 MiB that the driver keeps, and 1.67 GiB of CUDA's
context, NCCL and kernels (measured on an H200)."""
SMALLER = 0.8
"""Of the listed memory: a card whose name says less has that instead."""
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB|G|MiB|MB)", re.IGNORECASE)
_UNITS = {"gb": GB, "g": GB, "gib": GIB, "mib": MIB, "mb": 10**6}


@dataclass(frozen=True)
class Card:
    """One GPU."""

    name: str
    memory_bytes: int
    flops: float | None
    """16-bit operations a second by the data sheet; None: unknown, and so is the time of a step."""
    bandwidth: float | None
    """Bytes a second of its memory."""
    link: float
    """Bytes a second between cards of one host."""
    count: int | None = None
    """Cards of this kind in this machine; None: this is another machine's."""

    @property
    def usable_bytes(self) -> int:
        """What torch's allocator can have."""
        return self.memory_bytes - DRIVER_BYTES


def known_name(name: str) -> str | None:
    """The longest known part of a device's name; None for one that no table here has."""
    words = f" {name.replace('-', ' ').lower()} "
    known = [part for part in LISTED if f" {part.lower()} " in words]
    return max(known, key=len) if known and "laptop" not in words else None


def _typed_name(text: str) -> str | None:
    """A known name as people type it: spaces, hyphens and case do not count (RTX4090, h100-pcie)."""
    joined = {_joined(name): name for name in LISTED}
    return joined.get(_joined(text)) or known_name(text)


def _joined(name: str) -> str:
    return re.sub(r"[\s-]", "", name).lower()


def amount(text: str, key: str) -> int:
    """Bytes of an amount such as 24GB. Raises ConfigError with the option's key."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise ConfigError(Problem(key, f"{text!r} is no amount of memory", f"such as {key}=256GB or {key}='512 GiB'"))
    return round(float(found[1]) * _UNITS[found[2].lower()])


def card(text: str) -> Card:
    """A card from ``plan.gpu``. Raises ConfigError."""
    if _AMOUNT.fullmatch(text.strip()) is not None:
        return Card(text.strip(), amount(text, "plan.gpu"), None, None, PCIE_LINK)
    found = _typed_name(text)
    if found is None:
        raise ConfigError(
            Problem(
                "plan.gpu",
                f"{text!r} is neither an amount of memory nor a card that is known here",
                f"24GB ('24 GB' with quotes), or one of {', '.join(LISTED)}",
            )
        )
    listed, said = MEMORY_MIB[found] * MIB, _AMOUNT.search(text)
    own = listed if said is None else amount(said[0], "plan.gpu")
    # "80GB" in a name is a round number for what is listed; far less is the smaller card of that name (A100 40GB).
    return _named(found, text, own if own < SMALLER * listed else listed, None)


def _named(key: str, name: str, memory: int, count: int | None) -> Card:
    return Card(name, memory, LISTED[key][0], BANDWIDTH[key], LINK.get(key, PCIE_LINK), count)


def check_fp8(one: Card) -> None:
    """Raise ConfigError for a card that is known to have no products in fp8."""
    if _typed_name(one.name) in BEFORE_FP8:
        raise no_fp8(one.name, "less")


def no_fp8(name: str, capability: str) -> ConfigError:
    """``precision.base=fp8`` on a card of that compute capability."""
    needed = ".".join(map(str, FP8_CAPABILITY))
    return ConfigError(
        Problem(
            "precision.base",
            f"fp8 needs a GPU of compute capability {needed} or higher (Ada, Hopper), and {name} has {capability}",
            "precision.base=null",
        )
    )


def here() -> Card | None:
    """This machine's first GPU, asked of nvidia-smi; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    rows = [row for row in found.stdout.splitlines() if "," in row] if found.returncode == 0 else []
    if not rows:
        return None
    name, memory = (word.strip() for word in rows[0].rsplit(",", 1))
    return of_device(name, int(memory) * MIB, len(rows))


def of_device(name: str, memory_bytes: int, count: int | None = None) -> Card:
    """A card that is there, by the name that the driver gives it."""
    key = known_name(name)
    return (
        Card(name, memory_bytes, None, None, PCIE_LINK, count)
        if key is None
        else _named(key, name, memory_bytes, count)
    )
