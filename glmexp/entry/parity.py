"""Parity: does this configuration give the same loss and gradients however it is spread out?

Every cell of gradient accumulation x micro batch x world size x ZeRO stage x offload x gradient checkpointing x packing
learns from the same examples as one process without DeepSpeed does with all of them at once. What is compared are the
losses of two steps, so that the optimizer's step is in it, and the gradients of the first.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import yaml

from glmexp.config import nearest, rules
from glmexp.config.ds_config import lower
from glmexp.config.errors import ConfigError, VerdictError
from glmexp.config.load import Source, examine_section, read, write
from glmexp.config.schema import OffloadSection, RunConfig, ZeroSection
from glmexp.data.loader import Batches
from glmexp.data.prepare import prepare
from glmexp.data.store import Examples
from glmexp.engine import build, distributed
from glmexp.engine.plain import Trace, engine_trace, plain
from glmexp.entry import training
from glmexp.entry.proof import fresh_environment
from glmexp.launcher.folder import write_json, write_status
from glmexp.launcher.ranks import gpu_count
from glmexp.model.build import load_tokenizer
from glmexp.model.renderer import Renderer, renderer

FOLDER = "parity"
STEPS = 2
SAME_ORDER = 1e-6
"""One process with the whole batch at once adds up in the order of the reference."""
FP32 = 1e-5
"""Loss absolute and gradients ||a - b|| / ||b||: another order of summation."""
SLACK = 1.2
"""16 bit: the error against float32 may be this much larger than that of a plain loop in the same format."""
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Relative: a loss is one number, whose error in another order of summation may have any sign and size below it."""


@dataclass(frozen=True)
class Cell:
    """One way to spread the same examples out."""

    ranks: int
    grad_accum: int
    micro_batch: int
    stage: int
    offload: str
    checkpointing: bool
    packing: bool

    def __str__(self) -> str:
        words = [
            f"{self.ranks} x {self.grad_accum} x {self.micro_batch}",
            f"stage{self.stage}",
            f"offload={self.offload}",
        ]
        words += ["checkpointing"] * self.checkpointing + ["packing"] * self.packing
        return " ".join(words)

    @property
    def same_order(self) -> bool:
        """Sums are added up as in the reference."""
        return self.ranks == self.grad_accum == 1 and not self.packing


@dataclass(frozen=True)
class Row:
    """What a cell gave. Differences are relative to the reference."""

    cell: Cell
    loss: float | None
    gradient: float | None
    loss_allowed: float | None
    gradient_allowed: float | None
    note: str
    """The parameter that differs most; why the cell was refused."""

    @property
    def differs(self) -> bool:
        """Beyond what is allowed; refused cells do not."""
        if self.loss is None or self.gradient is None:
            return False
        assert self.loss_allowed is not None, "it has run"
        assert self.gradient_allowed is not None, "it has run"
        return not (self.loss <= self.loss_allowed and self.gradient <= self.gradient_allowed)  # nan differs too


@dataclass(frozen=True)
class Table:
    """All cells."""

    rows: list[Row]

    @property
    def passed(self) -> bool:
        """No cell differs, and there is one that ran."""
        return not any(row.differs for row in self.rows) and any(row.loss is not None for row in self.rows)

    def lines(self) -> list[str]:
        """For the terminal: how many, the worst, those that differ and what they have in common, those refused."""
        ran = [row for row in self.rows if row.loss is not None]
        differing = [row for row in ran if row.differs]
        refused = [row for row in self.rows if row.loss is None]
        found = [f"parity: {len(ran) - len(differing)} of {len(ran)} cells equal one process, {len(refused)} refused"]
        if ran:
            worst = max(ran, key=lambda row: row.gradient or 0.0)
            found.append(f"  largest difference of gradients: {_told(worst)}")
            worst = max(ran, key=lambda row: row.loss or 0.0)
            found.append(f"  largest difference of losses: {_told(worst)}")
        found += [f"  differs: {_told(row)}; most in {row.note}" for row in differing]
        found += [f"  {line}" for line in shared(differing, [row for row in ran if not row.differs])]
        reasons: dict[str, int] = {}
        for row in refused:
            reasons[row.note] = reasons.get(row.note, 0) + 1
        return found + [f"  {count} refused: {reason}" for reason, count in reasons.items()]


def _told(row: Row) -> str:
    if row.loss is None:
        return f"{row.cell}: {row.note}"
    return (
        f"{row.cell}: loss {row.loss:.2g} (allowed {row.loss_allowed:.2g}), "
        f"gradients {row.gradient:.2g} (allowed {row.gradient_allowed:.2g})"
    )


def shared(differing: list[Row], equal: list[Row]) -> list[str]:
    """What all cells that differ have in common; whether cells that are equal have it too."""
    lines = []
    for axis in (field.name for field in fields(Cell)) if differing else ():
        values = {getattr(row.cell, axis) for row in differing}
        if len(values) == 1:
            (value,) = values
            others = sum(getattr(row.cell, axis) == value for row in equal)
            if not others:
                lines.append(f"why: exactly the cells with {axis}={value} differ")
            elif others < len(equal):
                lines.append(f"all that differ have {axis}={value}, as {others} have that are equal")
    return lines


def cells(config: RunConfig, ranks: list[int]) -> list[Cell]:
    """The grid, or ``parity.cells`` of it spread over all."""
    found = []
    for count in ranks:
        sizes = [size for size in range(1, config.parity.rows + 1) if config.parity.rows % (size * count) == 0]
        for micro, stage, checkpointing, packing in product(sizes, range(4), (False, True), (False, True)):
            offloads = ["none", *(["optimizer"] if stage else []), *(["all"] if stage == 3 else [])]
            accum = config.parity.rows // (micro * count)
            found += [Cell(count, accum, micro, stage, one, checkpointing, packing) for one in offloads]
    most = config.parity.cells
    if most is None or most >= len(found):
        return found
    return [found[place] for place in sorted(random.Random(0).sample(range(len(found)), most))]


def run(config: RunConfig, run_folder: Path) -> Table:
    """All cells, in processes of their own; ``parity/table.txt``, ``table.json``. For a process in no group."""
    folder = run_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write(config, folder / "config.yaml")
    gpus = gpu_count()
    ranks = config.parity.ranks or ([1] if gpus == 1 else [1, 2])
    wanted = cells(config, ranks)
    results: dict[Cell, Row] = {}
    for count in sorted({1, *ranks}):  # one process makes the reference
        results |= _group(folder, [cell for cell in wanted if cell.ranks == count], count)
    table = Table([results[cell] for cell in wanted])
    write_json(folder / "table.json", [{**asdict(row), "differs": row.differs} for row in table.rows])
    words = {True: "differs", False: "equal  "}
    text = [f"{'refused' if row.loss is None else words[row.differs]}  {_told(row)}\n" for row in table.rows]
    (folder / "table.txt").write_text("".join(text), encoding="utf-8")
    return table


def judge(config: RunConfig, run_folder: Path) -> int:
    """entry=smoke smoke.parity=true, one rank of it: rank 0 starts the cells. Raises VerdictError where one differs."""
    if os.environ["RANK"] != "0":
        return 0
    begun = time.monotonic()
    write_status(run_folder, "running")
    table = run(config, run_folder)
    print("\n".join(table.lines()), flush=True)
    print(f"all cells in {time.monotonic() - begun:.0f} s: {run_folder / FOLDER}/table.txt, table.json", flush=True)
    if not table.passed:
        raise VerdictError("cells of the parity table differ from one process, or none ran: see above")
    write_status(run_folder, "finished")
    return 0


def _group(folder: Path, mine: list[Cell], ranks: int) -> dict[Cell, Row]:
    """The cells of one world size."""
    write_json(folder / f"cells-{ranks}.json", [asdict(cell) for cell in mine])
    (folder / f"store-{ranks}").unlink(missing_ok=True)
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        environment = {"OMP_NUM_THREADS": "1", **fresh_environment(), **place}
        words = [sys.executable, "-m", "glmexp.entry.parity", str(folder)]
        log = (folder / f"log-{ranks}-{rank}.txt").open("w", encoding="utf-8")
        processes.append(subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT))
        log.close()
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        rank = next(number for number, code in enumerate(codes) if code)
        tail = (folder / f"log-{ranks}-{rank}.txt").read_text(encoding="utf-8").strip()[-2000:]
        raise RuntimeError(f"parity: rank {rank} of {ranks} ended with exit code {codes[rank]}:\n{tail}")
    found = json.loads((folder / f"rows-{ranks}.json").read_text(encoding="utf-8"))
    rows = [Row(**{**row, "cell": Cell(**row["cell"])}) for row in found]
    return {row.cell: row for row in rows}


def spread(config: RunConfig, cell: Cell, examples: Examples) -> RunConfig:
    """The user's configuration as ``cell`` has it. Dropout is off: it draws other numbers in every cell."""
    zero = config.zero if config.zero.stage == cell.stage else _shipped("zero", f"stage{cell.stage}", ZeroSection)
    offload = _shipped("offload", cell.offload, OffloadSection)
    adam = "torch" if config.offload.adam is None or cell.stage == 3 else config.offload.adam
    method = replace(config.method, dropout=0.0) if hasattr(config.method, "dropout") else config.method
    # About half as many packed rows as examples: several in most of them, and more than one row.
    budget = max(int(examples.lengths.max()), 2 * int(examples.lengths.sum()) // len(examples))
    data = replace(config.data, packing=cell.packing, shuffle=False, group_by_length=False)
    train = replace(
        config.train,
        micro_batch_size=cell.micro_batch,
        grad_accum=cell.grad_accum,
        batch_size=cell.ranks * cell.grad_accum * cell.micro_batch,
        gradient_checkpointing=cell.checkpointing,
        max_steps=STEPS,
        save_steps=None,
        keep_best=None,
        stop_after=None,
        resume=None,
    )
    model = config.model if cell.packing else replace(config.model, attention=None)
    return replace(
        config,
        entry=replace(config.entry, name="train"),
        launcher=replace(config.launcher, name="local", nproc=cell.ranks),
        run=replace(config.run, dir=None, overwrite=False),
        model=model,
        zero=zero,
        offload=replace(offload, adam=None if offload.optimizer is None else adam),
        method=method,
        data=replace(data, max_length=budget) if cell.packing else data,
        train=train,
    )


def _shipped(group: str, option: str, section: type) -> Any:
    tree = yaml.safe_load((nearest.conf_folder() / group / f"{option}.yaml").read_text(encoding="utf-8"))
    found, problems = examine_section(group, section, tree, Source())
    assert not problems, problems
    return found


@dataclass(frozen=True)
class _Bench:
    """What every cell of a group shares."""

    config: RunConfig
    template: Renderer
    examples: Examples
    folder: Path

    def micro_batches(self, config: RunConfig) -> list[dict[str, Any]]:
        batches = Batches.of(self.examples, config.data, config.train.seed, self.template.pad_id)
        return batches.step(training.plan(config, batches), 0)

    def plain(self, dtype: str, micro: int, packing: bool) -> Trace:
        """One process; ``dtype`` of weights and gradients, from the same rounded weights."""
        cell = Cell(1, self.config.parity.rows // micro, micro, 0, "none", False, packing)
        config = spread(self.config, cell, self.examples)
        transformers.set_seed(config.train.seed)
        model = training.network(config, lower(config, 1))
        inputs = training.inputs(config, self.template)
        return plain(model, config, self.micro_batches(config), inputs, build.DTYPES[dtype], STEPS)

    def through_deepspeed(self, config: RunConfig) -> Trace:
        transformers.set_seed(config.train.seed)
        ds_config = lower(config, distributed.world_size())
        engine = build.initialize(training.network(config, ds_config), config, ds_config, STEPS)
        inputs = training.inputs(config, self.template)
        trace = engine_trace(engine, config, self.micro_batches(config), inputs, STEPS)
        engine.destroy()
        return trace


def measure(config: RunConfig, folder: Path, wanted: list[Cell]) -> list[Row]:
    """Each cell on these ranks, in turn, against the reference, which a single rank makes. Collective."""
    template = renderer(config.model.family, load_tokenizer(config.model))
    examples = prepare(config.data, config.train.seed, template).train[: config.parity.rows]
    bench = _Bench(config, template, examples, folder)
    file = folder / "reference.pt"
    if distributed.world_size() == 1:
        torch.save(_references(bench), file)
    references: dict[Any, Any] = torch.load(file, weights_only=True)
    rows = []
    for cell in wanted:
        cell_config = spread(config, cell, examples)
        refused = [str(one) for one in rules.check(cell_config, cell.ranks, gpu_count())]
        try:
            trace = None if refused else bench.through_deepspeed(cell_config)
        except ConfigError as error:
            refused, trace = [str(one) for one in error.problems], None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows.append(_row(cell, trace, references, config.precision.dtype, refused))
        print(rows[-1], flush=True)
    return rows


def _references(bench: _Bench) -> dict[Any, Any]:
    """The reference; in 16 bit also the errors of a plain loop, for each micro batch size and packing."""
    dtype, count = bench.config.precision.dtype, bench.config.parity.rows
    exact = bench.plain("fp32", count, packing=False)
    found: dict[Any, Any] = {"losses": exact.losses, "gradients": exact.gradients, "errors": {}}
    if dtype != "fp32":
        for micro, packing in product([one for one in range(1, count + 1) if count % one == 0], (False, True)):
            loss, gradient, _ = _differences(bench.plain(dtype, micro, packing), found, steps=1)
            found["errors"][f"{micro} {packing}"] = (loss, gradient)
    return found


def _differences(trace: Trace, reference: dict[Any, Any], steps: int) -> tuple[float, float, str]:
    """Relative: the largest of the losses, that of all gradients together, the parameter with the largest share."""
    pairs = list(zip(trace.losses, reference["losses"], strict=True))[:steps]
    loss = max(abs(one - other) / abs(other) for one, other in pairs)
    squares = {
        name: float((trace.gradients[name].double() - exact.double()).square().sum())
        for name, exact in reference["gradients"].items()
    }
    size = sum(float(exact.double().square().sum()) for exact in reference["gradients"].values())
    return loss, (sum(squares.values()) / size) ** 0.5, max(squares, key=lambda name: squares[name])


def _row(cell: Cell, trace: Trace | None, reference: dict[Any, Any], dtype: str, refused: list[str]) -> Row:
    if trace is None:
        return Row(cell, None, None, None, None, refused[0])
    # 16 bit: weights after a step differ by whole units, so the first step alone is compared.
    loss, gradient, name = _differences(trace, reference, steps=STEPS if dtype == "fp32" else 1)
    if dtype == "fp32":
        allowed = SAME_ORDER if cell.same_order else FP32
        return Row(cell, loss, gradient, allowed / min(map(abs, reference["losses"])), allowed, name)
    loss_error, gradient_error = reference["errors"][f"{cell.micro_batch} {cell.packing}"]
    return Row(cell, loss, gradient, max(SLACK * loss_error, UNIT[dtype]), SLACK * gradient_error, name)


def _rank(folder: Path) -> None:
    """This process as one rank of a group."""
    config, ranks = read(folder / "config.yaml"), int(os.environ["WORLD_SIZE"])
    distributed.join(config.launcher.timeout_s, dist.FileStore(str(folder / f"store-{ranks}"), ranks))
    build.quiet_deepspeed()
    wanted = [Cell(**one) for one in json.loads((folder / f"cells-{ranks}.json").read_text(encoding="utf-8"))]
    rows = measure(config, folder, wanted)
    if distributed.rank() == 0:
        write_json(folder / f"rows-{ranks}.json", [asdict(row) for row in rows])
    distributed.leave()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
