"""Rows whose tokenised lengths follow those of instruction data: for speed benches with random weights.

    python experiments/bench/instruction_data.py --model chatglm3 --out FOLDER [--rows 4096]

Lengths are lognormal (median 180 tokens, 95th percentile 900, cut to 16..2048); 20 to 60 % of each row is its prompt.
The text is digits, which are one token each in the shipped tokenizers that model.init=random uses, and as many tokens
as the chat template adds are left out of it: the whole row has the drawn length, unless the template alone is longer.

FOLDER/rows.jsonl is alpaca form, for data=alpaca; FOLDER/ids.npz holds the same rows as ids (what the product's own
template makes of them), for whatever is measured beside it: ``ids``, ``learned`` (flat) and ``lengths``.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

MEDIAN, PERCENTILE_95, SHORTEST, LONGEST = 180.0, 900.0, 16, 2048
SEED = 1234
Z_95 = 1.6448536269514722
"""95 % of a normal distribution lie below this many standard deviations."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="chatglm3", help="an option of the group model")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--rows", type=int, default=4096)
    asked = parser.parse_args()
    print(json.dumps(write(asked.model, asked.out, asked.rows)))


def draw(rows: int, seed: int = SEED) -> tuple[np.ndarray, np.ndarray]:
    """Lengths in tokens, and how many of them are the prompt's."""
    chance = np.random.default_rng(seed)
    sigma = math.log(PERCENTILE_95 / MEDIAN) / Z_95
    lengths = chance.lognormal(math.log(MEDIAN), sigma, rows).round().clip(SHORTEST, LONGEST).astype(np.int64)
    return lengths, (lengths * chance.uniform(0.2, 0.6, rows)).astype(np.int64)


def write(model: str, folder: Path, rows: int) -> dict[str, Any]:
    """Both files. Returns what is in them."""
    template = template_of(model)
    before, behind = frame(template)
    chance = np.random.default_rng(SEED + 1)
    wanted, prompts = draw(rows)
    ids: list[np.ndarray] = []
    learned: list[np.ndarray] = []
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w", encoding="ascii") as file:
        for length, prompt in zip(wanted, prompts, strict=True):
            question = max(1, int(prompt) - before)
            answer = max(1, int(length) - before - question - behind)
            digits = "".join(map(str, chance.integers(0, 10, question + answer)))
            row = {"instruction": digits[:question], "input": "", "output": digits[question:]}
            file.write(json.dumps(row) + "\n")
            found, flags = encoded(template, row["instruction"], row["output"])
            assert len(found) == before + question + answer + behind, "a digit is one token"
            ids.append(np.array(found, dtype=np.int32))
            learned.append(np.array(flags, dtype=bool))
    lengths = np.array([len(one) for one in ids])
    np.savez(folder / "ids.npz", ids=np.concatenate(ids), learned=np.concatenate(learned), lengths=lengths)
    return {
        "model": model,
        "rows": rows,
        "mean": round(float(lengths.mean()), 1),
        "median": float(np.median(lengths)),
        "p95": float(np.percentile(lengths, 95)),
        "least": int(lengths.min()),
        "most": int(lengths.max()),
        "learned_share": round(float(np.concatenate(learned).mean()), 3),
        "longer_than_drawn": int((lengths != wanted).sum()),
    }


def template_of(model: str) -> Any:
    """The chat template with the tokenizer that model.init=random uses for this option."""
    from glmexp.config.compose import run_config
    from glmexp.model.build import load_tokenizer
    from glmexp.model.renderer import renderer

    section = run_config([f"model={model}", "model.init=random", "eval=none", "tracker=none"]).model
    return renderer(section.family, load_tokenizer(section))


def encoded(template: Any, question: str, answer: str) -> tuple[list[int], list[bool]]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return template.train(messages)


def frame(template: Any) -> tuple[int, int]:
    """Tokens that the template puts before the answer and behind it."""
    messages = [{"role": "user", "content": "12345"}]
    before = len(template.prompt(messages)) - 5
    whole, _ = encoded(template, "12345", "1234567")
    return before, len(whole) - before - 12


if __name__ == "__main__":
    main()
