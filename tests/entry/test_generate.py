"""What was trained answers as it did when it was trained, from whatever form it lies in; and nothing that does not fit
is asked."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from glmexp.config.compose import run_config
from glmexp.config.entries import GenerateSection
from glmexp.config.errors import ConfigError, DataError
from glmexp.config.schema import ArtifactSection, RunConfig
from glmexp.engine import kv_cache
from glmexp.engine.decode import Choosing, decode
from glmexp.entry import chat, export, generate, serving
from glmexp.entry import sources as export_sources
from glmexp.entry.conversation import Speaker, TooLongError, fitted
from glmexp.entry.serving import Served
from glmexp.model.build import load_network
from tests.config.helpers import asked, refusal
from tests.engine.cells import configure
from tests.entry.test_export import logits, moved, trained
from tests.ranks import run_on_ranks

KINDS = ("tiny", "tiny_chatglm", "tiny_chatglm2", "tiny_qwen2")
METHODS = ("lora", "ptuning", "freeze", "full")
PROMPTS = ("你好，请介绍一下你自己。", "The opposite of hot is?", "12 + 30 = ?")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@cache
def composed(kind: str = "tiny") -> RunConfig:
    """Composing is most of a test's time: each model once."""
    return run_config(["entry=generate", "precision=fp32", f"model={kind}"])


def settings(**changes: Any) -> GenerateSection:
    return replace(composed().generate, **changes)


def speaker(kind: str = "tiny", source: Path | None = None, random: bool = False, **changes: Any) -> Speaker:
    config = composed(kind)
    model = replace(config.model, init="random") if random else config.model
    artifact = ArtifactSection(None if source is None else str(source))
    config = replace(config, model=model, artifact=artifact)
    return Speaker(serving.load(serving.find(config), config), settings(**changes), rows=1)


def answered(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """The lines that a run in this process leaves."""
    folder.mkdir()
    assert generate.run(replace(composed(), generate=settings(**changes)), folder) == 0
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]


def prompts_file(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(file)


CHEAP = (("tiny", "lora"), ("tiny_chatglm", "ptuning"), ("tiny_chatglm2", "freeze"), ("tiny_qwen2", "full"))
CELLS = [
    pytest.param(kind, method, marks=[] if (kind, method) in CHEAP else [pytest.mark.matrix])
    for kind in KINDS
    for method in METHODS
]


@pytest.mark.parametrize(("kind", "method"), CELLS)
def test_artifact_and_export_answer_as_what_was_trained(kind: str, method: str, tmp_path: Path) -> None:
    """float32, greedy: merging adds up in another order, which no answer may show. Qwen2's prefix cannot be merged."""
    words = (f"model={kind}", f"method={method}")
    run, config = trained(tmp_path / "run", *words), configure(*words)
    live = Served(serving.find(composed(kind)), moved(config), torch.float32, "single", None)
    expected = answers_of(Speaker(live, settings(max_new_tokens=24), rows=1))
    sources = {"artifact": run}
    if (kind, method) != ("tiny_qwen2", "ptuning"):
        sources["export"] = tmp_path / "whole" / "artifact"
        sources["export"].mkdir(parents=True)
        asked_for = replace(config, artifact=ArtifactSection(str(run)))
        export.write_whole(export_sources.of(asked_for), asked_for, sources["export"])
    for name, source in sources.items():
        found = speaker(kind, source, max_new_tokens=24)
        assert answers_of(found) == expected, name
        assert float((logits(found.served.model) - logits(live.model)).abs().max()) < 1e-4 < move(live.model, config)


def answers_of(one: Speaker) -> list[str]:
    """To three prompts, one by one."""
    prompts = [fitted(one.served.template, [user(text)], one.settings) for text in PROMPTS]
    return [answer.text for prompt in prompts for answer in one.answers([prompt])]


def move(live: Any, config: RunConfig) -> float:
    """How far the training moved the logits: else the test would not see that nothing was loaded."""
    base = load_network(config.model, torch.float32).eval()
    return float((logits(base) - logits(live)).abs().max())


def test_prompts_together_are_answered_as_alone(tmp_path: Path) -> None:
    """In the file's order, with what the rows bring; pads in front change nothing."""
    rows = [{"prompt": text, "id": number, "answer": "x"} for number, text in enumerate(PROMPTS)]
    file = prompts_file(tmp_path, *rows)
    alone = answered(tmp_path / "alone", prompts_file=file, max_new_tokens=24)
    assert alone == answered(tmp_path / "together", prompts_file=file, max_new_tokens=24, batch_size=3)
    assert [(row["index"], row["prompt"], row["id"], row["expected"]) for row in alone] == [
        (number, text, str(number), "x") for number, text in enumerate(PROMPTS)
    ]
    assert {row["finish_reason"] for row in alone} <= {"stop", "length"}
    cut = answered(tmp_path / "cut", prompts_file=file, max_new_tokens=2)
    assert [(row["finish_reason"], row["new_tokens"]) for row in cut] == [("length", 2)] * 3


def shared_out(folder: Path, file: str) -> None:
    config = replace(composed(), generate=settings(prompts_file=file, max_new_tokens=8))
    generate.answer_file(config, serving.find(config), folder / "answers.jsonl")
    drawn = replace(config, generate=replace(config.generate, batch_size=2, temperature=5.0))
    generate.answer_file(drawn, serving.find(drawn), folder / "drawn.jsonl")


def test_ranks_share_the_prompts_and_one_file_has_all_answers_in_order(tmp_path: Path) -> None:
    texts = (*PROMPTS, "a?", "a?", "a?", "a?")
    file = prompts_file(tmp_path, *({"prompt": text} for text in texts))
    (tmp_path / "alone").mkdir()
    shared_out(tmp_path / "alone", file)
    run_on_ranks(shared_out, tmp_path, file, folder=tmp_path)
    for name in ("answers.jsonl", "drawn.jsonl"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (tmp_path / "alone" / name).read_text(encoding="utf-8")
    answers = [json.loads(line)["answer"] for line in (tmp_path / "drawn.jsonl").open(encoding="utf-8")]
    assert len(set(answers)) == len(texts), "a prompt again and again gets another answer each time"
    assert not list(tmp_path.glob("*.jsonl.*"))


def test_the_oldest_rounds_make_room_and_the_system_text_stays() -> None:
    template, turns = serving.find(composed()).template, []
    for number in range(6):
        turns += [user(f"question {number}?"), {"role": "assistant", "content": f"answer {number}."}]
    messages = [{"role": "system", "content": "short"}, *turns, user("last?")]
    whole = len(template.prompt(messages))
    found = fitted(template, messages, settings(max_new_tokens=16, max_length=whole + 15))
    assert found.dropped == 2
    assert [message["content"] for message in found.messages[:2]] == ["short", "question 1?"]
    assert found.room == 16
    alone = len(template.prompt([messages[0], messages[-1]]))
    found = fitted(template, messages, settings(max_new_tokens=16, max_length=alone + 3))
    assert (found.dropped, found.room) == (12, 3)
    with pytest.raises(TooLongError, match=f"{alone} tokens of a question leave no room"):
        fitted(template, messages, settings(max_new_tokens=16, max_length=alone))


def test_a_prompt_with_less_room_is_answered_alone() -> None:
    short, long = user("a?"), user("word " * 30)
    narrow = settings(batch_size=2, max_length=150, max_new_tokens=120)
    template = serving.find(composed()).template
    prompts = [fitted(template, [question], narrow) for question in (short, short, long, short, short)]
    assert prompts[2].room < 120 == prompts[0].room
    assert generate.batched(prompts, narrow) == [[0, 1], [2], [3, 4]]


def test_what_cannot_fit_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = prompts_file(tmp_path, {"prompt": "a?"}, {"prompt": "word " * 200}, {"prompt": "word " * 300})
    with pytest.raises(DataError) as caught:
        answered(tmp_path / "long", max_length=64, max_new_tokens=16, prompts_file=file)
    said = caught.value.report()
    assert "prompts.jsonl:2: " in said
    assert "prompts.jsonl:3: " in said
    assert "tokens of a question leave no room for an answer in generate.max_length=64" in said
    with pytest.raises(ConfigError, match=r"generate.max_length: 4096 tokens, and the network was made for 2048"):
        speaker(max_length=4096)
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: 2048 * 100)
    with pytest.raises(ConfigError) as refused:
        speaker(max_length=128, max_new_tokens=8)
    assert refused.value.report().splitlines()[1].strip() == (
        "generate.max_length: 128 tokens need 0.00 GB for keys and values (2 x 4 layers x 2 groups x 32 x 4 bytes = "
        "2,048 bytes a token), and 0.00 GB are free beside the weights: room for 100 tokens a row"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_formula_is_what_the_cache_takes(kind: str) -> None:
    one = speaker(kind)
    ids = torch.tensor([one.served.template.prompt([user(PROMPTS[0])])])
    with torch.no_grad():
        cache = one.served.model(input_ids=ids, use_cache=True).past_key_values
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert sum(tensor.numel() * tensor.element_size() for tensor in held) == one.cache.bytes(1, ids.shape[1])


def test_nothing_of_the_checkpoint_s_own_generation_config_is_used() -> None:
    """Released ones hold a repetition penalty, which changes greedy answers too."""
    one = speaker("tiny_qwen2", max_new_tokens=24)
    prompt = fitted(one.served.template, [user(PROMPTS[0])], one.settings)
    (before,) = one.answers([prompt])
    one.served.model.generation_config.repetition_penalty = 9.0
    assert one.answers([prompt]) == [before]
    assert one.served.model.generation_config.repetition_penalty == 9.0, "it is the checkpoint's, and is put back"
    penalised = speaker("tiny_qwen2", repetition_penalty=9.0, max_new_tokens=24)
    assert penalised.answers([prompt]) != [before]


def test_drawing_follows_the_seed_and_the_nucleus() -> None:
    one = speaker()
    template, model = one.served.template, one.served.model
    ids = torch.tensor([template.prompt([user(PROMPTS[0])])])

    def drawn(seed: int, choosing: Choosing) -> list[int]:
        torch.manual_seed(seed)
        new = decode(
            model,
            ids,
            torch.ones_like(ids),
            max_new_tokens=12,
            stop_ids=template.stop_ids,
            pad_id=template.pad_id,
            choosing=choosing,
        )
        return new[0].tolist()

    assert drawn(0, Choosing(5.0)) == drawn(0, Choosing(5.0)) != drawn(1, Choosing(5.0))
    greedy = drawn(0, Choosing())
    assert drawn(0, Choosing(5.0, top_k=1)) == greedy == drawn(1, Choosing(0.7, top_p=1e-6))


class Terminal:
    """A chat in this process; what is printed is kept."""

    def __init__(self, **changes: Any) -> None:
        self.out, self.notes, self.rows = io.StringIO(), io.StringIO(), []
        self.chat = chat.Chat(speaker(**changes), self.rows.append, self.out, self.notes)

    def hear(self, *lines: str) -> bool:
        return all(self.chat.hear(line) for line in lines)


def test_a_chat_keeps_its_history_until_reset_and_prints_what_it_keeps() -> None:
    here = Terminal(max_new_tokens=24)
    assert here.hear("你好", "", "again?", "/reset", "你好", "/system 你是诗人。", "你好", "/system", "你好")
    answers = [row["answer"] for row in here.rows]
    assert here.out.getvalue().splitlines() == "\n".join(answers).splitlines()
    tokens = [row["prompt_tokens"] for row in here.rows]
    assert tokens[1] > tokens[0] + here.rows[0]["new_tokens"] - 2, "the first round is part of the second"
    assert tokens[0] == tokens[2] == tokens[4] < tokens[3], "reset forgets; a system text counts, and goes again"
    assert [row["index"] for row in here.rows] == [0, 1, 2, 3, 4]
    assert not here.hear("/quit")
    assert here.hear("/sistem", "//reset is a word")
    assert "(/sistem is no command)" in here.notes.getvalue()
    assert here.rows[-1]["prompt"] == "/reset is a word"


def test_a_chat_says_which_turns_it_leaves_out_and_goes_on_behind_a_question_that_is_too_long() -> None:
    here = Terminal(max_length=80, max_new_tokens=20)
    assert here.hear("what is a cat?", "what is a dog?", "what is a cow?", "word " * 100, "and?")
    said = here.notes.getvalue()
    assert "turns are left out: generate.max_length=80 holds the conversation and generate.max_new_tokens=20" in said
    assert "leave no room for an answer in generate.max_length=80; it was not asked)" in said
    assert [row["prompt"] for row in here.rows] == ["what is a cat?", "what is a dog?", "what is a cow?", "and?"]
    assert sum(row["dropped_turns"] for row in here.rows) >= 2


def test_ctrl_c_ends_the_answer_and_what_was_said_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Terminal(random=True, max_new_tokens=200)
    seen: list[int] = []
    tokens = here.chat.tokens

    def press(ids: list[int]) -> None:
        tokens(ids)
        seen.append(ids[0])
        here.chat.interrupted = len(seen) >= 5

    monkeypatch.setattr(here.chat, "tokens", press)
    assert here.hear("你好")
    (row,) = here.rows
    assert (row["finish_reason"], row["new_tokens"]) == ("interrupted", len(seen))
    assert len(seen) <= 6
    assert here.chat.messages[-1] == {"role": "assistant", "content": row["answer"]}
    assert "(interrupted: what was said stays in the conversation)" in here.notes.getvalue()


def test_lines_of_a_pipe_are_answered_and_only_answers_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("你好\n/reset\n12 + 30 = ?\n".encode())))
    rows = answered(tmp_path / "run", max_new_tokens=24)
    printed = capsys.readouterr()
    assert printed.out == "".join(f"{row['answer']}\n" for row in rows)
    assert [row["prompt"] for row in rows] == ["你好", "12 + 30 = ?"]
    assert "(a new conversation)" in printed.err
    assert "bytes a token" in printed.err


def test_a_pipe_s_byte_order_mark_is_no_part_of_a_question_and_other_encodings_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = "12 + 30 = ?\n".encode("utf-8-sig") + "你好\n".encode("gb18030") + "你好\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(sent)))
    rows = answered(tmp_path / "run", max_new_tokens=4)
    assert [row["prompt"] for row in rows] == ["12 + 30 = ?", "你好"]
    assert "(line 2 is not UTF-8; it was not asked: iconv -f gb18030 -t utf-8, or the like, before)" in (
        capsys.readouterr().err
    )


def test_settings_of_training_have_no_effect_and_are_named() -> None:
    words = ("zero=stage3", "optim.lr=1", "train.max_steps=3", "data.packing=true", "eval=none", "tracker=none")
    assert asked("entry=generate", *words, "method=full").warnings == [
        "data.packing, optim.lr, train.max_steps, zero: without effect under entry=generate",
        "method: without effect: without artifact.path the base alone answers",
    ]
    assert asked("entry=generate").warnings == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["generate.max_length=9"], "generate.max_length: without effect under entry=train"),
        (["entry=generate", "generate.top_p=0.5"], "generate.top_p: without effect: generate.temperature is null"),
        (["entry=generate", "generate.seed=3"], "generate.seed: without effect"),
        (["entry=generate", "generate.prompts_file=gone.jsonl"], "generate.prompts_file: gone.jsonl is no file"),
        (["entry=generate", "generate.output=gone/a.jsonl"], "generate.output: "),
        (["entry=generate", "generate.max_new_tokens=2048"], "leave no room for a prompt in generate.max_length=2048"),
        (["entry=generate", "generate.batch_size=2"], "generate.batch_size: 2 without effect in a chat"),
        (["-m", "entry=generate", "generate.temperature=0.5,1"], "trials share no terminal to chat at"),
        (["entry=generate", "launcher=slurm"], "a chat needs a terminal, and a job has none"),
        (["entry=generate", "launcher.nproc=2"], "launcher.nproc: a chat is one process, not 2"),
    ],
)
def test_what_generate_does_not_read_or_cannot_do_is_refused(words: list[str], part: str) -> None:
    assert part in refusal(*words)
