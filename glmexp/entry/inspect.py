"""Inspect: what will be learned, token by token, before anything is trained. No network is built."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from glmexp.config.derived import GRAD_ACCUM, MICRO_BATCH_SIZE
from glmexp.config.schema import RunConfig
from glmexp.data import look
from glmexp.data.batches import StepPlan
from glmexp.data.collate import padded
from glmexp.data.packing import packs
from glmexp.data.prepare import Prepared, prepare
from glmexp.data.store import IGNORED, Example, Examples
from glmexp.launcher.folder import write_json, write_status
from glmexp.model.build import load_tokenizer
from glmexp.model.renderer import renderer, shown

PAGE = """<!doctype html><meta charset="utf-8"><title>glmexp inspect</title><style>
body{font:15px/1.6 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}h2{font-size:1em;margin:2em 0 .5em}
pre{white-space:pre-wrap}.tokens span{border:1px solid #ddd;border-radius:3px;padding:0 2px;margin:1px;white-space:pre}
.learned{background:#c8f0cc}.special{color:#0050a0;font-weight:bold}</style>
<p>Green is learned, blue are marks of the chat template; point at a token for its place and id.</p>"""


def run(config: RunConfig, run_folder: Path) -> int:
    """Prepare the data as training would and show it. Returns the exit code; raises DataError."""
    write_status(run_folder, "running")
    template = renderer(config.model.family, load_tokenizer(config.model))
    data = prepare(config.data, config.train.seed, template, train=config.data.train_file is not None)
    write_json(run_folder / "data.json", data.record())
    console = Console(highlight=False, soft_wrap=True)
    page = [PAGE]
    _say(console, page, [*data.report, *_numbers(config, data)])
    examples = data.train or data.eval
    for number in range(min(config.inspect.rows, len(examples))):
        _example(console, page, template, examples[number], number + 1)
    _say(console, page, [*_batch(config, template, examples), *_wrong(data)])
    if config.inspect.html is not None:
        Path(config.inspect.html).write_text("\n".join(page), encoding="utf-8")
        console.print(f"written to {config.inspect.html}", markup=False)
    write_status(run_folder, "finished")
    return 0


def _say(console: Console, page: list[str], lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False)
    page.append("<pre>" + escape("\n".join(lines)) + "</pre>")


def _numbers(config: RunConfig, data: Prepared) -> list[str]:
    """Lengths, and what share of the batches is padding in each way of making them."""
    lines = []
    for name, examples in (("train", data.train), ("held out", data.eval)):
        if len(examples):
            one = look.Lengths.of(examples)
            lines.append(
                f"{name}: {one.count} examples; tokens {one.shortest} to {one.longest}, median {one.median}, mean "
                f"{one.mean:.1f}, 95 % at most {one.p95}; {one.supervised_share:.0%} of them learned"
            )
    if not len(data.train):
        return lines
    lengths, limit = data.train.lengths, config.data.max_length
    plans = [_plan(config, data.train, grouped) for grouped in (False, True)]
    shares = [look.padding_share(lengths, plan) for plan in plans]
    rows = packs(lengths, limit, config.train.seed)
    packed = 1 - lengths.sum() / (len(rows) * limit)
    chosen = "packed" if config.data.packing else "grouped" if config.data.group_by_length else "as they come"
    lines.append(
        f"padding in micro batches of {plans[0].micro_batch_size}: {shares[0]:.0%} as they come, {shares[1]:.0%} with "
        f"data.group_by_length, {packed:.0%} with data.packing ({len(rows)} rows of {limit}); now: {chosen}"
    )
    return lines


def _plan(config: RunConfig, examples: Examples, grouped: bool) -> StepPlan:
    return StepPlan(
        rows=len(examples),
        micro_batch_size=config.train.micro_batch_size or MICRO_BATCH_SIZE,
        grad_accum=config.train.grad_accum or GRAD_ACCUM,
        ranks=1,
        rank=0,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        lengths=examples.lengths if grouped else None,
    )


def _example(console: Console, page: list[str], template: Any, example: Example, number: int) -> None:
    ids, labels = example.input_ids.tolist(), example.labels.tolist()
    learned = [label for label in labels if label != IGNORED]
    title = f"example {number} (place {example.label}): {len(ids)} tokens, {len(learned)} learned"
    console.print(f"\n{title}", style="bold", markup=False)
    facts = [
        f"  input:   {shown(template, ids)!r}",
        f"  learned: {shown(template, learned)!r}",
        f"  {template.sees(labels.index(learned[0]))}",
    ]
    for line in facts:
        console.print(line, markup=False)
    text, spans = Text("  tokens: "), []
    for place, (index, label) in enumerate(zip(ids, labels, strict=True)):
        token = template.token_text(index)
        # The star shows what is learned where there is no colour.
        star = "*" if label != IGNORED else ""
        style = "bold green" if star else "cyan" if template.is_special(index) else ""
        text.append(f"{star}{token!r}:{index}", style=style).append(" ")
        kinds = " ".join(("learned",) * bool(star) + ("special",) * template.is_special(index))
        spans.append(f'<span class="{kinds}" title="{place}: id {index}">{escape(token)}</span>')
    console.print(text)
    page += [f"<h2>{escape(title)}</h2><pre>" + escape("\n".join(facts)) + "</pre>"]
    page.append('<p class="tokens">' + "".join(spans) + "</p>")


def _batch(config: RunConfig, template: Any, examples: Examples) -> list[str]:
    """The first micro batch in the file's order, as the network would get it without packing."""
    rows = [examples[index] for index in range(min(config.train.micro_batch_size or MICRO_BATCH_SIZE, len(examples)))]
    batch = padded(rows, template.pad_id)
    mask, ids = batch["attention_mask"], batch["input_ids"]
    filled = sorted(set(ids[mask == 0].tolist()))
    padding = f"padding is id {filled}" if filled else "no padding"
    ends = sum(int(row.labels[-1] in template.stop_ids) for row in rows)
    return [
        "",
        f"a batch of the first {len(rows)} rows: {tuple(ids.shape)}; attention mask sums to {int(mask.sum())} = "
        f"the {sum(len(row.input_ids) for row in rows)} tokens of its rows; {padding}; "
        f"{ends} learned end tokens; {int((batch['labels'] != IGNORED).sum())} labels",
    ]


def _wrong(data: Prepared) -> list[str]:
    """Examples that look wrong, of training and of held-out rows."""
    lines: list[str] = []
    for name, examples in (("train", data.train), ("held out", data.eval)):
        looked = look.sample(examples)
        for one in look.suspicions(looked):
            where = ", ".join(f"{example.label}: {_short(example.answer)}" for example in one.examples)
            lines.append(f"look at ({name}): {one.reason}: {one.count} of {len(looked)} (place {where})")
    if len(data.train) and len(data.eval):
        shared = look.shared_questions(look.sample(data.train), data.eval)
        if shared:
            where = ", ".join(example.label for example in shared[:5])
            lines.append(
                f"look at: {len(shared)} of {len(data.eval)} held-out rows ask what is trained on (place {where})"
            )
    return lines or ["nothing looks wrong"]


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:39] + "…")
