"""Ranks meet or say who did not come; a port that is taken is named at once; what rank 0 has goes to all."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from glmexp.config.errors import ConfigError
from glmexp.launcher import environment, folder, handover, rendezvous, start
from glmexp.launcher.ranks import Outside


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store of an earlier test, and no trace of this one."""
    monkeypatch.setattr(rendezvous, "_store", None)
    monkeypatch.setattr(rendezvous, "set_defaults", lambda: None)


def _as(rank: int, world_size: int, port: int) -> dict[str, str]:
    variables: dict[str, str] = {}
    Outside(rank, world_size, rank, world_size, "127.0.0.1", port).export(variables)
    return variables


def test_a_taken_port_is_refused_with_its_number_and_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} is in use by another process") as caught:
            rendezvous.listening(port, several_machines=False)
        assert "leave it out, and a free one is taken" in str(caught.value)
    free = rendezvous.listening(None, several_machines=False)
    assert free.getsockname()[1] > 0
    free.close()
    several = rendezvous.listening(None, several_machines=True)
    socket.create_connection(("127.0.0.1", several.getsockname()[1])).close()
    several.close()


@pytest.mark.usefixtures("fresh")
def test_a_port_that_an_outside_launcher_gave_and_somebody_holds_is_named() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with environment.variables(_as(0, 2, port)), pytest.raises(ConfigError, match=rf"port {port} is in use"):
            rendezvous.store(timeout_s=1)


@pytest.mark.usefixtures("fresh")
def test_ranks_that_do_not_come_are_named_with_those_that_did() -> None:
    with (
        environment.variables(_as(0, 3, _free_port())),
        pytest.raises(rendezvous.RendezvousError, match=r"rank 1, rank 2 of 3 did not come within"),
    ):
        rendezvous.store(timeout_s=1)


@pytest.mark.usefixtures("fresh")
def test_a_rank_that_finds_no_rank_0_says_where_it_looked() -> None:
    port = _free_port()
    with (
        environment.variables(_as(1, 2, port)),
        pytest.raises(rendezvous.RendezvousError, match=rf"rank 1 found no rank 0 at 127.0.0.1:{port} in \d+ s"),
    ):
        rendezvous.store(timeout_s=1)


@pytest.mark.usefixtures("fresh")
def test_a_machine_without_the_folder_gets_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides in one process over one store; the folder goes away in between."""
    monkeypatch.delenv("GLMEXP_SECRETS", raising=False)
    run = tmp_path / "run"
    run.mkdir()
    (run / folder.CONFIG).write_text("a: 1\n", encoding="utf-8")
    with environment.variables({**_as(0, 1, _free_port())}):
        handover.give(run, timeout_s=20)
        os.environ["WORLD_SIZE"] = "2"
        (run / folder.CONFIG).unlink()
        run.rmdir()
        assert handover.take(timeout_s=20) == run
        assert (run / folder.CONFIG).read_text(encoding="utf-8") == "a: 1\n"


@pytest.mark.usefixtures("fresh")
def test_what_rank_0_fails_of_ends_the_others_with_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import PrefixStore, TCPStore

    from glmexp.config.errors import Problem

    codes: list[object] = []

    def other() -> None:
        try:
            handover.take(timeout_s=20)
        except SystemExit as ended:
            codes.append(ended.code)

    with environment.variables({**_as(0, 1, _free_port())}):
        first = rendezvous.store(timeout_s=20)
        # A client of its own, as another process has: one that waits for a key lets nobody else at it.
        port = int(os.environ["MASTER_PORT"])
        second = PrefixStore("glmexp", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
        thread = threading.Thread(target=other)
        monkeypatch.setattr(
            rendezvous, "store", lambda timeout_s: second if threading.current_thread() is thread else first
        )
        os.environ["WORLD_SIZE"] = "2"
        thread.start()
        with pytest.raises(SystemExit) as ended, handover.giving_up_together():
            raise ConfigError(Problem("optim.lr", "is wrong"))
        thread.join(20)
    assert (ended.value.code, codes) == (2, [2])
    assert "optim.lr: is wrong" in capsys.readouterr().err


def test_a_rank_that_waits_for_rank_0_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(timeout_s: float) -> Path:
        threading.Event().wait(0.2)
        raise rendezvous.RendezvousError("nobody came")

    monkeypatch.setattr(handover, "take", nobody)
    monkeypatch.setattr(start, "WAITS_ALOUD_S", 0.01)
    monkeypatch.setattr(start.signal, "signal", lambda *_: None)
    with environment.variables(_as(1, 2, 29500)):  # follow() exports its own for good
        assert start.follow(Outside(1, 2, 1, 2, "node0", 29500), lambda folder, shows: 0) == 1
    waits, failed = capsys.readouterr().err.splitlines()
    assert waits.startswith("rank 1 of 2 waits for rank 0 at node0:29500, for 600 s at most")
    assert failed == "rank 1 of 2 failed: nobody came"
