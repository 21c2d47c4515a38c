"""Bench: how soon an answer begins and how fast it goes on, over prompt lengths and batch sizes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.schema import RunConfig
from glmexp.engine import distributed, kv_cache
from glmexp.entry import serving
from glmexp.entry.console import relative
from glmexp.entry.measure import (
    Asked,
    Cell,
    Pace,
    Side,
    copy_rate,
    measure,
    ours,
    transformers_generate,
    weights_read,
)
from glmexp.entry.serving import Served
from glmexp.entry.session import Session, session
from glmexp.launcher import positions
from glmexp.launcher.folder import write_json, write_status, write_text

PLAIN = "transformers"
REPORT, TABLE = "bench.json", "bench.md"
COLUMNS = (
    "side",
    "batch",
    "prompt",
    "TTFT ms",
    "TPOT ms",
    "tokens/s",
    "of bandwidth",
    "peak GB",
    "KV MB (formula)",
)
_TITLE = "median (least to most)"
_SPREAD = {"ttft_s": "first_s", "tpot_s": "token_s", "tokens_per_s": "tokens_per_s"}
_QUIET_S = 15.0
"""Longest time without a word about how far it is."""


def run(config: RunConfig, run_folder: Path) -> int:
    """One rank of a bench. Returns the exit code."""
    subject = serving.find(config)
    with session(config, run_folder) as here:
        positions.at("loading the model")
        served = serving.load(subject, config)
        _check(config, served)
        here.start_tracker()
        sides = _sides(config, served)
        rate = copy_rate(distributed.device())
        here.screen.facts(
            "glmexp bench",
            {
                **served.facts(),
                "ranks": str(distributed.world_size()),
                "sides": _named(sides, config.bench.plain),
                "device": _device_name(),
                "device copy": f"{rate / 1e12:.3f} TB/s read and written, measured now: 100 % of bandwidth",
            },
        )
        report = Report(here, served, rate)
        for cell in _cells(config, here, served, sides):
            report.add(cell)
        report.end()
    return 0


class Report:
    """What was measured, on the disk from each cell on: a bench that is ended early keeps what it has."""

    def __init__(self, here: Session, served: Served, rate: float) -> None:
        self.here, self.served, self.rate = here, served, rate
        self.rows: list[dict[str, Any]] = []

    def add(self, cell: Cell) -> None:
        """Write one more row down, everywhere."""
        row = _record(cell, self.served, self.rate)
        self.rows.append(row)
        where = f"bench/{row['side']}/batch{row['batch']}_prompt{row['prompt']}"
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        self.here.record(len(self.rows) - 1, {f"{where}/{name}": float(value) for name, value in numbers.items()})
        self._write(finished=False)
        side, batch, prompt, first, token, speed, *_ = _texts(row)
        self.here.screen.lines(
            [f"batch {batch}, prompt {prompt}, {side}: TTFT {first} ms, TPOT {token} ms, {speed} tokens/s"]
        )

    def end(self) -> None:
        """All is measured."""
        self._write(finished=True)
        screen = self.here.screen
        screen.table(_TITLE, COLUMNS, [_texts(row) for row in self.rows])
        screen.lines([_of_bandwidth(self.rate)])
        if screen.active:
            lines = self.here.tracker.finish("finished")
            write_status(self.here.folder, "finished")
            screen.lines([f"everything lies in {relative(self.here.folder)}: {REPORT}, {TABLE}, metrics.jsonl", *lines])

    def _write(self, finished: bool) -> None:
        if not self.here.screen.active:
            return
        report = {
            "finished": finished,
            "device": _device_name(),
            "torch": torch.__version__,
            "copy_bytes_per_s": self.rate,
            "weight_bytes_read": weights_read(self.served.model),
            "ranks": distributed.world_size(),
            "placement": self.served.facts()["placement"],
            "settings": asdict(self.here.config.bench),
            "cells": self.rows,
        }
        write_json(self.here.folder / REPORT, report)
        lines = [COLUMNS, ["---"] * len(COLUMNS), *map(_texts, self.rows)]
        table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        write_text(self.here.folder / TABLE, f"{_device_name()}, {_TITLE}\n\n{table}\n{_of_bandwidth(self.rate)}\n")


def _cells(config: RunConfig, here: Session, served: Served, sides: dict[str, Side]) -> Iterator[Cell]:
    """Cell after cell, with a word about how far it is."""
    bench, questions = config.bench, _questions(config, served)
    pace = Pace(list(sides), [one.ids.shape[0] for one in questions], bench.warm_up + bench.runs)
    count = len(questions) * len(sides) * pace.each
    here.screen.lines(
        [
            f"measuring {len(questions) * len(sides)} cells, {count} generations of {bench.new_tokens} tokens; rows go "
            f"to {REPORT} and {TABLE} in {relative(here.folder)} as they are measured"
        ]
    )
    said, estimated = time.monotonic(), False
    for asked in questions:
        batch, length = asked.ids.shape
        positions.at(f"measuring batch {batch}, prompts of {length} tokens")
        for side, cell in measure(sides, asked, bench.runs, bench.warm_up):
            pace.done(side)
            if cell is not None:
                yield cell
            if pace.known() and (not estimated or time.monotonic() - said > _QUIET_S):
                said, estimated = time.monotonic(), True
                here.screen.lines([f"{pace.words()}: batch {batch}, prompt {length}"])


def _named(sides: Collection[str], plain: bool) -> str:
    alone = plain and len(sides) == 1
    way = ", the way that decoding.way=null takes here: bench.plain=true holds it against nothing (decoding.way=static)"
    return ", ".join(sides) + (way if alone else "")


def _sides(config: RunConfig, served: Served) -> dict[str, Side]:
    decoder = served.decoder
    if decoder is None:
        return {PLAIN: transformers_generate(served.model)}
    found: dict[str, Side] = {decoder.way: ours(decoder)}
    if config.bench.plain:
        found[PLAIN] = transformers_generate(served.model)
    return found


def _check(config: RunConfig, served: Served) -> None:
    """Raise ConfigError where a prompt and its answer leave the network's positions, or a batch's cache has no room."""
    bench, most = config.bench, kv_cache.max_positions(served.model)
    longest = max(bench.prompt_lengths)
    if longest + bench.new_tokens > most:
        raise ConfigError(
            Problem(
                "bench.prompt_lengths",
                f"{longest} and {bench.new_tokens} new tokens leave the network's {most} positions",
                f"{most - bench.new_tokens} at most",
            )
        )
    free = kv_cache.free_bytes(served.device)
    lack = kv_cache.too_large(served.cache, max(bench.batch_sizes), longest + bench.new_tokens, free)
    if lack is not None:
        raise ConfigError(Problem("bench.batch_sizes", lack, "smaller ones, or shorter bench.prompt_lengths"))


def _questions(config: RunConfig, served: Served) -> list[Asked]:
    """Batch by batch, so that each size is compiled once: all prompt lengths."""
    bench, template = config.bench, served.template
    slots = max(bench.prompt_lengths) + bench.new_tokens + served.virtual_tokens
    return [
        Asked(
            ids=torch.tensor([prompt_ids(template, length, row) for row in range(batch)], device=served.device),
            new_tokens=bench.new_tokens,
            slots=slots,
            stop_ids=list(template.stop_ids),
            pad_id=template.pad_id,
        )
        for batch in bench.batch_sizes
        for length in bench.prompt_lengths
    ]


def prompt_ids(template: Any, length: int, row: int) -> list[int]:
    """A prompt of exactly ``length`` tokens: numbers that are counted up, cut in front, so that it ends as the template
    ends one. Rows differ."""
    text = " ".join(str(number) for number in range(10 * row, 10 * row + 2 * length + 10))
    ids = template.prompt([{"role": "user", "content": text}])
    assert len(ids) >= length, "a number is at least a token"
    return ids[-length:]


def _record(cell: Cell, served: Served, rate: float) -> dict[str, Any]:
    """One cell as it is written down. Values that have a spread: median, least, most."""
    last = cell.runs[-1]
    record: dict[str, Any] = {"side": cell.side, "batch": cell.batch, "prompt": cell.prompt, "runs": len(cell.runs)}
    for name, field in _SPREAD.items():
        record[name], record[f"{name}_min"], record[f"{name}_max"] = cell.spread(field)
    cache = served.cache
    slots = served.decoder.step.cache.slots if cell.side != PLAIN and served.decoder and served.decoder.step else None
    # transformers caches all but the last token, whose states nothing asks for, and no prefix of a ChatGLM.
    kept = slots or cell.prompt + last.steps - 1
    record["kv_bytes_formula"] = cell.batch * kept * cache.token_bytes
    record["kv_bytes_measured"] = last.cache_bytes
    record["peak_bytes"] = cell.peak_bytes
    record["generated_tokens"] = last.tokens
    read = weights_read(served.model) + cell.batch * (cell.prompt + last.steps / 2) * cache.token_bytes
    record["bytes_read_a_step"] = read
    record["of_bandwidth"] = read / record["tpot_s"] / rate
    return record


def _texts(row: dict[str, Any]) -> list[str]:
    """A row as it is shown, by COLUMNS."""

    def spread(name: str, scale: float, digits: int) -> str:
        median, least, most = (scale * row[f"{name}{end}"] for end in ("", "_min", "_max"))
        return f"{median:,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"

    return [
        row["side"],
        str(row["batch"]),
        str(row["prompt"]),
        spread("ttft_s", 1e3, 2),
        spread("tpot_s", 1e3, 3),
        spread("tokens_per_s", 1, 1),
        f"{row['of_bandwidth']:.1%}",
        "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f}",
        f"{row['kv_bytes_measured'] / 1e6:.2f} ({row['kv_bytes_formula'] / 1e6:.2f})",
    ]


def _of_bandwidth(rate: float) -> str:
    return (
        "of bandwidth: weights, cached keys and values that a step reads, by TPOT, against the "
        f"{rate / 1e12:.3f} TB/s that a device copy moved in this run"
    )


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
