"""Faults in real data files, each from a different cause: what people see elsewhere, and what is done here.

``symptom`` is what the fault looks like in other tools. A case either gives rows (question, answer) with a report, or a
refusal that names the place and the way out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from glmexp.config.errors import DataError

from .fakes import named, pairs, read_rows


@dataclass(frozen=True)
class Case:
    name: str
    symptom: str
    content: bytes
    rows: list[tuple[str, str]] | None = None
    """None: the file is refused."""
    says: tuple[str, ...] = ()
    """In the report or in the refusal; FILE stands for the path."""
    file: str = "rows.jsonl"
    settings: dict[str, Any] = field(default_factory=dict)


def jsonl(*rows: Any) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def turns(*pairs_: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in pairs_]}


def chat(*pairs_: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in pairs_]}


QA = {"prompt": "q", "response": "a"}
SKIP = {"on_error": "skip"}
CASES = [
    Case(
        "text_that_looks_like_numbers",
        "leading zeros, exponents, NA and true become 7, 1000.0, NaN and True",
        jsonl(
            *({"prompt": text, "response": text} for text in ("007", "1e3", "NA", "true", "2024-05-01", "None", "-0"))
        ),
        [(text, text) for text in ("007", "1e3", "NA", "true", "2024-05-01", "None", "-0")],
    ),
    Case(
        "csv_cells_that_look_like_numbers",
        "pandas reads 007 as 7 and NA as missing: the label is '7' or the row is dropped",
        b"prompt,response\n007,NA\n1e3,true\n2024-05-01,1.50\n",
        [("007", "NA"), ("1e3", "true"), ("2024-05-01", "1.50")],
        file="rows.csv",
    ),
    Case(
        "csv_line_end_inside_a_cell",
        "splitting by lines tears the answer apart and shifts all columns",
        b'prompt,response\r\n"q1","line one\nline, two"\r\nq2,a2\r\n',
        [("q1", "line one\nline, two"), ("q2", "a2")],
        file="rows.csv",
    ),
    Case(
        "csv_quotes_inside_a_cell",
        "doubled quotes stay doubled in the label",
        b'prompt,response\nq,"he said ""yes"""\n',
        [("q", 'he said "yes"')],
        file="rows.csv",
    ),
    Case(
        "csv_unquoted_comma",
        "the rest of the answer lands in a column without a name and is lost",
        b"prompt,response\nq,yes, of course\n",
        says=("FILE:2: broken CSV: 3 cells, the header has 2", "put cells that hold a comma"),
        file="rows.csv",
    ),
    Case(
        "csv_open_quote",
        "a missing closing quote swallows the rest of the file into one cell",
        b'prompt,response\nq1,a1\nq2,"a2\nq3,a3\n',
        says=("FILE:3: broken CSV: ", "every quotation mark"),
        file="rows.csv",
    ),
    Case(
        "csv_semicolons",
        "spreadsheets of many countries write semicolons: one column 'prompt;response' is found",
        b"prompt;response\nq, with comma;a\n",
        [("q, with comma", "a")],
        file="rows.csv",
    ),
    Case(
        "tsv",
        "a .tsv file is read with commas",
        b"prompt\tresponse\nq, x\ta\n",
        [("q, x", "a")],
        file="rows.tsv",
    ),
    Case(
        "csv_with_mark_and_gbk_free_header",
        "the first column is called '\\ufeffprompt'",
        b"\xef\xbb\xbfprompt,response\r\nq,a\r\n",
        [("q", "a")],
        file="rows.csv",
    ),
    Case(
        "csv_header_only",
        "a run over zero rows ends at once",
        b"prompt,response\n",
        says=("FILE: the file is empty: it has no example",),
        file="rows.csv",
    ),
    Case(
        "csv_doubled_header",
        "of two columns with one name, one is lost without a word",
        b"prompt,response,response\nq,a,b\n",
        says=("FILE: its header names response twice",),
        file="rows.csv",
    ),
    Case(
        "csv_history_as_json_text",
        "the history cell is put into the prompt as brackets and quotes",
        b'prompt,response,history\nq,a,"[[""h1"",""h2""]]"\n',
        [("q", "a")],
        says=("adgen (prompt, response, history)",),
        file="rows.csv",
    ),
    Case(
        "utf16",
        "Notepad's 'Unicode' is UTF-16: a codec error at byte 0",
        jsonl(QA).decode().encode("utf-16"),
        says=("not UTF-8 (line 1, byte 0: 0xff)", "its byte order mark is that of utf-16: data.encoding=utf-16"),
    ),
    Case(
        "utf16_named",
        "with the right encoding, lines are still cut at the byte 0x0a inside of characters",
        jsonl({"prompt": "上", "response": "一\u0a0a"}, QA).decode().encode("utf-16"),
        [("上", "一\u0a0a"), ("q", "a")],
        settings={"encoding": "utf-16"},
    ),
    Case(
        "big5",
        "traditional Chinese in the system code page",
        jsonl({"prompt": "這是什麼", "response": "開門"}).decode().encode("big5"),
        [("這是什麼", "開門")],
        settings={"encoding": "big5"},
    ),
    Case(
        "gbk_in_the_middle",
        "one pasted line is GBK, the rest UTF-8: the loader names byte 0 or nothing",
        jsonl(QA, QA) + '{"prompt": "天", "response": "地"}\n'.encode("gb18030") + jsonl(QA),
        says=("FILE:3: not UTF-8 (line 3, byte 78: 0xcc)", "data.encoding="),
    ),
    Case(
        "windows_line_ends",
        "every label ends with a carriage return",
        jsonl(QA, QA).replace(b"\n", b"\r\n"),
        [("q", "a"), ("q", "a")],
    ),
    Case(
        "line_separators_in_text",
        "str.splitlines tears JSON lines at U+2028 and U+0085",
        jsonl({"prompt": "a\u2028b", "response": "c\u0085d"}),
        [("a\u2028b", "c\u0085d")],
    ),
    Case(
        "line_comment",
        "a // comment in JSON lines: 'Extra data' without a place",
        jsonl(QA) + b"// more to come\n" + jsonl(QA),
        [("q", "a"), ("q", "a")],
        says=("3 rows read, 2 used, 1 dropped (skipped, broken JSON: Expecting value: line 2)",),
        settings=SKIP,
    ),
    Case(
        "two_objects_in_a_line",
        "concatenated downloads lack a line end between two files; the second object is lost",
        jsonl(QA) + jsonl(QA).strip() + jsonl(QA),
        says=("FILE:2: broken JSON: Extra data (character 33)",),
    ),
    Case(
        "file_cut_off",
        "the download broke off inside the last line",
        jsonl(QA, QA)[:-8],
        [("q", "a")],
        says=("1 dropped (skipped, broken JSON: ", ": line 2)"),
        settings=SKIP,
    ),
    Case(
        "array_cut_off",
        "an array without its end loses its last element in streaming readers",
        b'[\n{"prompt": "q", "response": "a"},\n{"prompt": "q", "resp',
        says=("FILE:3: broken JSON: ",),
        file="rows.json",
        settings=SKIP,
    ),
    Case(
        "jsonl_called_json",
        "the name ends in .json and a JSON parser reports 'Extra data: line 2 column 1'",
        jsonl(QA, QA),
        [("q", "a"), ("q", "a")],
        file="rows.json",
    ),
    Case(
        "array_called_jsonl",
        "the name ends in .jsonl and holds an array: one row with a list",
        json.dumps([QA, QA]).encode(),
        [("q", "a"), ("q", "a")],
    ),
    Case(
        "rows_under_a_key",
        "{'data': [...]} is read as one row with a column 'data'",
        json.dumps({"version": 1, "data": [QA, QA]}, indent=2).encode(),
        [("q", "a"), ("q", "a")],
        file="rows.json",
    ),
    Case(
        "a_number_as_answer",
        "5 is trained as the text of a Python number, or fails in the tokenizer",
        jsonl({"prompt": "2+3", "response": 5}),
        says=("FILE:1: 'response' must be text, found a number", "write it as text in double quotes"),
    ),
    Case(
        "a_number_as_answer_skipped",
        "the same, where the user wants the rest",
        jsonl({"prompt": "2+3", "response": 5}, QA),
        [("q", "a")],
        says=("1 dropped (skipped, 'response' must be text, found a number: line 1)",),
        settings=SKIP,
    ),
    Case(
        "half_an_emoji",
        "a lone surrogate: the tokenizer dies with a codec error hours later",
        b'{"prompt": "q", "response": "x\\ud83d"}\n',
        says=("FILE:1: 'response' holds half of a character (\\ud83d at 1)",),
    ),
    Case(
        "column_missing_in_a_shard",
        "a column that only some rows have is taken for missing in all",
        jsonl({"instruction": "1", "output": "a"}, {"instruction": "2", "input": "more", "output": "b"}),
        [("1", "a"), ("2\nmore", "b")],
        says=("forms: 1 rows alpaca (instruction, output), 1 rows alpaca (instruction, input, output)",),
        settings={"format": "alpaca"},
    ),
    Case(
        "named_column_with_another_case",
        "KeyError after the model was loaded",
        jsonl({"Prompt": "q", "Response": "a"}),
        says=("data.columns.prompt: 'prompt' is not a column of FILE: its columns are Prompt, Response",),
        settings={"columns": named(prompt="prompt", answer="response")},
    ),
    Case(
        "answer_first_conversation",
        "the greeting of the assistant is learned as an answer to nothing",
        jsonl(turns(("gpt", "hello"), ("human", "q"), ("gpt", "a"))),
        [("q", "a")],
        says=("starts with an answer: that turn left out (line 1)",),
    ),
    Case(
        "unanswered_end",
        "the last question is learned as if it were an answer, or with an empty one",
        jsonl(turns(("human", "q"), ("gpt", "a"), ("human", "and?"))),
        [("q", "a")],
        says=("ends without an answer: the last turns left out (line 1)",),
    ),
    Case(
        "answer_in_two_parts",
        "two answers in a row: 'roles must alternate', or the second one is lost",
        jsonl(chat(("user", "q"), ("assistant", "a"), ("assistant", "b"))),
        [("q", "a\nb")],
        says=("turns of one speaker in a row: joined (line 1)",),
    ),
    Case(
        "empty_answer_inside",
        "an empty answer inside a conversation is learned as 'say nothing'",
        jsonl(turns(("human", "1"), ("gpt", "a"), ("human", "2"), ("gpt", " "), ("human", "3"), ("gpt", "c"))),
        [("1", "a")],
        says=("an empty turn: the conversation ends before it (line 1)",),
    ),
    Case(
        "only_questions",
        "a conversation without any answer: all labels are -100, the loss is nan",
        jsonl(turns(("human", "1"), ("human", "2")), turns(("human", "q"), ("gpt", "a"))),
        [("q", "a")],
        says=("2 rows read, 1 used, 1 dropped (no answer: line 1)",),
    ),
    Case(
        "system_in_the_middle",
        "a system text between turns is glued to a question",
        jsonl(chat(("user", "q"), ("system", "be brief"), ("assistant", "a")), chat(("user", "q"), ("assistant", "a"))),
        [("q", "a")],
        says=("1 dropped (a system text inside the conversation: line 1)",),
    ),
    Case(
        "content_in_parts",
        "content as a list of parts is trained as its Python form",
        jsonl(chat(("user", [{"type": "text", "text": "q"}]), ("assistant", "a"))),
        [("q", "a")],
    ),
    Case(
        "picture_in_a_message",
        "the picture's address is learned as text",
        jsonl(chat(("user", [{"type": "image_url", "image_url": "x"}]), ("assistant", "a")), QA),
        [("q", "a")],
        says=("turn 1 of 'messages' has a part of type 'image_url'; only text can be learned: line 1",),
    ),
    Case(
        "turn_without_speaker",
        "KeyError: 'from'",
        jsonl({"conversations": [{"from": "human", "value": "q"}, {"value": "a"}]}),
        says=("FILE:1: turn 2 of 'conversations' must have 'from' and 'value', found an object with value",),
    ),
    Case(
        "messages_as_json_text",
        "the list of turns is a string (exported from a table): every character becomes a turn",
        jsonl({"messages": json.dumps(chat(("user", "q"), ("assistant", "a"))["messages"])}),
        [("q", "a")],
        settings={"format": "messages"},
    ),
    Case(
        "history_pair_without_answer",
        "the pair is put in with an empty answer",
        jsonl({"prompt": "q", "response": "a", "history": [["h", ""], ["x", "y"]]}),
        [("q", "a")],
        says=("history pairs without text: left out (line 1)",),
    ),
    Case(
        "history_of_single_texts",
        "a flat list of texts: questions and answers change places",
        jsonl({"prompt": "q", "response": "a", "history": ["h1", "h2"]}),
        says=("FILE:1: entry 1 of 'history' is no pair of question and answer",),
    ),
    Case(
        "question_without_answer_in_the_text",
        "SQuAD 2's unanswerable questions give IndexError: list index out of range",
        json.dumps(
            {
                "data": [
                    {
                        "paragraphs": [
                            {
                                "context": "A long enough English text.",
                                "qas": [
                                    {"id": "1", "question": "q?", "answers": [], "is_impossible": True},
                                    {"id": "2", "question": "r?", "answers": [{"text": "text", "answer_start": 22}]},
                                ],
                            }
                        ]
                    }
                ]
            }
        ).encode(),
        [
            (
                "Read the text and answer the question with words from it.\n\n"
                "A long enough English text.\n\nQuestion: r?",
                "text",
            )
        ],
        says=("2 rows read, 1 used, 1 dropped (no answer in the text: record 1)",),
        file="squad.json",
    ),
    Case(
        "empty_question_in_a_comprehension_set",
        "CMRC 2018's own trial set has an empty question: it is answered all the same, or the file is refused",
        json.dumps(
            {
                "context": "A long enough English text.",
                "qas": [
                    {"id": "x", "question": "", "answers": [{"text": "text"}]},
                    {"id": "y", "question": "r?", "answers": [{"text": "text"}]},
                ],
            }
        ).encode(),
        [
            (
                "Read the text and answer the question with words from it.\n\n"
                "A long enough English text.\n\nQuestion: r?",
                "text",
            )
        ],
        says=("2 rows read, 1 used, 1 dropped (empty prompt: line 1 (question x))",),
    ),
    Case(
        "flat_questions_of_the_hub",
        "answers as {'text': [...]}: the label is the Python form of a dict",
        jsonl(
            {
                "id": "7",
                "context": "中文的一段足够长的短文在这里，二十多个字。",
                "question": "哪里？",
                "answers": {"text": ["这里"], "answer_start": [11]},
            }
        ),
        [
            (
                "阅读下面的短文，用短文中的原话回答问题。\n\n中文的一段足够长的短文在这里，二十多个字。\n\n问题：哪里？",
                "这里",
            )
        ],
        says=("cmrc2018",),
    ),
    Case(
        "nothing_but_brackets",
        "an empty array ends as 'division by zero'",
        b"[]",
        says=("FILE: the file is empty: it has no example",),
    ),
    Case(
        "a_list_a_line",
        "[question, answer] lists: TypeError: list indices must be integers",
        b'["q", "a"]\n["r", "b"]\n'.replace(b'["q"', b' \n"x"\n["q"', 1),
        says=("FILE:2: a row must be a JSON object, found text",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fault(case: Case, tmp_path: Path) -> None:
    path = tmp_path / case.file
    path.write_bytes(case.content)
    settings = dict(case.settings)
    if case.rows is None:
        with pytest.raises(DataError) as caught:
            read_rows(str(path), **settings)
        text = caught.value.report()
    else:
        read = read_rows(str(path), **settings)
        assert pairs(read) == case.rows
        text = "\n".join(read.report)
    for words in case.says:
        assert words.replace("FILE", str(path)) in text


def test_every_case_has_a_cause_of_its_own() -> None:
    assert len(CASES) >= 30
    assert len({case.name for case in CASES}) == len({case.symptom for case in CASES}) == len(CASES)
