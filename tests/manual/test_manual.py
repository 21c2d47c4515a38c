"""Every block of the manual is executed: commands are composed and checked, some are run, files are written.

One folder and one order for all pages, as a reader would go through them; the faults of all pages are told at once.
What each fence asks for is said in ``blocks.py``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import warm
from tests.cli import environment
from tests.manual.blocks import CODE, COMMANDS, ROOT, SHELL, Block, blocks, pages, skipped, spans
from tests.manual.commands import commands, fault, syntax
from tests.model.samples import released_config

ALPACA = [{"instruction": f"第 {n} 盏灯是什么颜色？", "input": "", "output": "红色"} for n in range(200)]
CMRC = {
    "version": "v1.0",
    "data": [
        {
            "title": "灯",
            "paragraphs": [
                {
                    "id": "L",
                    "context": "第一盏灯是红色的，第二盏灯是蓝色的。",
                    "qas": [
                        {
                            "id": f"L_{n}",
                            "question": "第一盏灯是什么颜色？",
                            "answers": [{"text": "红色", "answer_start": 6}],
                        }
                        for n in range(20)
                    ],
                }
            ],
        }
    ],
}
QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
RELEASED = {
    "chatglm-6b": released_config("chatglm") | {"max_sequence_length": 2048},
    "chatglm2-6b": released_config("chatglm2") | {"seq_length": 32768},
    "chatglm3-6b": released_config("chatglm3") | {"seq_length": 8192},
    "Qwen2-7B-Instruct": QWEN2,
}


REAL = ("README.md", "docs/quickstart.md", "CONTRIBUTING.md")
"""Pages whose commands start as a reader's do, with nothing loaded before."""


def prepare(folder: Path) -> None:
    """What the manual takes for granted in the reader's folder: rows, folders of released models."""
    for name in ("rows.json", "eval.json"):
        (folder / name).write_text(json.dumps(ALPACA, ensure_ascii=False), encoding="utf-8")
    for name in ("rows.jsonl", "my.jsonl"):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in ALPACA), encoding="utf-8")
    adgen = [{"content": "类型#裤", "summary": "一条裤子"}] * 200
    (folder / "adgen_train.json").write_text("".join(f"{json.dumps(row)}\n" for row in adgen), encoding="utf-8")
    turns = [{"messages": [{"role": "user", "content": "在吗？"}, {"role": "assistant", "content": "在。"}]}] * 200
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in turns), encoding="utf-8")
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500" / "latest").touch()
    for name in ("cmrc2018_train.json", "cmrc2018_dev.json"):
        (folder / name).write_text(json.dumps(CMRC, ensure_ascii=False), encoding="utf-8")
    for name, content in RELEASED.items():
        model = folder / "models" / name
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(content), encoding="utf-8")
        for file in ("model.safetensors", "tokenizer_config.json"):
            (model / file).touch()


def runs(block: Block, folder: Path) -> str | None:
    """Run a block as it stands. Returns what it printed where it fails."""
    words = ["bash", "-euo", "pipefail", "-c"] if block.language in SHELL else [sys.executable, "-c"]
    env = environment(PYTHONPATH=str(ROOT))
    if block.page not in REAL:
        env["PATH"] = f"{Path(warm.python()).parent}:{env['PATH']}"
    done = subprocess.run(
        [*words, block.text], cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    return None if done.returncode == 0 else f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"


def faults(block: Block, folder: Path, known: dict[tuple[str, ...], str | None]) -> Iterator[str]:
    """What is wrong with a block. known: what was found for the same block on another page."""
    key = (block.language, *block.words, block.text)
    if key not in known:
        known[key] = "\n".join(filter(None, _judged(block, folder)))
    if known[key]:
        yield f"{block.place}: {known[key]}"


def _judged(block: Block, folder: Path) -> Iterator[str | None]:
    target = block.asked("file")
    if block.language not in CODE:
        return
    if block.skipped is not None:
        yield None if len(block.skipped.split()) > 2 else "skip: needs a reason"
        return
    if target is not None:
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        (folder / target).write_text(block.text + "\n", encoding="utf-8")
    if "run" in block.words:
        yield runs(block, folder)
    elif block.language in SHELL:
        yield syntax(block.text)
        for words in commands(block.text):
            yield fault(words, int(block.asked("gpu") or 0), block.asked("memory"))
    elif block.language == "python":
        compile(block.text, block.place, "exec")
    elif block.language == "yaml":
        yaml.safe_load(block.text)
    elif block.language == "json":
        json.loads(block.text)


def test_every_block_and_every_command_of_the_manual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: pytest.RecordProperty
) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    known: dict[tuple[str, ...], str | None] = {}
    wrong: list[str] = []
    everything = [one for path in pages() for one in blocks(path)]
    for block in everything:
        wrong.extend(faults(block, tmp_path, known))
    for block in (one for path in pages() for one in spans(path)):
        wrong.extend(faults(block, tmp_path, known))
    assert wrong == [], "\n".join(wrong)
    assert sum("run" in block.words for block in everything) >= 3
    assert len(known) > 80


def test_chinese_pages_have_the_commands_of_the_english_ones() -> None:
    chinese = sorted((ROOT / "docs/zh").glob("*.md"))
    assert len(chinese) >= 7
    for path in chinese:
        english = ROOT / "docs" / path.name
        here, there = ([b for b in blocks(one) if b.language in CODE] for one in (path, english))
        assert [(b.language, b.words, b.text) for b in here] == [(b.language, b.words, b.text) for b in there], (
            path.name
        )


def test_what_is_not_executed_is_listed_with_its_reason() -> None:
    page = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    assert skipped() in page, "run: python -m tests.manual.blocks"


def links(path: Path) -> set[Path]:
    """Files that a page links to. A link to nothing fails here."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    found = set()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith("#"):
            file = (path.parent / target.partition("#")[0]).resolve()
            assert file.exists(), f"{path.relative_to(ROOT)} links to {target}, which is not there"
            found.add(file)
    return found


def test_every_page_is_two_clicks_from_the_front_page() -> None:
    first = links(ROOT / "README.md")
    second = {file for page in first if page.suffix == ".md" for file in links(page)}
    lost = [str(path.relative_to(ROOT)) for path in pages()[1:] if path.resolve() not in first | second]
    assert lost == []


def test_anchors_that_pages_link_to_are_there() -> None:
    def anchors(path: Path) -> set[str]:
        titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S), re.M)
        return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}

    for path in pages():
        for target, anchor in re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if "://" not in target:
                file = (path.parent / target).resolve() if target else path
                assert anchor in anchors(file), f"{path.relative_to(ROOT)}: {target}#{anchor}"


QUOTED = (
    "there is no such key",
    "has no option",
    "without effect",
    "holds a run",
    "matches no linear layer",
    "is no folder",
    "keys fit nothing in the model",
    "logits differ from the live model's",
    "the base is another one",
    "was trained with another chat template or vocabulary",
)


@pytest.mark.parametrize("page", ["docs/troubleshooting.md", "docs/zh/troubleshooting.md"])
def test_messages_that_the_manual_quotes_are_those_of_the_program(page: str) -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "glmexp").glob("*/*.py"))
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [words for words in QUOTED if words not in source or words not in text] == []


def test_commands_stand_in_fences() -> None:
    """An indented block has no place to say that it is run, or why not."""
    loose = [block.place for path in pages() for block in blocks(path) if not block.fenced]
    assert loose == [], f"{COMMANDS} in indented blocks"


def test_no_page_names_a_place_of_its_writer() -> None:
    words = [f"/{place}" for place in ("root/", "work/", "tmp/brief")]
    assert [str(path) for path in pages() for word in words if word in path.read_text(encoding="utf-8")] == []
