"""Doctor: what an option means here, or whether this machine can run this configuration.

The parent only reads; the all-reduce is measured by ranks that are started like those of any run (``run``).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from glmexp.config import load
from glmexp.config.errors import EXIT_FAILURE, Problem, UserError
from glmexp.config.explain import explain
from glmexp.config.schema import RunConfig
from glmexp.launcher import diagnosis, failures, folder, handover, local, machine, needs, positions, rendezvous
from glmexp.launcher.diagnosis import Finding

if TYPE_CHECKING:
    import torch

RunRank = Callable[[Path, bool], int]
_BENCH = "bench.json"
_GPU_BYTES, _CPU_BYTES = (8, 2**20, 2**24, 2**28), (8, 2**20, 2**24)
_TIMES = 10
_LEVELS = {"ok": "ok", "note": "note", "broken": "BROKEN"}


def tell(config: RunConfig, origins: Mapping[str, str], run_rank: RunRank) -> int:
    """Print what was asked for; the exit code: 1 where something will break a run.

    origins: dotted key to the file or override behind its value. run_rank: this process as a rank, under an outside
    launcher.
    """
    if config.doctor.explain is not None:
        print(explain(config.doctor.explain, config, origins))
        return 0
    ports = [29500, *([config.launcher.master_port] if config.launcher.master_port is not None else [])]
    seen = machine.look(_folders(config), ports)
    if config.doctor.timeout_s is not None and not [*needs.crowded(config, needs.Host.here())]:
        seen.bench = _bench(config, seen, run_rank)
    findings = [*diagnosis.examine(seen, config, _lacking(config)), *_login(config, seen)]
    broken = [one for one in findings if one.level == "broken"]
    code = EXIT_FAILURE if broken else 0
    if config.doctor.json:
        told = {"exit_code": code, "findings": [dataclasses.asdict(one) for one in findings]}
        print(json.dumps({**told, "machine": dataclasses.asdict(seen)}, indent=2, ensure_ascii=False))
        return code
    print("\n".join(table(findings)))
    return code


def table(findings: list[Finding]) -> list[str]:
    """One block of lines a finding, and a last line with the count."""
    wide = max(60, shutil.get_terminal_size((120, 40)).columns) - 22
    lines = []
    for one in findings:
        lead = f"{_LEVELS[one.level]:<8}{one.topic:<13}"
        for number, part in enumerate(textwrap.wrap(one.found, wide, break_on_hyphens=False) or [""]):
            lines.append(f"{lead if number == 0 else ' ' * 21}{part}")
        for number, part in enumerate(textwrap.wrap(one.do, wide - 3, break_on_hyphens=False)):
            lines.append(f"{' ' * 21}{'-> ' if number == 0 else '   '}{part}")
    broken = sum(one.level == "broken" for one in findings)
    end = f"{broken} {'findings' if broken > 1 else 'finding'} that will break a run" if broken else "nothing broken"
    return [*lines, end]


def _folders(config: RunConfig) -> list[Path]:
    """Where a run writes."""
    own = Path(config.run.dir) if config.run.dir is not None else Path("outputs").absolute()
    more = [config.data.cache_dir, config.offload.nvme_path]
    return [own, Path(tempfile.gettempdir()), *(Path(one) for one in more if one is not None)]


def _lacking(config: RunConfig) -> list[Problem]:
    """What training with this configuration needs and is not here."""
    host = needs.Host.here()
    decided, _ = needs.with_adam(config, host)
    return [*needs.crowded(decided, host), *needs.missing(decided, host)]


def _login(config: RunConfig, seen: machine.Machine) -> Iterator[Finding]:
    if config.tracker.name != "wandb" or seen.versions.get("wandb") is None:
        return
    mode, lines = config.tracker.build().mode()
    yield Finding("note" if lines else "ok", "tracker", "; ".join(lines) or f"wandb: runs are {mode}")


def _bench(config: RunConfig, seen: machine.Machine, run_rank: RunRank) -> machine.Bench:
    """Let the ranks of this configuration talk to each other, within the time limit."""
    launcher, timeout_s = config.launcher, config.doctor.timeout_s
    assert timeout_s is not None
    outside = launcher.name == "env"
    count = int(os.environ["WORLD_SIZE"]) if outside else (launcher.nproc or 1) * launcher.nnodes
    empty = machine.Bench(count, "nccl" if seen.device_files else "gloo")
    if (count == 1 and not outside) or launcher.name in ("inprocess", "slurm"):
        return dataclasses.replace(empty, ranks=1)
    place = Path(tempfile.mkdtemp(prefix="glmexp-doctor-"))
    try:
        own = dataclasses.replace(launcher, timeout_s=timeout_s)
        load.write(dataclasses.replace(config, launcher=own), place / folder.CONFIG)
        folder.write_status(place, "starting")
        logs = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(place / "nccl.%h.%p")}
        if outside:
            os.environ.update({name: value for name, value in logs.items() if name not in os.environ})
            handover.give(place, timeout_s)
            run_rank(place, True)
        else:
            following = bool(launcher.node_rank)
            ranks = local.Ranks(
                dataclasses.replace(config, launcher=own),
                None if following else place,
                {name: value for name, value in logs.items() if name not in os.environ},
            )
            local.stay(ranks, limit_s=2 * timeout_s + 60)
            if following:
                return dataclasses.replace(empty, ranks=1)  # node 0 tells
        return _measured(place, empty)
    except UserError as error:  # a taken port, which has a finding of its own
        return dataclasses.replace(empty, error=str(error.problems[0].message))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _measured(place: Path, empty: machine.Bench) -> machine.Bench:
    lines: dict[str, None] = {}
    for file in sorted(place.glob("nccl.*")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            found = re.search(r"NCCL INFO (Bootstrap.*|NET/.*: Using.*|Using network.*)", line)
            via = re.search(r"\bvia (\S+)", line)
            if found is not None:
                lines[found[1].strip()] = None
            elif via is not None:
                lines[f"channels via {via[1]}"] = None
    if (place / _BENCH).exists():
        told = json.loads((place / _BENCH).read_text(encoding="utf-8"))
        told["seconds"] = {int(size): value for size, value in told["seconds"].items()}
        return machine.Bench(**{**told, "nccl_lines": list(lines)[:6]})
    recorded = failures.recorded(place)
    reason = failures.first_cause(recorded).message if recorded else folder.read_status(place).get("reason", "no word")
    where = " ".join(line.strip() for line in positions.table(place, empty.ranks))
    return dataclasses.replace(empty, error=f"{reason} {where}".strip(), nccl_lines=list(lines)[:6])


def run(config: RunConfig, run_folder: Path) -> int:
    """One rank: all-reduce messages of several sizes, checked and timed. Rank 0 writes what it measured."""
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    begun = time.monotonic()
    positions.at("rendezvous")
    store = rendezvous.store(config.launcher.timeout_s)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    positions.at(f"joining the process group over {backend}")
    limit = timedelta(seconds=config.launcher.timeout_s)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device if on_gpu else None
    )
    bench = machine.Bench(world_size, backend)
    for size in _GPU_BYTES if on_gpu else _CPU_BYTES:
        positions.at(f"all-reduce of {size} bytes")
        bench.seconds[size] = _all_reduce_s(size, device, world_size)
        bench.joined_s = bench.joined_s or time.monotonic() - begun
    if rank == 0:
        folder.write_json(run_folder / _BENCH, dataclasses.asdict(bench))
    dist.destroy_process_group()
    return 0


def _all_reduce_s(size: int, device: torch.device, world_size: int) -> float:
    """Seconds of one all-reduce of ``size`` bytes. Raises RuntimeError where the sum is wrong."""
    import torch
    import torch.distributed as dist

    tensor = torch.ones(size // 4, dtype=torch.float32, device=device)
    dist.all_reduce(tensor)
    if not bool((tensor == world_size).all()):
        raise RuntimeError(f"an all-reduce of {size} bytes over {world_size} ranks gave a wrong sum")
    for _ in range(2):
        dist.all_reduce(tensor.zero_())
    if tensor.is_cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(_TIMES):
        dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / _TIMES
