"""The pre-training script on a cut corpus, and the shipped tiny models."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import glmexp.model  # noqa: F401  registers the ChatGLM classes
from glmexp.model.pretrain import HOME, IGNORE, RECORD, RowMaker, Schedule, facts_known, pad, pretrain, rate
from glmexp.model.tiny.corpus import Knowledge, chats, load_knowledge, tokenizer_text, training_chats
from glmexp.model.tiny.recipes import CHATGLM_VOCABULARY, RECIPES, VOCABULARY

# Share of the facts that each shipped model must know.
SHIPPED = {"tiny": 0.98, "tiny_chatglm": 0.98, "tiny_chatglm2": 0.95, "tiny_qwen2": 0.98}
QUICK = Schedule(passes=2, warmup_steps=5, max_steps=20, threads=1)
CHAT = (("“苹果”用英语怎么说？", "apple"),)


@pytest.fixture(scope="module")
def knowledge() -> Knowledge:
    return load_knowledge()


@pytest.fixture(scope="module")
def cut(knowledge: Knowledge) -> Knowledge:
    """Every third fact: enough text to fill the vocabularies."""
    return replace(knowledge, facts=knowledge.facts[::3])


@pytest.fixture
def torch_settings():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_loss_falls_and_the_folder_loads(name: str, tmp_path: Path, cut: Knowledge, torch_settings: None) -> None:
    record = pretrain(name, tmp_path, QUICK, cut)
    assert record["steps"] == QUICK.max_steps
    assert record["final_loss"] < 0.9 * record["first_loss"]
    assert json.loads((tmp_path / RECORD).read_text(encoding="utf-8")) == record

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(model) is type(RECIPES[name].network())
    assert len(tokenizer) <= model.config.vocab_size == (CHATGLM_VOCABULARY if name == "tiny_chatglm" else VOCABULARY)
    ids, labels = pad([RowMaker(tokenizer).encode(CHAT)])
    assert model(input_ids=ids, labels=labels).loss < record["first_loss"]


def test_the_same_seed_gives_the_same_weights(tmp_path: Path, cut: Knowledge, torch_settings: None) -> None:
    few = replace(cut, facts=cut.facts[::4])
    files = []
    for folder in ("first", "second"):
        pretrain("tiny_qwen2", tmp_path / folder, replace(QUICK, max_steps=3), few)
        files.append((tmp_path / folder / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_every_fact_is_said_in_every_style(cut: Knowledge) -> None:
    turns = [turn for chat in chats(cut, random.Random(0), two_turns=0.0) for turn in chat]
    assert len(turns) == 5 * len(cut.facts)
    for fact in cut.facts:
        answers = [answer for question, answer in turns if any(question.startswith(q) for q in fact.questions)]
        assert answers.count(fact.sentence) >= 2
        assert answers.count(fact.answer) >= 2


def test_a_pass_depends_on_the_seed_only(cut: Knowledge) -> None:
    first, again, other = (list(training_chats(cut, random.Random(seed))) for seed in (1, 1, 2))
    assert first == again != other
    assert any(chat[0][0] in ("请随便写一行字。", "Write any line of text.") for chat in first)


def test_an_answer_and_its_end_are_labels_and_the_question_is_not() -> None:
    for name in SHIPPED:
        tokenizer = AutoTokenizer.from_pretrained(HOME / name)
        ids, labels = RowMaker(tokenizer).encode((*CHAT, ("“狗”用英语怎么说？", "dog")))
        learned = [index for index, label in zip(ids, labels, strict=True) if label != IGNORE]
        text = tokenizer.decode(learned, skip_special_tokens=True)
        assert "dog" in text
        assert "apple" in text or name in ("tiny_chatglm", "tiny_chatglm2")
        assert "狗" not in text
        assert labels[-1] == ids[-1] == tokenizer.eos_token_id


def test_the_learning_rate_warms_up_and_ends_at_the_floor() -> None:
    schedule = Schedule(warmup_steps=10, floor=0.02)
    shares = [rate(step, 100, schedule) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == pytest.approx(shares[9], rel=0.05)
    assert shares[-1] == pytest.approx(0.02)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_model_knows_its_facts(name: str, knowledge: Knowledge) -> None:
    folder = HOME / name
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert record["facts"] == len(knowledge.facts)
    assert facts_known(model, tokenizer, knowledge) == pytest.approx(record["facts_known"], abs=0.01)
    assert record["facts_known"] >= SHIPPED[name]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_tokenizer_is_the_one_of_the_text(name: str, knowledge: Knowledge, tmp_path: Path) -> None:
    shipped = AutoTokenizer.from_pretrained(HOME / name)
    made = RECIPES[name].tokenizer(tokenizer_text(knowledge, 0), tmp_path)
    assert made.get_vocab() == shipped.get_vocab()
    assert sorted(SHIPPED) == sorted(RECIPES)
    for text in ("“苹果”用英语怎么说？", "What is 3 plus 4?", "囍 🙂 ñ"):
        assert made.encode(text) == shipped.encode(text)


def test_the_shipped_models_stay_small() -> None:
    sizes = {name: sum(file.stat().st_size for file in (HOME / name).iterdir()) for name in SHIPPED}
    assert all(size <= 4_000_000 for size in sizes.values()), sizes
    assert sum(file.stat().st_size for file in HOME.rglob("*") if file.is_file()) <= 10_000_000
