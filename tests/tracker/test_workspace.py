"""The saved workspace of a sweep, as far as it exists without a server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from glmexp.tracker.workspace import main, workspace


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the library's own
def test_the_three_panels_name_what_runs_record() -> None:
    made = workspace("team", "glmexp", "ranks", ["method.rank", "zero.reduce_bucket_size"], "eval/loss/loss")
    view = made._to_model().model_dump(by_alias=True)  # what save() sends; there is no public way to see it
    (section,) = view["spec"]["section"]["panelBankConfig"]["sections"]
    lines, curves, points = (panel["config"] for panel in section["panels"])
    assert [one["accessor"] for one in lines["columns"]] == [
        "config:method.value.rank",
        "config:zero.value.reduce_bucket_size",
        "summary:perf/tokens_per_s",
        "summary:eval/loss/loss",
    ]
    assert (curves["xAxis"], curves["metrics"], curves["groupBy"]) == ("step", ["eval/loss/loss"], "method.value.rank")
    assert points["zAxis"] == "summary:mem/peak_bytes"
    assert "'ranks'" in str(made.runset_settings.filters)


def test_without_a_login_or_the_library_the_way_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "NETRC", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--entity", "team"]) == 2
    assert capsys.readouterr().err.endswith("nobody is logged in\n    -> wandb login, or WANDB_API_KEY\n")
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["--entity", "team"]) == 2
    assert "pip install wandb-workspaces, or add the panels by hand: docs/wandb.md" in capsys.readouterr().err
