"""Every recorded text, padding, truncation, chat prompt and training row of the three tokenizers, to the id."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from transformers import AutoTokenizer

from glmexp.model.chat import encode_text, join_row, prompt_ids, prompt_text, render_chat
from tests.model.oracles import needs_oracles, records, tokenizer_folder

pytestmark = needs_oracles
VERSIONS = {"v1": "chatglm", "v2": "chatglm2", "v3": "chatglm3"}


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(version: str, tmp_path: Any) -> Any:
    return tokenizer_folder(VERSIONS[version], tmp_path)


def plain(value: Any) -> Any:
    """Tensors and arrays as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def arguments(call: str) -> dict[str, Any]:
    """The keyword arguments of a recorded call such as ``padding=True, max_length=6``."""
    if call == "(no option)":
        return {}
    node = ast.parse(f"f({call})", mode="eval").body
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}


def test_texts_encode_and_decode_as_released(version: str, folder: Any) -> None:
    tokenizers: dict[str, Any] = {}
    texts = [record for record in records(version) if record["kind"] == "text"]
    assert len(texts) >= 86
    for record in texts:
        option = record["option"]
        if option not in tokenizers:
            tokenizers[option] = AutoTokenizer.from_pretrained(folder, **({option: True} if option else {}))
        tokenizer, text = tokenizers[option], record["text"]
        ids, bare = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
        got = {
            "ids": ids,
            "ids_no_special": bare,
            "tokens": tokenizer.tokenize(text),
            "decode": tokenizer.decode(ids),
            "decode_no_special": tokenizer.decode(bare),
            "decode_skip_special_tokens": tokenizer.decode(ids, skip_special_tokens=True),
        }
        assert {name: got[name] for name in got if name in record} == {
            name: record[name] for name in got if name in record
        }, repr(text)


def test_pairs_padding_and_truncation_are_as_released(version: str, folder: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for record in records(version):
        if record["kind"] == "pair":
            assert tokenizer.encode(record["text"], record["pair"]) == record["ids"]
        elif record["kind"] in ("single", "batch", "truncation"):
            text = record["texts"] if "texts" in record else record["text"]
            encoded = tokenizer(text, **arguments(record["call"]))
            assert {name: plain(value) for name, value in encoded.items()} == record["output"], record["call"]


def test_special_tokens_are_as_released(version: str, folder: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (record,) = [record for record in records(version) if record["kind"] == "special"]
    for token, index in record["convert_tokens_to_ids"].items():
        assert tokenizer.convert_tokens_to_ids(token) == index, token
    for index, token in record["id_to_token"].items():
        assert tokenizer.convert_ids_to_tokens(int(index)) == token, index
    for name, value in record["attributes"].items():
        if name == "get_command":
            assert {token: tokenizer.get_command(token) for token in value} == value
        elif name != "len" and not (isinstance(value, dict) and "error" in value):
            assert getattr(tokenizer, name) == value, name


def test_chat_prompts_are_as_released(version: str, folder: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [record for record in records(version) if record["kind"] == "chat"]
    assert chats
    for record in chats:
        if version == "v3":
            messages = [*record["history"], {"role": record["role"], "content": record["query"]}]
        else:
            messages = []
            for question, answer in record["history"]:
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            messages.append({"role": "user", "content": record["query"]})
            assert prompt_text(VERSIONS[version], messages) == record["prompt"]
        assert [prompt_ids(tokenizer, messages)] == record["output"]["input_ids"]


def test_single_messages_are_as_released(version: str, folder: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for record in records(version):
        if record["kind"] == "message":
            message = tokenizer.build_single_message(record["role"], record["metadata"], record["message"])
            assert message == record["ids"]


def test_training_rows_are_those_of_the_released_scripts(version: str, folder: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [record for record in records(version) if record["kind"] == "train"]
    assert rows
    for record in rows:
        if version == "v3":
            row = render_chat(tokenizer, record["conversation"], supervise="all")
        else:
            question = [{"role": "user", "content": record["query"]}]
            prompt = encode_text(tokenizer, prompt_text(VERSIONS[version], question))
            answer = encode_text(tokenizer, record["answer"])
            source, target = record["max_source_length"], record["max_target_length"]
            if version == "v1":
                row = join_row(tokenizer, prompt[: source - 1], answer[: target - 2])
            else:
                row = join_row(tokenizer, prompt[: source - 2], answer[:target])
        fill = len(record["input_ids"]) - len(row.ids)
        assert [*row.ids, *[tokenizer.pad_token_id] * fill] == record["input_ids"]
        assert [*row.labels(), *[-100] * fill] == record["labels"]


def test_a_saved_tokenizer_loads_as_the_same(version: str, folder: Any, tmp_path: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    saved = tmp_path / "saved"
    tokenizer.save_pretrained(saved)
    again = AutoTokenizer.from_pretrained(saved)
    assert type(again) is type(tokenizer)
    text = "介绍一下 [MASK] <|user|> sop\n\n  x"
    assert again.encode(text) == tokenizer.encode(text)
    assert (again.pad_token_id, again.eos_token_id, len(again)) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        len(tokenizer),
    )
