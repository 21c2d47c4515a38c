"""What every test process sets before torch is imported: tests share their cores, so nobody spins or shouts."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(autouse=True)
def no_rank_is_left_behind() -> Iterator[None]:
    """A test that leaves this process a rank would change what later ones do in it."""
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    before = [os.environ.get(name) for name in places]
    yield
    assert [os.environ.get(name) for name in places] == before, "a rank's variables are left behind"
