"""Scores of texts: worked out by hand, and CMRC's against the official script's numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from glmexp.eval.cmrc import exact_match, f1, units
from glmexp.eval.rouge import METRICS, score
from glmexp.eval.texts import by_character, by_word

SHARED = os.environ.get("GLMEXP_SHARED")


def test_chinese_is_cut_into_characters_or_words_and_english_into_words() -> None:
    text = "我爱 Deep Learning，2024年!"
    assert by_character(text) == ["我", "爱", "deep", "learning", "2024", "年"]
    assert by_word("我爱北京天安门 Very good.") == ["我", "爱", "北京", "天安门", "very", "good"]
    assert by_word("Don't stop") == by_character("Don't stop") == ["don", "t", "stop"]


@pytest.mark.parametrize("prediction", ["", " \n", "。", "!?"])
def test_a_prediction_without_words_scores_zero(prediction: str) -> None:
    assert score(prediction, ["甲"]) == dict.fromkeys(METRICS, 0.0)


def test_scores_worked_out_by_hand() -> None:
    found = score("the cat sat", ["a cat sat on the mat"])
    assert found["rouge1_word"] == pytest.approx(2 * 1 * 0.5 / 1.5)  # 3 of 3 and 3 of 6 words
    assert found["rouge2_word"] == pytest.approx(2 * 0.5 * 0.2 / 0.7)  # 1 of 2 and 1 of 5 pairs
    assert found["rougeL_word"] == pytest.approx(2 * (2 / 3) * (2 / 6) / 1)
    by_unit = score("我爱北京天安门", ["我爱北京"])
    assert by_unit["rouge1_char"] == pytest.approx(2 * (4 / 7) / (4 / 7 + 1))
    assert by_unit["rouge1_word"] == pytest.approx(2 * (3 / 4) / (3 / 4 + 1))


def test_the_best_reference_counts_and_the_same_text_scores_one() -> None:
    for text in ("八", "今天风很大。", "hot", "桃子 is a peach"):
        found = score(text, ["别的", text])
        short = {f"rouge2_{unit}" for unit in ("char", "word")} if len(by_word(text)) < 2 else set()
        assert all(found[name] == pytest.approx(1.0) for name in METRICS if name not in short)


def test_units_of_reading_comprehension() -> None:
    assert units("《红楼梦》，约3.5 km (Mr. Smith's)") == [
        "红",
        "楼",
        "梦",
        "约",
        "3.5",
        "km",
        "(",
        "mr.",
        "smith",
        "'s",
        ")",
    ]
    assert f1("天安门在北京", ["北京天安门"]) == pytest.approx(2 * (3 / 6) * (3 / 5) / (3 / 6 + 3 / 5)), (
        "a run, not a bag"
    )
    assert exact_match("《北京》。", ["北京"]) == 1
    assert exact_match("", ["。"]) == 0
    assert f1("", ["北京"]) == 0


@pytest.mark.skipif(not SHARED, reason="GLMEXP_SHARED does not name the folder with oracles/cmrc2018")
def test_cmrc_scores_are_those_of_the_official_script() -> None:
    folder = Path(SHARED or "") / "oracles" / "cmrc2018"
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    official = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    for one in rows:
        assert f1(one["prediction"], one["answers"]) == pytest.approx(one["f1"], abs=1e-9), one["id"]
        assert exact_match(one["prediction"], one["answers"]) == one["em"], one["id"]
    total = official["total"]
    assert total == len(rows) + official["skipped"]
    assert 100 * sum(f1(one["prediction"], one["answers"]) for one in rows) / total == pytest.approx(
        official["f1"], abs=1e-9
    )
    assert 100 * sum(exact_match(one["prediction"], one["answers"]) for one in rows) / total == pytest.approx(
        official["em"], abs=1e-9
    )
