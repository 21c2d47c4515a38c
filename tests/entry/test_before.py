"""What is wrong with files and hub names is told before a run folder is made, at once and by name."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from glmexp.config import folders
from glmexp.config.compose import run_config
from glmexp.config.errors import ArtifactError, ConfigError, DataError
from glmexp.entry.before import check
from glmexp.launcher import hub
from glmexp.model.build import load_tokenizer

BROKEN = '{"prompt": "a", "response": "b"}\n{"prompt": \n'


@pytest.mark.parametrize(
    ("words", "content", "part"),
    [
        (("data.train_file={path}",), BROKEN, ":2: broken JSON"),
        (("entry=trainer", "data.train_file={path}"), '{"x": 1}', "cannot tell the question and the answer"),
        (("entry=smoke", "data.train_file={path}"), '{"prompt": "a", "response": ""}', "no example with an answer"),
        (("entry=inspect", "data.train_file={path}"), "", "the file is empty"),
        (("entry=evaluate", "eval=loss", "data.eval_file={path}"), BROKEN, ":2: broken JSON"),
        (("entry=generate", "generate.prompts_file={path}"), BROKEN, ":2: broken JSON"),
        (("entry=generate", "generate.prompts_file={path}"), '{"x": 1}', "no question among its columns x"),
        (("entry=evaluate", "eval=generate", "eval.generate.prompts_file={path}"), BROKEN, ":2: broken JSON"),
        (("eval=generate", "eval.generate.prompts_file={path}"), '{"x": 1}', "no text 'prompt'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(words: tuple[str, ...], content: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    config = run_config(["tracker=none", *(word.format(path=path) for word in words)])
    with pytest.raises(DataError) as caught:
        check([config, config])
    assert part in caught.value.report()
    assert str(path) in caught.value.report()
    assert len(caught.value.problems) == 1, "once, though several trials read it"


def test_rows_that_may_be_skipped_are(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(BROKEN)
    check([run_config(["tracker=none", f"data.train_file={path}", "data.on_error=skip"])])
    check([run_config(["tracker=none"]), run_config(["entry=generate", "generate.prompts_file=builtin:prompts.jsonl"])])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("method=freeze", "method.num_layers=9"), "method.num_layers: 9 of 4 layers"),
        (("method=freeze", "method.num_layers=null", "method.patterns=[none]"), "'none' matches no parameter"),
        (("method.modules_to_save=[head]",), "'head' matches no module of the model"),
    ],
)
def test_names_that_the_network_has_not(words: tuple[str, ...], part: str) -> None:
    for model in ("tiny", "tiny_qwen2"):
        with pytest.raises(ConfigError) as caught:
            check([run_config(["tracker=none", f"model={model}", *words])])
        assert part in caught.value.report()
    check([run_config(["tracker=none", "method=freeze", "method.num_layers=null", "method.patterns=[output_layer]"])])
    check([run_config(["tracker=none", "method.modules_to_save=[output_layer]"])])


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data\.cache_dir: .*/file is no folder that can be written to"):
        check([run_config(["tracker=none", f"data.cache_dir={tmp_path}/file/cache"])])


@pytest.mark.parametrize("name", ["tiny", "tiny_chatglm", "tiny_qwen2"])
def test_a_tokenizer_with_more_ids_than_the_network_has_rows(name: str, tmp_path: Path) -> None:
    shipped = run_config(["tracker=none", f"model={name}"])
    place = folders.folder_of(shipped.model)
    assert place is not None
    folder = shutil.copytree(place, tmp_path / "checkpoint")
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rows = "vocab_size" if "vocab_size" in content else "padded_vocab_size"
    (folder / "config.json").write_text(json.dumps({**content, rows: 200}), encoding="utf-8")
    one = replace(shipped, model=replace(shipped.model, path=str(folder)))
    tokenizer = load_tokenizer(shipped.model)
    found = f"the tokenizer of {folder} has {len(tokenizer)} ids, and the network of its config.json rows for 200"
    with pytest.raises(ConfigError) as caught:
        check([one, one])
    assert [problem.message for problem in caught.value.problems] == [found]
    with pytest.raises(ArtifactError, match=re.escape(found)):
        load_tokenizer(one.model)  # a rank, for a job's machine and a checkpoint on a hub
    sizes = replace(shipped.model.sizes, vocab_size=200)
    random = replace(shipped, model=replace(shipped.model, init="random", sizes=sizes))
    with pytest.raises(ConfigError, match=f"200 is smaller than the tokenizer's {len(tokenizer)} ids"):
        check([random])
    assert len(tokenizer) - 16 < folders.tokens_in(random.model) <= len(tokenizer), "more would refuse a good folder"


def test_more_held_out_rows_than_a_file_has(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' * 3)
    fits = run_config(["tracker=none", f"data.train_file={path}", "data.holdout=2"])
    check([fits])
    with pytest.raises(DataError) as caught:
        check([replace(fits, data=replace(fits.data, holdout=3))])
    assert caught.value.problems[0].message == (
        f"3 rows cannot be held out of the 3 of {path}: none would be left to train on"
    )


def test_more_held_out_rows_than_a_file_of_several_blocks_has(tmp_path: Path) -> None:
    """Blocks are read up to where a row is left to train on, and no further."""
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt": "a" * 700_000, "response": "b"})] * 4
    path.write_text("\n".join(rows))
    words = ["tracker=none", f"data.train_file={path}", "data.eval_file=null"]
    with pytest.raises(DataError, match=f"4 rows cannot be held out of the 4 of {path}"):
        check([run_config([*words, "data.holdout=4"])])
    check([run_config([*words, "data.holdout=3"])])
    path.write_text("\n".join([*rows[:3], "broken"]))
    check([run_config([*words, "data.holdout=1"])])


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An address where nobody listens, no proxy, and nothing that was fetched before."""
    from huggingface_hub import constants

    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr(hub, "fetched", lambda name: name == "Qwen/Qwen2-7B-Instruct")
    return "http://127.0.0.1:9"


def test_a_hub_that_does_not_answer_is_named_within_seconds(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        check([run_config(["tracker=none", "model=chatglm3", "data.train_file=hub:nobody/nothing:train"])])
    assert time.monotonic() - began < 2 * hub.ANSWER_S
    model, data = caught.value.problems
    assert model.message == (
        f"THUDM/chatglm3-6b is no folder here and was not fetched before, and the hub ({endpoint}) does not answer"
    )
    assert model.fix.startswith("model.path=FOLDER of the checkpoint")
    assert (data.where, data.fix[:8]) == ("hub:nobody/nothing:train", "download")
    check([run_config(["tracker=none", "model=chatglm3", "model.init=random"])])
    assert not capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    check([run_config(["tracker=none", "model=qwen2"])])
    assert "Qwen/Qwen2-7B-Instruct is taken as it was fetched before" in capsys.readouterr().err
    assert constants.HF_HUB_OFFLINE, "nobody asks again, for half a minute a file"


def test_offline_nothing_is_asked(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="and HF_HUB_OFFLINE=1 keeps from asking the hub"):
        check([run_config(["entry=evaluate", "tracker=none", "model=chatglm3"])])
    check([run_config(["entry=evaluate", "tracker=none", "model=qwen2"])])
