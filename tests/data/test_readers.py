from __future__ import annotations

import json
from pathlib import Path

import pytest

from glmexp.config.data_schema import Columns
from glmexp.config.errors import DataError

from .fakes import ANY, named, pairs, read_rows

ALPACA = named(prompt="instruction", input="input", answer="output")


def write(folder: Path, text: str | bytes, name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


def lines(*rows: object) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def refuse(path: str, columns: Columns = ANY, **settings: object) -> str:
    with pytest.raises(DataError) as caught:
        read_rows(path, columns, **settings)
    return caught.value.report()


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte_order_mark"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize("form", ["lines", "array", "indented"])
def test_one_file_in_every_form_gives_the_same_rows(tmp_path: Path, mark: bytes, end: str, form: str) -> None:
    rows = [{"prompt": "一\u2028二\u0085", "response": "甲\n乙"}, {"prompt": "三", "response": "丙"}]
    text = (
        lines(*rows) if form == "lines" else json.dumps(rows, ensure_ascii=False, indent=2 if form == "indented" else 0)
    )
    result = read_rows(write(tmp_path, mark + text.replace("\n", end).encode()), ANY)
    assert [(row.prompt, row.answer) for row in result.rows] == [("一\u2028二\u0085", "甲\n乙"), ("三", "丙")]
    assert ": 2 rows read, 2 used, 0 dropped; adgen (prompt, response); sha256 " in result.report[0]


def test_rows_of_an_array_know_the_line_they_begin_on(tmp_path: Path) -> None:
    row = '{"prompt": "a",\n "response": "b"}'
    text = f"[\n {row},\n\n {row}, {row}]"
    assert [row.line for row in read_rows(write(tmp_path, text), ANY).rows] == [2, 5, 6]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("instruction", "output"),
        ("prompt", "response"),
        ("prompt", "answer"),
        ("question", "answer"),
        ("query", "response"),
        ("content", "summary"),
    ],
)
def test_usual_columns_are_found(tmp_path: Path, prompt: str, answer: str) -> None:
    result = read_rows(write(tmp_path, lines({prompt: "q", answer: "a", "extra": 1})), ANY)
    assert [(row.prompt, row.answer) for row in result.rows] == [("q", "a")]
    assert "; not used: extra; " in result.report[0]


def test_further_material_stands_below_the_instruction(tmp_path: Path) -> None:
    first = {"instruction": "sum", "output": "3"}
    rows = [
        first,
        {"instruction": "sum", "input": "1 2", "output": "3"},
        {"instruction": "", "input": "x", "output": "y"},
    ]
    assert [row.prompt for row in read_rows(write(tmp_path, lines(*rows)), ANY).rows] == ["sum", "sum\n1 2", "x"]


def test_one_named_column_is_enough(tmp_path: Path) -> None:
    path = write(tmp_path, lines({"ask": "q", "output": "a", "prompt": "not this"}))
    result = read_rows(path, named(prompt="ask"))
    assert [(row.prompt, row.answer) for row in result.rows] == [("q", "a")]


def test_named_columns_that_are_missing_list_those_found(tmp_path: Path) -> None:
    path = write(tmp_path, lines({"prompt": "q", "response": "a"}))
    assert refuse(path, named(prompt="content", answer="summary")) == (
        "2 data errors:\n"
        f"  data.columns.prompt: 'content' is not a column of {path}: its columns are prompt, response\n"
        "    -> did you mean data.columns.prompt=prompt?\n"
        f"  data.columns.answer: 'summary' is not a column of {path}: its columns are prompt, response\n"
        "    -> did you mean data.columns.answer=response?"
    )


def test_unknown_columns_name_the_options(tmp_path: Path) -> None:
    path = write(tmp_path, lines({"a": "q", "b": "a"}))
    assert refuse(path) == (
        "data error:\n"
        f"  {path}: cannot tell the question and the answer among its columns a, b\n"
        "    -> set data.columns.prompt and data.columns.answer"
    )


@pytest.mark.parametrize(
    ("columns", "listed", "fix"),
    [
        (
            ("指令", "输入", "回答"),
            "指令, 输入, 回答",
            "did you mean data.columns.prompt=指令 data.columns.input=输入 data.columns.answer=回答?",
        ),
        (
            ("instruction", "ouput"),
            "instruction, ouput",
            "did you mean data.columns.prompt=instruction data.columns.answer=ouput?",
        ),
        (
            ("Instruction", "output "),
            "Instruction, 'output '",
            "did you mean data.columns.prompt=Instruction data.columns.answer=\"'output '\"?",
        ),
        (
            ("ｉnstruction", "output"),
            "ｉnstruction, output",
            "did you mean data.columns.prompt=ｉnstruction data.columns.answer=output?",
        ),
        (("instruction", "b"), "instruction, b", "set data.columns.prompt and data.columns.answer"),
    ],
)
def test_columns_called_nearly_as_usual_are_proposed_as_they_are_typed(
    tmp_path: Path, columns: tuple[str, ...], listed: str, fix: str
) -> None:
    path = write(tmp_path, lines(dict.fromkeys(columns, "x")))
    assert refuse(path) == (
        f"data error:\n  {path}: cannot tell the question and the answer among its columns {listed}\n    -> {fix}"
    )


def test_empty_answers_are_dropped_and_counted_with_their_lines(tmp_path: Path) -> None:
    rows = [
        {"instruction": "1", "input": None, "output": "早"},
        {"instruction": "2", "input": "", "output": None},
        {"instruction": "3", "input": "", "output": ""},
        {"instruction": "4", "input": "", "output": "  \n "},
        {"instruction": "5", "input": ""},
        {"instruction": " ", "input": "", "output": "x"},
        {"instruction": "7", "input": "", "output": "晚"},
    ]
    path = write(tmp_path, lines(*rows))
    result = read_rows(path, ALPACA)
    assert [row.line for row in result.rows] == [1, 7]
    assert result.report[0].startswith(
        f"{path}: 7 rows read, 2 used, 5 dropped (empty answer: lines 2, 3, 4, 5; empty prompt: line 6); "
        "adgen (instruction, input, output); sha256 "
    )


def test_a_file_without_any_answer_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, lines(*({"prompt": str(number), "response": ""} for number in range(12))))
    assert refuse(path) == (
        f"data error:\n  {path}: no example with an answer is left "
        "(0 of 12; empty answer: lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more)"
    )


def test_answers_that_are_not_text_are_refused_with_their_lines(tmp_path: Path) -> None:
    values = ["fine", {"pens": 3}, ["x"], 4, True]
    path = write(tmp_path, lines(*({"prompt": "q", "response": value} for value in values)))
    way_out = "\n    -> write it as text in double quotes\n  "
    assert refuse(path) == (
        "4 data errors:\n  "
        f"{path}:2: 'response' must be text, found an object{way_out}"
        f"{path}:3: 'response' must be text, found a list{way_out}"
        f"{path}:4: 'response' must be text, found a number{way_out}"
        f"{path}:5: 'response' must be text, found true or false\n    -> write it as text in double quotes"
    )


def test_broken_lines_are_named_with_the_reason_five_at_a_time(tmp_path: Path) -> None:
    path = write(tmp_path, lines({"prompt": "q", "response": "a"}) + '{"prompt": "q",}\n' * 8)
    report = refuse(path)
    reason = "broken JSON: Illegal trailing comma before end of object" if "Illegal" in report else "broken JSON: "
    assert f"{path}:2: {reason}" in report
    assert f"{path}:6: {reason}" in report
    assert f"{path}:7" not in report
    assert report.endswith(f"{path}: and 3 more, 8 problems in all")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[\n{"prompt": "q", "response": "a"}\n{"prompt": "q"}]', 3),
        ('[\n{"prompt": "q", "response": "a"},\n{"prompt": q}]', 3),
        ('[\n{"prompt": "q", "response": "a"}\n]\n{}', 4),
        ('[\n{"prompt": "q", "response": "a"}\n', 3),
    ],
    ids=["no_comma", "bad_value", "text_behind", "not_closed"],
)
def test_a_broken_array_is_named_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    path = write(tmp_path, text, "rows.json")
    assert f"{path}:{line}: broken JSON: " in refuse(path)


@pytest.mark.parametrize("indent", [1, None])
def test_rows_inside_one_object_are_found(tmp_path: Path, indent: int | None) -> None:
    path = write(tmp_path, json.dumps({"data": [{"prompt": "q", "response": "a"}]}, indent=indent), "rows.json")
    assert pairs(read_rows(path)) == [("q", "a")]


def test_an_object_that_only_looks_like_squad_s_is_told_so(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"paragraphs": [{"prompt": "q", "response": "a"}]}), "rows.json")
    assert "an object with 'paragraphs' is read as SQuAD's, and none in it has 'paragraphs'" in refuse(path)


def test_rows_of_an_array_on_one_line_are_named_by_their_number(tmp_path: Path) -> None:
    rows = [{"instruction": "q", "output": "a"}, {"output": "a"}]
    path = write(tmp_path, json.dumps(rows), "rows.json")
    assert f"{path}:1 (record 2): the row has no 'instruction'" in refuse(path)


def test_rows_of_several_forms_are_each_read_in_their_own(tmp_path: Path) -> None:
    rows = [
        {"instruction": "1", "output": "a"},
        {"messages": [{"role": "user", "content": "2"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "3", "response": "c"},
        {"conversations": [{"from": "human", "value": "4"}, {"from": "gpt", "value": "d"}]},
    ]
    read = read_rows(write(tmp_path, lines(*rows)))
    assert pairs(read) == [("1", "a"), ("2", "b"), ("3", "c"), ("4", "d")]
    assert (
        "forms: 1 rows alpaca (instruction, output), 1 rows messages (messages), 1 rows adgen (prompt, response), "
        "1 rows sharegpt (conversations)"
    ) in read.report[0]


def test_with_a_chosen_form_rows_of_another_one_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, lines({"instruction": "q", "output": "a"}, {"prompt": "q", "response": "a"}))
    assert refuse(path, format="alpaca") == (
        f"data error:\n  {path}:2: the row has no 'instruction': its columns are prompt, response, "
        "and alpaca (instruction, input, output, system, history) is expected\n    -> put rows of different forms into "
        "files of their own, or leave data.format and data.columns to be found"
    )


def test_text_that_is_not_utf8_is_named_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "天"}'.encode("gb18030"))
    assert f"{path}:1: not UTF-8 (line 1, byte 12: 0xcc)" in refuse(path)
    path = write(tmp_path, b"\xef\xbb\xbf\n\xff", "marked.jsonl")
    assert f"{path}:2: not UTF-8 (line 2, byte 4: 0xff)" in refuse(path)


def test_half_a_character_is_refused_here_and_not_by_the_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "q", "response": "x\\ud83d"}\n')
    assert f"{path}:1: 'response' holds half of a character (\\ud83d at 1)" in refuse(path)


@pytest.mark.parametrize("text", ["", "\n\n  \n", "\ufeff", "[]", "[ \n ]"])
def test_files_without_rows_are_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    assert f"{path}: the " in refuse(path)
    assert "it has no example" in refuse(path)


def test_rows_that_are_not_objects_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, '["a"]\n')
    assert f"{path}:1: a row must be a JSON object, found text" in refuse(path)


def test_wrong_paths_are_shown_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"{tmp_path / 'no.jsonl'}: no such file" in refuse("no.jsonl")
    assert f"{tmp_path}: is a folder" in refuse(".")
    assert "builtin:demo/none.jsonl: no such shipped file" in refuse("builtin:demo/none.jsonl")
