"""What the plan is held against: memory by phase and step time of many configurations, each through the product.

    python experiments/bench/plan.py --work FOLDER --out FILE [--only REGEX] [--ranks 2] [--small]

One JSON line a configuration (and rank), with its whole composed configuration, the shapes of its micro batches, the
allocator at the edges of each phase of the first, second and last step, and the median of the steps after the warm-up.
Some go on with micro batches that grow until memory is out.

Configurations are forked from one process that has imported everything. Several warm up beside each other as far as
memory allows; while one is measured, the others stand still (SIGSTOP), so its times are its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plan_probe
from machine import setting
from plan_cases import LEARNED, SETS, TWO_GPUS, Case

ROOT = Path(__file__).resolve().parents[2]
LANES, ROOM_GIB = 4, 132
CASE_S = 150.0
"""Limit of one configuration."""
FIXED_ROWS, MIXED_ROWS = 64, 512


@dataclass
class Child:
    """A rank of a case that is under way."""

    case: Case
    pid: int
    ready: int
    """Read end: the child has warmed up."""
    go: int
    """Write end: its turn has come."""
    result: Path
    began: float
    beside: list[str]
    waits: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for data, runs and logs")
    parser.add_argument("--out", type=Path, required=True, help="result lines are appended")
    parser.add_argument("--only", default="", help="names that match this regular expression")
    parser.add_argument("--cases", choices=list(SETS), default="plan", help="which of them, on one GPU")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--small", action="store_true", help="two narrow layers: a rehearsal on a CPU")
    parser.add_argument("--limit-s", type=float, default=330, help="no configuration begins after that")
    parser.add_argument("--data-only", action="store_true", help="write the rows and end: needs no GPU")
    asked = parser.parse_args()
    known = SETS[asked.cases] if asked.ranks == 1 else TWO_GPUS
    cases = [case for case in known if re.search(asked.only, case.name)]
    cases = [case.as_small() for case in cases] if asked.small else cases
    work = asked.work.resolve()
    for folder in ("runs", "logs", "results"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    sys.path.insert(0, str(ROOT))
    _prepare(cases, work)
    if asked.data_only:
        return
    _preload()
    print(f"ready after {time.monotonic() - started:.1f} s", flush=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(work, asked.out, started + asked.limit_s, asked.ranks)
    bench.run(cases)
    print(f"{bench.done} of {len(cases)} in {time.monotonic() - started:.0f} s", flush=True)


def _prepare(cases: list[Case], work: Path) -> None:
    """Rows of exactly the asked-for length, or of the lengths of instruction data; half of a row is its answer."""
    import instruction_data

    for case in cases:
        file = _data(case, work)
        if file.exists():
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        if case.packed:
            instruction_data.write(case.model, file.parent, 64 if case.small else MIXED_ROWS)
            continue
        before, behind = instruction_data.frame(instruction_data.template_of(case.model))
        question = max(1, round(case.length * (1 - LEARNED)) - before)
        answer = case.length - before - question - behind
        rows = [
            {"instruction": "7" * question, "input": "", "output": str(row % 10) * answer} for row in range(FIXED_ROWS)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")


def _data(case: Case, work: Path) -> Path:
    kind = "mixed" if case.packed else str(case.length)
    return work / "data" / f"{case.model}-{kind}" / "rows.jsonl"


def _preload() -> None:
    """Import what every rank needs, without touching the GPU: a forked process could not use it then."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from glmexp.launcher.ranks import gpu_count

    os.environ.setdefault("DS_ACCELERATOR", "cuda" if gpu_count() else "cpu")
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401
    from torch.optim import AdamW  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

    import glmexp.entry.train  # noqa: F401


def _fork_works() -> bool:
    """Whether a forked process can use the GPU."""
    import torch

    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            if torch.cuda.is_available():
                torch.zeros(1, device="cuda")
        except BaseException:  # noqa: BLE001 - the answer
            code = 1
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


class Bench:
    """Starts, stops and ends the cases."""

    def __init__(self, work: Path, out: Path, deadline: float, ranks: int) -> None:
        self.work, self.out, self.deadline, self.ranks, self.done = work, out, deadline, ranks, 0
        self.forks = _fork_works()
        if not self.forks:
            print("a forked process cannot use the GPU here: each case is a new process", flush=True)
        self.setting = setting(ROOT)
        self.alive: list[Child] = []
        self.again: set[str] = set()

    def run(self, cases: list[Case]) -> None:
        waiting = deque(cases)
        while waiting or self.alive:
            self._begin(waiting)
            if not self.alive:
                break
            self._wait()
            if self.ranks == 1:
                self._turns()
            for child in [child for child in self.alive if child.result.exists() or self._gone(child)]:
                self._finish(child, waiting)

    # -- starting

    def _begin(self, waiting: deque[Case]) -> None:
        if time.monotonic() > self.deadline:
            for case in waiting:
                print(f"not begun: {case.name}", flush=True)
            waiting.clear()
        while waiting and self._has_room(waiting[0]):
            case = waiting.popleft()
            if self.ranks == 1:
                self._start(case, 0, None)
            else:
                port = _free_port()
                for rank in range(self.ranks):
                    self._start(case, rank, port)

    def _has_room(self, case: Case) -> bool:
        if not self.alive:
            return True
        exclusive = case.alone or self.ranks > 1 or any(child.case.alone for child in self.alive)
        used = sum(child.case.gib for child in self.alive)
        return not exclusive and len(self.alive) < LANES and used + case.gib <= ROOM_GIB

    def _start(self, case: Case, rank: int, port: int | None) -> None:
        name = case.name if port is None else f"{case.name}-rank{rank}"
        result = self.work / "results" / f"{name}.json"
        result.unlink(missing_ok=True)
        run = self.work / "runs" / case.name
        words = [*case.words(str(_data(case, self.work)), str(run), self.ranks), "run.overwrite=true",
                 f"data.cache_dir={self.work / 'prepared'}"]  # fmt: skip
        ready, ready_end = os.pipe()
        go_end, go = os.pipe()
        env = {} if port is None else {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        beside = [child.case.name for child in self.alive]
        log = self.work / "logs" / f"{name}.log"
        start = self._fork if self.forks else self._spawn
        pid = start(case, words, result, log, ready_end, go_end, env)
        os.close(ready_end)
        os.close(go_end)
        for child in self.alive:
            child.beside.append(case.name)
        self.alive.append(Child(case, pid, ready, go, result, time.monotonic(), beside))

    def _fork(self, case: Case, words: list[str], result: Path, log: Path, ready: int, go: int, env: dict) -> int:
        pid = os.fork()
        if pid == 0:
            _become(case, words, result, log, ready, go, env)
        return pid

    def _spawn(self, case: Case, words: list[str], result: Path, log: Path, ready: int, go: int, env: dict) -> int:
        job = json.dumps({"case": case.name, "small": case.small, "two": self.ranks > 1, "words": words,
                          "result": str(result), "log": str(log), "ready": ready, "go": go, "env": env})  # fmt: skip
        command = [sys.executable, __file__, "--child", job]
        return subprocess.Popen(command, pass_fds=(ready, go)).pid

    # -- turns

    def _wait(self) -> None:
        select.select([child.ready for child in self.alive if not child.waits], [], [], 0.2)
        for child in self.alive:
            if not child.waits and select.select([child.ready], [], [], 0)[0] and os.read(child.ready, 1):
                child.waits = True
            if time.monotonic() - child.began > CASE_S and (self.ranks > 1 or not child.waits):
                os.kill(child.pid, signal.SIGKILL)

    def _turns(self) -> None:
        """Those who have warmed up are measured one after another, while all others stand still."""
        for child in [child for child in self.alive if child.waits]:
            others = [other for other in self.alive if other is not child]
            for other in others:
                os.kill(other.pid, signal.SIGSTOP)
            time.sleep(0.15)
            os.write(child.go, b"g")
            until = time.monotonic() + CASE_S
            while not child.result.exists() and not self._gone(child):
                if time.monotonic() > until:
                    os.kill(child.pid, signal.SIGKILL)
                time.sleep(0.02)
            stood = time.monotonic()
            for other in others:
                other.began += stood - (until - CASE_S)
                os.kill(other.pid, signal.SIGCONT)

    def _gone(self, child: Child) -> bool:
        """Whether the process has ended; not reaped here."""
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _finish(self, child: Child, waiting: deque[Case]) -> None:
        os.waitpid(child.pid, 0)
        os.close(child.ready)
        os.close(child.go)
        self.alive.remove(child)
        case = child.case
        if child.result.exists():
            found = json.loads(child.result.read_text(encoding="utf-8"))
        else:
            found = {"case": case.name, "outcome": "ended without a word", "wall_s": time.monotonic() - child.began}
        if found["outcome"] == "out of memory" and child.beside and case.name not in self.again:
            self.again.add(case.name)
            waiting.append(case)
            print(f"{case.name}: out of memory beside {child.beside}, once more later", flush=True)
            return
        if found["outcome"] not in ("ran", "out of memory"):
            log = next((self.work / "logs").glob(f"{child.result.stem}.log"), None)
            found["log"] = log.read_text(errors="replace")[-3000:] if log is not None else ""
        found |= {"ranks": self.ranks, "beside": child.beside, **self.setting}
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        self.done += found["outcome"] == "ran"
        step = found.get("step_s")
        print(
            f"{case.name}: {found['outcome']}, peak {found.get('peak', 0) / 2**30:.2f} GiB, "
            f"step {step if step is None else round(step, 3)} s, wall {found.get('wall_s', 0):.1f} s",
            flush=True,
        )
        if found.get("error"):
            print(found["error"], flush=True)
        elif found["outcome"] == "failed":
            print(found["log"][-1500:], flush=True)


def _become(case: Case, words: list[str], result: Path, log: Path, ready: int, go: int, env: dict[str, str]) -> None:
    """This process is a case from here on."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)

    def turn() -> None:
        os.write(ready, b"r")
        if not env:
            os.read(go, 1)

    plan_probe.run(case, words, result, turn)


def _child(job: dict[str, Any]) -> None:
    """The same in a process of its own."""
    sys.path.insert(0, str(ROOT))
    known = TWO_GPUS if job["two"] else [case for cases in SETS.values() for case in cases]
    case = next(case for case in known if case.name == job["case"])
    case = case.as_small() if job["small"] else case
    _become(case, job["words"], Path(job["result"]), Path(job["log"]), job["ready"], job["go"], job["env"])


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(json.loads(sys.argv[2]))
    else:
        main()
