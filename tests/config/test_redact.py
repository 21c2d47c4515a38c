"""No secret reaches config.yaml, a tracker, a failure record or a log, and the run that needs it still gets it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from glmexp.config import redact
from glmexp.config.load import dump, read, write
from glmexp.launcher import failures
from tests.config.helpers import config, refusal


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("WANDB_API_KEY", True),
        ("HF_TOKEN", True),
        ("api_key", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("password", True),
        ("add_tokens", False),
        ("max_new_tokens", False),
        ("num_virtual_tokens", False),
        ("num_key_value_heads", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("monkey", False),
        ("pad_token", False),
        ("model.pad_token", False),
    ],
)
def test_a_name_tells_a_secret(name: str, secret: bool) -> None:
    assert redact.is_secret(name) is secret


def test_a_configuration_is_written_without_secrets_and_read_back_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config("launcher.env.HF_TOKEN=hf_abcdefgh", "launcher.env.HTTPS_PROXY='http://me:pass1234@proxy:80'")
    monkeypatch.setenv(redact.VARIABLE, "{}")
    redact.hand_on(dump(asked))
    write(asked, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "hf_abcdefgh" not in text
    assert "pass1234" not in text
    assert "@proxy:80" in text
    assert read(tmp_path / "config.yaml") == asked, "the run's own processes get what the file lacks"
    monkeypatch.delenv(redact.VARIABLE)
    assert read(tmp_path / "config.yaml").launcher.env["HF_TOKEN"] == redact.HIDDEN


def test_what_a_run_without_secrets_hands_on_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(redact.VARIABLE, "{}")
    redact.hand_on(dump(config("launcher.env.NCCL_DEBUG=INFO", "run.name=a")))
    assert redact.VARIABLE not in redact.os.environ


def test_texts_lose_values_of_variables_urls_and_assignments() -> None:
    environ = {"WANDB_API_KEY": "0123456789abcdef", "HF_TOKEN": "x"}
    told = redact.text(
        "key 0123456789abcdef; https://me:word@host/x; api_key=abc123 'password': 'p4ss'; max_new_tokens=12 x",
        environ,
    )
    assert told == "key <hidden>; https://<hidden>@host/x; api_key=<hidden> 'password': '<hidden>'; max_new_tokens=12 x"


def test_a_vocabularys_special_token_is_no_secret() -> None:
    asked = config("model=tiny_qwen2", "model.pad_token=eos")
    assert redact.redacted(dump(asked))["model"]["pad_token"] == "eos"
    told = "model.pad_token: 'eos2' is no token; pad_token=eos2"
    assert redact.text(told + " hf_token=eos2", {}) == f"{told} hf_token=<hidden>"


def test_an_empty_secret_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(redact.VARIABLE, "{}")
    redact.hand_on(dump(config("launcher.env.HF_TOKEN=''")))
    assert redact.text("step 3") == "step 3"


def test_failures_and_logs_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "s3cr3t-value")
    try:
        raise RuntimeError("refused: s3cr3t-value")
    except RuntimeError as error:
        failure = failures.of_exception(0, error)
    assert "s3cr3t-value" not in failure.message + failure.trace
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "header %s", ("s3cr3t-value",), None)
    assert redact.Formatter("%(message)s").format(record) == "header <hidden>"


def test_a_resumed_run_must_be_given_its_secrets_again(tmp_path: Path) -> None:
    project = "tracker.project='http://me:pass1234@host/p'"
    write(config(project), tmp_path / "config.yaml")
    words = (f"train.resume={tmp_path}", "launcher.nproc=1")
    assert "tracker.project: is a secret" in refusal(*words)
    assert "tracker.project" not in refusal(*words, project), "given, only the checkpoint is missing here"
