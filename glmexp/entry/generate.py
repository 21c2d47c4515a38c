"""Generate: answers of a base, an adapter, a prefix, a merged model or a checkpoint, to a file of prompts or in a chat.

The chat template is the one that training used; the settings are those of the generate section alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from glmexp.config.entries import GenerateSection
from glmexp.config.errors import DataError, Problem
from glmexp.config.launch_rules import talks
from glmexp.config.schema import RunConfig
from glmexp.data.files import raise_all
from glmexp.data.questions import Question
from glmexp.engine import distributed
from glmexp.entry import before, chat, serving
from glmexp.entry.console import Screen, relative
from glmexp.entry.conversation import Fitted, Speaker, TooLongError, fitted
from glmexp.entry.session import session
from glmexp.launcher.folder import write_status
from glmexp.model.renderer import Renderer

ANSWERS = "answers.jsonl"
_LINES = 20
"""Lines about how far it is, at most."""


def run(config: RunConfig, run_folder: Path) -> int:
    """One rank: the whole model, and its share of the prompts. Returns the exit code."""
    settings = config.generate
    output = Path(settings.output) if settings.output is not None else run_folder / ANSWERS
    with _group(config, run_folder):
        subject = serving.find(config)
        if talks(config):
            speaker = Speaker(serving.load(subject, config), settings, rows=1)
            with output.open("a", encoding="utf-8") as file:
                chat.talk(speaker, lambda row: write_row(file, row), relative(output))
        else:
            answer_file(config, subject, output)
        if distributed.rank() == 0:
            write_status(run_folder, "finished")
    return 0


@contextmanager
def _group(config: RunConfig, run_folder: Path) -> Iterator[None]:
    """Several ranks find each other; a single one does without, and without loading DeepSpeed."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        write_status(run_folder, "running")
        yield
        return
    with session(config, run_folder):
        yield


def write_row(file: TextIO, row: dict[str, Any]) -> None:
    """One answer, on the disk when this returns: what has been said survives whatever comes."""
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


def answer_file(config: RunConfig, subject: serving.Subject, output: Path) -> None:
    """Answer the prompts of a file; every rank its share, rank 0 writes them in the file's order."""
    settings, first = config.generate, distributed.rank() == 0
    screen = Screen(active=first)
    questions = before.questions(config)
    prompts = all_fitted(subject.template, questions, settings)
    rows = min(settings.batch_size, len(prompts))
    served = serving.load(subject, config)
    rank, ranks = served.lane
    speaker = Speaker(served, settings, rows)
    screen.facts("glmexp generate", {**speaker.facts(rows), "prompts": f"{len(prompts)} of {settings.prompts_file}"})
    cut = sum(prompt.dropped > 0 for prompt in prompts)
    if cut:
        screen.lines([f"{cut} conversations without their oldest turns, to fit into max_length: see dropped_turns"])
    batches = batched(prompts, settings)[rank::ranks]
    part = output if ranks == 1 else output.with_name(f"{output.name}.rank{rank}")
    if ranks == 1 and not first:  # ranks that share one network answer the same
        part = Path(os.devnull)
    done, mine = 0, sum(map(len, batches))
    with part.open("w", encoding="utf-8") as file:
        for number, places in enumerate(batches, start=1):
            speaker.draw_anew(places[0])
            answers = speaker.answers([prompts[place] for place in places])
            for place, answer in zip(places, answers, strict=True):
                question = questions[place]
                row = answer.row(place, prompts[place])
                more = {"id": question.id, "expected": question.expected}
                write_row(file, {**row, **{name: value for name, value in more.items() if value}})
            done += len(places)
            if number == len(batches) or number % max(1, len(batches) // _LINES) == 0:
                screen.lines([f"{done} of {mine} prompts answered" + (f" by rank 0 of {ranks}" if ranks > 1 else "")])
    if ranks > 1:
        _joined(output, part, ranks)
    screen.lines([f"the answers lie in {relative(output)}"])


def all_fitted(template: Renderer, questions: Sequence[Question], settings: GenerateSection) -> list[Fitted]:
    """The prompts of all rows. Raises DataError with every row that does not fit or has no place in the template."""
    prompts: list[Fitted] = []
    problems: list[Problem] = []
    for question in questions:
        try:
            prompts.append(fitted(template, question.messages, settings))
        except TooLongError as error:
            problems.append(Problem(question.place, str(error), "a larger generate.max_length, or a shorter question"))
        except DataError as error:
            problems += [Problem(f"{question.place}: {one.where}", one.message, one.fix) for one in error.problems]
    raise_all(str(settings.prompts_file), problems)
    return prompts


def batched(prompts: Sequence[Fitted], settings: GenerateSection) -> list[list[int]]:
    """Places of the prompts that are answered together, in the file's order.

    A prompt whose answer has less room than the others' is answered alone: in a batch its row would be longer than
    ``max_length``, or the others' answers shorter than without it.
    """
    batches: list[list[int]] = [[]]
    for place, prompt in enumerate(prompts):
        alone = prompt.room < settings.max_new_tokens
        if batches[-1] and (alone or len(batches[-1]) == settings.batch_size):
            batches.append([])
        batches[-1].append(place)
        if alone:
            batches.append([])
    return [batch for batch in batches if batch]


def _joined(output: Path, part: Path, ranks: int) -> None:
    """All ranks' parts as one file, by the order of the prompts. Collective."""
    distributed.barrier()
    if distributed.rank() == 0:
        parts = [part.with_name(f"{output.name}.rank{rank}") for rank in range(ranks)]
        lines = [line for one in parts for line in one.read_text(encoding="utf-8").split("\n") if line]
        lines.sort(key=lambda line: int(json.loads(line)["index"]))
        output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for one in parts:
            one.unlink()
    distributed.barrier()
