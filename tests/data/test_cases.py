"""Faults from practice end to end: the command line as a user types it, on small files of our own.

What needs no process is tested at the function: ``test_readers``, ``test_causes``, ``test_templates``, ``test_cache``,
``test_packing``; here are the exit codes, the order of things (data before the model) and what is shown.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli import SHORT, forked, glmexp

INSPECT = ("entry=inspect", "run.name=look")


def file(folder: Path, name: str, *rows: object) -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(count: int, **more: object) -> list[dict[str, object]]:
    return [{"prompt": f"第{number}盏灯？", "response": f"灯{number}亮。", **more} for number in range(count)]


def learned(out: str) -> list[str]:
    return re.findall(r"^  learned: '(.*)'$", out, re.MULTILINE)


def only_run(folder: Path) -> Path:
    (config,) = folder.glob("outputs/*/*/config.yaml")
    return config.parent


def test_inspect_shows_what_is_learned_and_leaves_a_record(tmp_path: Path) -> None:
    path = file(
        tmp_path, "dates.jsonl", *({"prompt": "哪天？", "response": day} for day in ("2024-05-01", "007", "NA"))
    )
    page = tmp_path / "page.html"
    done = forked(*INSPECT, f"data.train_file={path}", f"inspect.html={page}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert learned(done.stdout) == [rf"\n {text}</s>" for text in ("2024-05-01", "007", "NA")]
    assert "3 rows read, 3 used, 0 dropped" in done.stdout
    assert "attention mask sums to" in done.stdout
    assert "padding is id [0]" in done.stdout
    assert "3 learned end tokens" in done.stdout
    record = json.loads((only_run(tmp_path) / "data.json").read_text())
    assert list(record["files"]) == [path]
    assert page.read_text(encoding="utf-8").count('<p class="tokens">') == 3
    assert not (only_run(tmp_path) / "artifact").exists()


def test_a_history_is_input_and_the_last_answer_is_learned(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "history.jsonl",
        {"prompt": "三？", "response": "丙。", "history": [["一？", "甲。"], ["二？", "乙。"]]},
        {"prompt": "四？", "response": "丁。", "history": []},
    )
    done = forked(*INSPECT, f"data.train_file={path}", "data.columns.history=history", folder=tmp_path)
    assert learned(done.stdout) == [r"\n 丙。</s>", r"\n 丁。</s>"]
    first, second = re.findall(r"^  input:   '(.*)'$", done.stdout, re.MULTILINE)
    asked = [first.index(text) for text in ("一？", "甲。", "二？", "乙。", "三？")]
    assert asked == sorted(asked)
    assert second.count("<|user|>") == 1


def test_an_edited_file_is_shown_anew_although_its_size_and_time_are_the_same(tmp_path: Path) -> None:
    import os

    prints = []
    for answer in ("旧词", "新词"):
        path = file(tmp_path, "rows.jsonl", {"prompt": "词？", "response": answer})
        os.utime(path, (1_000_000, 1_000_000))
        done = forked(*INSPECT, f"data.train_file={path}", "run.dir=look", "run.overwrite=true", folder=tmp_path)
        assert learned(done.stdout) == [rf"\n {answer}</s>"]
        prints.append(json.loads((tmp_path / "look" / "data.json").read_text())["files"])
    assert prints[0] != prints[1]


def test_what_looks_wrong_is_said(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "odd.jsonl",
        {"prompt": "a", "response": "知道了。<|im_end|>"},
        {"prompt": "b", "response": "锟斤拷"},
        {"prompt": "c", "response": "None"},
        {"prompt": "d", "response": "d"},
        {"prompt": "e", "response": "1"},
        {"prompt": "e", "response": "2"},
        {"prompt": "f", "response": "x "},
    )
    held = file(tmp_path, "held.jsonl", {"prompt": "f", "response": "y"})
    words = (f"data.train_file={path}", f"data.eval_file={held}", "inspect.rows=0")
    done = glmexp(*INSPECT, *words, folder=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "sentencepiece" in loaded
    assert "torch" not in loaded, "inspect is quick since it loads no torch"
    out = done.stdout
    for reason in (
        "marks of a chat template in the text (they are learned as plain text): 1 of 7 (place 1: '知道了。<|im_end|>')",
        "characters that a wrong encoding leaves: 1 of 7 (place 2:",
        "the answer is only a word for nothing: 1 of 7 (place 3:",
        "the answer repeats the question: 1 of 7 (place 4:",
        "the same question with another answer: 1 of 7 (place 6:",
        "the answer starts or ends with white space: 1 of 7 (place 7:",
        "1 of 1 held-out rows ask what is trained on (place 1)",
    ):
        assert reason in out


@pytest.mark.parametrize(
    ("content", "words", "says"),
    [
        (None, [], "{path} is not there"),
        ("", [], "{path}: the file is empty: it has no example"),
        ("\n\n  \n", [], "{path}: the file is empty: it has no example"),
        (
            '{"prompt": "q", "response": ""}\n' * 4,
            [],
            "no example with an answer is left (0 of 4; empty answer: lines 1",
        ),
        ('{"prompt": "q", "response": "a"}\n', ["data.format=adgen"], "data.columns.answer: 'summary' is not a column"),
        ('{"prompt": "q", "response": "a",}\n', [], "{path}:1: broken JSON"),
        ('{"prompt": "q", "response": {"a": true}}\n', [], "{path}:1: 'response' must be text, found an object"),
    ],
    ids=["no_file", "empty", "blank_lines", "no_answers", "columns", "broken", "object"],
)
def test_mistakes_in_data_end_before_a_model_is_built(
    content: str | None, words: list[str], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    done = forked(*SHORT, "launcher=inprocess", *words, f"data.train_file={path}", folder=tmp_path)
    assert done.returncode == 2
    assert says.format(path=path) in done.stderr
    assert "Traceback" not in done.stderr
    assert "parameters" not in done.stdout


def test_text_in_the_system_code_page_names_the_option_and_then_trains(tmp_path: Path) -> None:
    path = tmp_path / "gbk.jsonl"
    path.write_bytes('{"prompt": "天上下什么？", "response": "下雨。"}\n'.encode("gb18030"))
    words = (*SHORT, f"data.train_file={path}")
    done = forked(*words, folder=tmp_path)
    assert done.returncode == 2
    assert "not UTF-8 (line 1, byte 12: 0xcc)" in done.stderr
    assert "data.encoding=gb18030" in done.stderr
    done = forked(*words, "data.encoding=gb18030", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 row read, 1 used" in done.stdout


def test_over_long_rows_are_cut_or_dropped_with_a_word_and_every_loss_is_a_number(tmp_path: Path) -> None:
    long = [
        {"prompt": "请读下面这段话。" + "院子里有一棵树。" * 80 + "问？", "response": f"答{number}。"}
        for number in range(4)
    ]
    path = file(tmp_path, "rows.jsonl", *long, *rows(2))
    words = ("data.max_length=64", "train.micro_batch_size=1", "train.max_steps=6")
    done = forked(*SHORT, *words, f"data.train_file={path}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 of 6 rows longer than data.max_length=64 tokens: the prompt is cut (lines 1, 2, 3, 4)" in done.stdout
    metrics = [json.loads(line) for line in (only_run(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 6
    assert all(one["train/loss"] > 0 and one["train/supervised_tokens"] >= 1 for one in metrics)


def test_fewer_rows_than_a_batch_still_take_a_step(tmp_path: Path) -> None:
    path = file(tmp_path, "one.jsonl", *rows(1))
    words = ("train.max_steps=null", "train.epochs=1", "train.micro_batch_size=4", "train.grad_accum=8")
    done = forked(*SHORT, *words, f"data.train_file={path}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the last step of an epoch has 1 of 32 rows" in done.stdout
    assert "tensors moved" in done.stdout


def test_only_held_out_rows_can_be_scored_and_not_trained_on(tmp_path: Path) -> None:
    path = file(tmp_path, "held.jsonl", *rows(3))
    words = ("tracker=none", "precision=fp32", f"data.eval_file={path}", "data.train_file=null")
    done = forked("entry=train", *words, folder=tmp_path)
    assert done.returncode == 2
    assert "data.train_file: is null" in done.stderr
    done = forked("entry=evaluate", "eval=[loss,generate,rouge]", "eval.generate.max_new_tokens=1",
                  "eval.rouge.max_new_tokens=1", *words, folder=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = (only_run(tmp_path) / "metrics.jsonl").read_text().splitlines()
    assert 0 < json.loads(line)["eval/loss/loss"] < 20
    assert (only_run(tmp_path) / "samples" / "step-0.jsonl").exists()
    assert "3 answers" in done.stdout
    assert "eval at step" not in done.stdout, "nobody knows how long a base was trained"


def test_padding_with_the_end_token_hides_no_answers_end_and_typed_marks_open_no_turn(tmp_path: Path) -> None:
    typed = "<|im_end|>\n<|im_start|>assistant\n[gMASK]sop"
    six = [{"prompt": f"题{length}？{typed}", "response": "答" * length + typed} for length in (1, 2, 4, 8, 16, 30)]
    path = file(tmp_path, "six.jsonl", *six)
    words = ("model=tiny_qwen2", "model.pad_token=eos", "train.micro_batch_size=6", "inspect.rows=6")
    done = forked(*INSPECT, *words, f"data.train_file={path}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "without effect" not in done.stderr
    rows = re.findall(r"^  tokens: (.*)$", done.stdout, re.MULTILINE)
    assert len(rows) == 6
    for row in rows:
        opened, closed = row.count("'<|im_start|>':1278"), row.count("'<|im_end|>':1279")
        assert (opened, closed) == (3, 3), "system, user and assistant once each"
        assert row.rstrip().endswith("*'<|im_end|>':1279")
        assert row.count("*'<|im_end|>':1279") == 1
    assert "padding is id [1279]; 6 learned end tokens" in done.stdout
    assert sum(map(len, (re.findall(r":\d+", row) for row in rows))) == int(
        re.search(r"attention mask sums to (\d+)", done.stdout)[1]  # type: ignore[index]
    )


def test_a_file_of_prompts_alone_needs_no_rows(tmp_path: Path) -> None:
    prompts = file(tmp_path, "prompts.jsonl", {"prompt": "灯？"}, {"prompt": "lamp?"})
    words = ("entry=evaluate", "eval=generate", f"eval.generate.prompts_file={prompts}", "data.eval_file=null")
    done = forked(*words, "eval.generate.max_new_tokens=2", "launcher=inprocess", "tracker=none", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = (only_run(tmp_path) / "samples" / "step-0.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["prompt"] for line in answers] == ["灯？", "lamp?"]
    assert json.loads((only_run(tmp_path) / "data.json").read_text())["files"] == {}


@pytest.mark.parametrize("words", [("data.packing=true", "zero=stage3"), ("data.group_by_length=true",)], ids=str)
def test_packed_and_grouped_runs_on_two_ranks(words: tuple[str, ...], tmp_path: Path) -> None:
    path = file(tmp_path, "rows.jsonl", *rows(40))
    done = forked(*SHORT, *words, "launcher.nproc=2", "data.max_length=64", f"data.train_file={path}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (only_run(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    # Blank rows that fill the last step up are padding, too.
    assert all(0 <= one["data/padding_share"] < 1 and one["perf/data_s"] >= 0 for one in metrics)
    assert ("packed: 40 examples" in done.stdout) == ("data.packing=true" in words)
