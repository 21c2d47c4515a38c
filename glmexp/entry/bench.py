"""Bench: how soon an answer begins and how fast it goes on, over prompt lengths and batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.schema import RunConfig
from glmexp.engine import distributed, kv_cache
from glmexp.entry import serving
from glmexp.entry.console import relative
from glmexp.entry.measure import Asked, Cell, Side, copy_rate, measure, ours, transformers_generate, weights_read
from glmexp.entry.serving import Served
from glmexp.entry.session import Session, session
from glmexp.launcher.folder import write_json, write_status

PLAIN = "transformers"
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
_SPREAD = {"ttft_s": "first_s", "tpot_s": "token_s", "tokens_per_s": "tokens_per_s"}


def run(config: RunConfig, run_folder: Path) -> int:
    """One rank of a bench. Returns the exit code."""
    subject = serving.find(config)
    with session(config, run_folder) as here:
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
                "sides": ", ".join(sides),
                "device": _device_name(),
                "device copy": f"{rate / 1e12:.3f} TB/s read and written, measured now: 100 % of bandwidth",
            },
        )
        cells = [cell for asked in _questions(config, served) for cell in _measured(config, here, sides, asked)]
        rows = [_record(cell, served, rate) for cell in cells]
        _show(here, rows, rate)
        if here.screen.active:
            report = {
                "device": _device_name(),
                "torch": torch.__version__,
                "copy_bytes_per_s": rate,
                "weight_bytes_read": weights_read(served.model),
                "ranks": distributed.world_size(),
                "settings": asdict(config.bench),
                "cells": rows,
            }
            write_json(run_folder / "bench.json", report)
            lines = here.tracker.finish("finished")
            write_status(run_folder, "finished")
            here.screen.lines([f"everything lies in {relative(run_folder)}: bench.json, metrics.jsonl", *lines])
    return 0


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


def _measured(config: RunConfig, here: Session, sides: dict[str, Side], asked: Asked) -> list[Cell]:
    batch, length = asked.ids.shape
    here.screen.lines([f"batch {batch}, prompts of {length} tokens"])
    return measure(sides, asked, config.bench.runs, config.bench.warm_up)


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


def _show(here: Session, rows: Sequence[dict[str, Any]], rate: float) -> None:
    def spread(row: dict[str, Any], name: str, scale: float, digits: int) -> str:
        median, least, most = (scale * row[f"{name}{end}"] for end in ("", "_min", "_max"))
        return f"{median:,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"

    table = []
    for step, row in enumerate(rows):
        table.append(
            [
                row["side"],
                str(row["batch"]),
                str(row["prompt"]),
                spread(row, "ttft_s", 1e3, 2),
                spread(row, "tpot_s", 1e3, 3),
                spread(row, "tokens_per_s", 1, 1),
                f"{row['of_bandwidth']:.1%}",
                "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f}",
                f"{row['kv_bytes_measured'] / 1e6:.2f} ({row['kv_bytes_formula'] / 1e6:.2f})",
            ]
        )
        where = f"bench/{row['side']}/batch{row['batch']}_prompt{row['prompt']}"
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        here.record(step, {f"{where}/{name}": float(value) for name, value in numbers.items()})
    here.screen.table("median (least to most)", COLUMNS, table)
    here.screen.lines(
        [
            "of bandwidth: weights, cached keys and values that a step reads, by TPOT, against the "
            f"{rate / 1e12:.3f} TB/s that a device copy moved in this run"
        ]
    )


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
