"""The shipped demo data: it is what its generator writes, and what is held out is not trained on."""

import json
from pathlib import Path

import pytest
import yaml

from glmexp.data.demo import make


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[dict[str, str]]]:
    return {
        name: [json.loads(line) for line in (make.FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("train", "eval")
    }


def asked_words(example: dict[str, str]) -> str:
    return f"{example['instruction']}\n{example['input']}"


def test_the_shipped_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    make.main(["--folder", str(tmp_path)])
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (make.FOLDER / name).read_bytes()


def test_another_seed_gives_other_data() -> None:
    assert make.make(seed=1) != make.make(seed=2)


def test_sizes_languages_and_distinct_answers(shipped: dict[str, list[dict[str, str]]]) -> None:
    assert len(shipped["train"]) == 480
    assert len(shipped["eval"]) == 96
    assert len({example["output"] for example in shipped["train"]}) >= 100
    assert len({example["output"] for example in shipped["eval"]}) >= 50
    for examples in shipped.values():
        chinese = sum(any("一" <= sign <= "鿿" for sign in example["instruction"]) for example in examples)
        assert 0.4 <= chinese / len(examples) <= 0.6


def test_rows_are_alpaca_rows_and_no_question_comes_twice(shipped: dict[str, list[dict[str, str]]]) -> None:
    for examples in shipped.values():
        assert all(list(example) == ["instruction", "input", "output"] for example in examples)
        assert all(example["instruction"] and example["output"] for example in examples)
        assert len({asked_words(example) for example in examples}) == len(examples)
        assert any(example["input"] for example in examples)


def test_no_held_out_fact_is_in_the_training_file(shipped: dict[str, list[dict[str, str]]]) -> None:
    """A fact is a relation and a row of its table: every way to ask about a held-out row must be absent."""
    tree = yaml.safe_load(make.KNOWLEDGE.read_text(encoding="utf-8"))
    row_of = {}
    for relation in tree["relations"].values():
        table = tree["tables"][relation["table"]]
        rows = [[word.replace("_", " ") for word in row.split()] for row in table["rows"].splitlines()]
        for row in rows + ([row[::-1] for row in rows] if relation.get("both_ways") else []):
            words = dict(zip(table["columns"], row, strict=True))
            for question in relation["questions"]:
                text = question.format(**words)
                key = text if "\n" in text else f"{text}\n"
                row_of[key] = (relation["table"], *sorted(row))
    trained = {row_of[asked_words(example)] for example in shipped["train"]}
    held_out = {row_of[asked_words(example)] for example in shipped["eval"]}
    assert trained
    assert held_out
    assert not trained & held_out
