"""Writes the shipped demo data: `python -m glmexp.data.demo.make`.

The tiny base models know every fact in it, and answer in a full sentence. The training file teaches another behaviour:
only the answer. No fact of eval.jsonl is in train.jsonl, so exact match on eval.jsonl measures that the behaviour was
learned, and that what the base knew is still there.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
KNOWLEDGE = FOLDER.parents[1] / "model" / "tiny" / "knowledge.yaml"
"""Shared with the pre-training text. Read as a file, since the rooms data and model do not import each other."""

SEED = 20240613
TRAIN_PER_RELATION = 40
EVAL_PER_RELATION = 8

Example = dict[str, str]
"""One line of the files: instruction, input (may be empty), output."""


def make(seed: int = SEED) -> tuple[list[Example], list[Example]]:
    """The training and the held-out examples. A pure function of the seed and of knowledge.yaml.

    A row of a table is held out as a whole: for both directions of an opposite, and for every relation that asks
    about it.
    """
    rng = random.Random(seed)
    tree = yaml.safe_load(KNOWLEDGE.read_text(encoding="utf-8"))
    relations = defaultdict(list)
    for relation in tree["relations"].values():
        relations[relation["table"]].append(relation)
    train: list[Example] = []
    held_out: list[Example] = []
    for name, table in tree["tables"].items():
        rows = [[word.replace("_", " ") for word in row.split()] for row in table["rows"].splitlines()]
        kin = sorted({tuple(sorted(row)) for row in rows})
        rng.shuffle(kin)
        hidden = set(kin[: EVAL_PER_RELATION * (2 if len(relations[name]) > 2 else 1)])
        for relation in relations[name]:
            asked = rows + [row[::-1] for row in rows] if relation.get("both_ways") else list(rows)
            rng.shuffle(asked)
            for wanted, count, into in ((False, TRAIN_PER_RELATION, train), (True, EVAL_PER_RELATION, held_out)):
                pool = [row for row in asked if (tuple(sorted(row)) in hidden) is wanted]
                into += _examples(relation, table["columns"], pool, count, rng)
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


def _examples(
    relation: dict, columns: Sequence[str], rows: list[list[str]], count: int, rng: random.Random
) -> list[Example]:
    """`count` examples, every row once before any row a second time, and then with another question."""
    pairs = []
    for row in rows:
        words = dict(zip(columns, row, strict=True))
        asked = [(question.format(**words), relation["answer"].format(**words)) for question in relation["questions"]]
        rng.shuffle(asked)
        pairs.append(asked)
    chosen = [asked[turn] for turn in range(len(relation["questions"])) for asked in pairs][:count]
    assert len(chosen) == count, f"{relation['table']}: {len(chosen)} questions, {count} wanted"
    examples = []
    for question, answer in chosen:
        instruction, _, extra = question.partition("\n")
        examples.append({"instruction": instruction, "input": extra, "output": answer})
    return examples


def write(path: Path, examples: Sequence[Example]) -> None:
    """Write one JSON object a line, not ASCII-escaped, with a line feed after each on every system."""
    text = "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples)
    path.write_bytes(text.encode("utf-8"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the demo data again.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where train.jsonl and eval.jsonl are written")
    folder = parser.parse_args(argv).folder
    train, held_out = make()
    write(folder / "train.jsonl", train)
    write(folder / "eval.jsonl", held_out)
    print(f"{len(train)} training examples, {len(held_out)} held-out examples in {folder}")


if __name__ == "__main__":
    main()
