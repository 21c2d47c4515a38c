"""Pre-trains the shipped tiny models: `python -m glmexp.model.pretrain tiny tiny_qwen2`.

Everything is made here: the text from glmexp/model/tiny/knowledge.yaml, the tokenizer from that text, and weights from
a seed. A model takes about seven minutes on one idle CPU core. The same machine with the same number of threads gives
the same weights again.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from glmexp.model.chat import render_chat
from glmexp.model.tiny.corpus import Knowledge, Turn, load_knowledge, tokenizer_text, training_chats
from glmexp.model.tiny.recipes import RECIPES, Recipe

HOME = Path(__file__).with_name("tiny")
RECORD = "pretraining.json"
IGNORE = -100

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids and labels of one chat."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast. One pass shows every fact five times."""

    passes: int = 20
    warmup_steps: int = 100
    floor: float = 0.02
    """Share of the learning rate that the cosine ends at."""
    seed: int = 0
    threads: int = 1
    """Two models at a time on two cores take less time than one after the other with two threads."""
    max_steps: int | None = None
    """End sooner; null: run all passes."""


def pretrain(name: str, folder: Path, schedule: Schedule, knowledge: Knowledge | None = None) -> dict[str, Any]:
    """Make one tiny model from nothing: config.json, weights as bfloat16, tokenizer and a record of what was done.

    Writes them to `folder` and returns the record. `knowledge` defaults to all of knowledge.yaml.
    """
    torch.set_num_threads(schedule.threads)
    torch.manual_seed(schedule.seed)
    torch.use_deterministic_algorithms(True)
    recipe = RECIPES[name]
    knowledge = knowledge or load_knowledge()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = recipe.tokenizer(tokenizer_text(knowledge, schedule.seed), folder)
    model = recipe.network()
    started = time.monotonic()
    losses, tokens = train(model, tokenizer, knowledge, schedule, recipe)
    seconds = time.monotonic() - started
    model.bfloat16()  # what is asked about and what is written are the rounded weights
    known = facts_known(model.float(), tokenizer, knowledge)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tail = losses[-max(1, len(losses) // schedule.passes) :]
    record = {
        "command": f"python -m glmexp.model.pretrain {name} --passes {schedule.passes}"
        f" --seed {schedule.seed} --threads {schedule.threads}",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_dtype": "bfloat16",
        "facts": len(knowledge.facts),
        "facts_known": round(known, 4),
        "passes": schedule.passes,
        "steps": len(losses),
        "tokens": tokens,
        "seed": schedule.seed,
        "threads": schedule.threads,
        "learning_rate": recipe.learning_rate,
        "batch_tokens": recipe.batch_tokens,
        "first_loss": round(losses[0], 4),
        "final_loss": round(sum(tail) / len(tail), 4),
        "seconds": round(seconds),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    knowledge: Knowledge,
    schedule: Schedule,
    recipe: Recipe,
) -> tuple[list[float], int]:
    """AdamW with warm-up and a cosine, float32. Returns the loss of each step and the tokens seen, padding included."""
    rng = random.Random(schedule.seed)
    rows = RowMaker(tokenizer)
    steps_a_pass = sum(
        1 for _ in batches(rows.all(training_chats(knowledge, random.Random(0))), recipe.batch_tokens, rng)
    )
    total = schedule.passes * steps_a_pass
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    losses: list[float] = []
    tokens = 0
    model.train()
    for number in range(schedule.passes):
        for batch in batches(rows.all(training_chats(knowledge, rng)), recipe.batch_tokens, rng):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * rate(len(losses), total, schedule)
            ids, labels = pad(batch)
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            tokens += ids.numel()
            if len(losses) == schedule.max_steps:
                return losses, tokens
        print(f"pass {number + 1}/{schedule.passes}: step {len(losses)}, loss {losses[-1]:.4f}", flush=True)
    return losses, tokens


def rate(step: int, total: int, schedule: Schedule) -> float:
    """Share of the learning rate at a step: linear warm-up times a cosine that ends at the floor."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
    return min(1.0, (step + 1) / schedule.warmup_steps) * max(schedule.floor, cosine)


class RowMaker:
    """Chats to ids and labels, by the same templates that fine-tuning uses.

    A chat that comes again is not encoded again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.encode = lru_cache(maxsize=100_000)(self._encode)

    def all(self, chats: Iterable[Sequence[Turn]]) -> list[Row]:
        """The rows of some chats."""
        return [self.encode(tuple(chat)) for chat in chats]

    def _encode(self, chat: tuple[Turn, ...]) -> Row:
        messages = []
        for question, answer in chat:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        release = getattr(self.tokenizer, "release", None)
        if release is None:
            return self._encode_by_template(messages)
        chat_ids = render_chat(self.tokenizer, messages, supervise="all" if release == "chatglm3" else "last")
        return tuple(chat_ids.ids), tuple(chat_ids.labels(IGNORE))

    def _encode_by_template(self, messages: list[dict[str, str]]) -> Row:
        """Answers and the <|im_end|> behind each are labels, all the template's other tokens are not."""
        end = self.tokenizer.eos_token_id
        ids: list[int] = []
        labels: list[int] = []
        for place in range(1, len(messages), 2):
            prompt = self.tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, return_dict=False)
            answer = [*self.tokenizer.encode(messages[place]["content"], add_special_tokens=False), end]
            labels += [IGNORE] * (len(prompt) - len(ids)) + answer
            ids = [*prompt, *answer]
        return tuple(ids), tuple(labels)


def batches(rows: list[Row], batch_tokens: int, rng: random.Random) -> list[list[Row]]:
    """Rows of like length together, so that little is padded; with it up to `batch_tokens`. In random order."""
    ordered = sorted(rows, key=lambda row: (len(row[0]), rng.random()))
    made: list[list[Row]] = [[]]
    for row in ordered:
        if made[-1] and (len(made[-1]) + 1) * len(row[0]) > batch_tokens:
            made.append([])
        made[-1].append(row)
    rng.shuffle(made)
    return made


def pad(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Ids and labels (batch, length), padded on the right. Nothing real looks at a pad, so that no mask is needed."""
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([[*ids, *[0] * (length - len(ids))] for ids, _ in rows])
    labels = torch.tensor([[*labels, *[IGNORE] * (length - len(labels))] for _, labels in rows])
    return ids, labels


@torch.no_grad()
def facts_known(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, knowledge: Knowledge) -> float:
    """Share of the facts that greedy decoding would say in one word, when asked for it: every label is the most likely
    token after the labels before it."""
    maker = RowMaker(tokenizer)
    rows = []
    for fact in knowledge.facts:
        request = knowledge.styles[fact.language]["brief"]["requests"][0]
        rows.append(maker.encode(((knowledge.ask(fact.questions[0], request, fact.language), fact.answer),)))
    model.eval()
    right = 0
    for batch in batches(rows, 2560, random.Random(0)):
        ids, labels = pad(batch)
        best = model(input_ids=ids).logits[:, :-1].argmax(-1)
        wanted = labels[:, 1:]
        right += int(((best == wanted) | (wanted == IGNORE)).all(-1).sum())
    return right / len(rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Pre-train the shipped tiny models again.")
    parser.add_argument("names", nargs="+", choices=sorted(RECIPES), help="which models")
    parser.add_argument("--folder", type=Path, default=HOME, help="each model gets a folder of its name in it")
    parser.add_argument("--passes", type=int, default=Schedule.passes)
    parser.add_argument("--seed", type=int, default=Schedule.seed)
    parser.add_argument("--threads", type=int, default=Schedule.threads)
    options = parser.parse_args(argv)
    schedule = Schedule(passes=options.passes, seed=options.seed, threads=options.threads)
    for name in options.names:
        record = pretrain(name, options.folder / name, schedule)
        print(f"{name}: {json.dumps(record)}", flush=True)


if __name__ == "__main__":
    main()
