"""The hub that models and data sets come from: asked once, for seconds, where its library would try for minutes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

ANSWER_S = 3.0
"""A hub that has not taken a connection by then is not waited for."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Variables that keep the library from asking the hub."""


def silent() -> str | None:
    """The hub's address where nothing answers there within ANSWER_S: the library would try again and again, for half a
    minute a file. None where it answers, is not to be asked, or is asked through a proxy."""
    import urllib.request

    from huggingface_hub import constants

    address = urllib.parse.urlsplit(constants.ENDPOINT)
    through_proxy = not {address.scheme, "all"}.isdisjoint(urllib.request.getproxies())
    if constants.HF_HUB_OFFLINE or address.hostname is None or through_proxy:
        return None
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        with socket.create_connection((address.hostname, port), ANSWER_S):
            return None
    except OSError:
        return constants.ENDPOINT


def offline() -> str | None:
    """``HF_HUB_OFFLINE=1``, or the other variable that keeps from asking the hub; None: it may be asked."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        return None
    return next((f"{name}={os.environ[name]}" for name in OFFLINE if os.environ.get(name)), f"{OFFLINE[0]}=1")


def go_offline() -> None:
    """From now on this process and those that it starts take what was fetched before, without asking."""
    from huggingface_hub import constants

    os.environ[OFFLINE[0]] = "1"
    constants.HF_HUB_OFFLINE = True  # read from the variable only once


def fetched(name: str) -> bool:
    """Whether a model's config.json was fetched before."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def data_fetched(name: str) -> bool:
    """Whether rows of a data set were fetched before: the library keeps them in a folder of its name."""
    from huggingface_hub import constants

    cache = os.environ.get("HF_DATASETS_CACHE") or str(Path(constants.HF_HOME) / "datasets")
    return (Path(cache) / name.replace("/", "___")).is_dir()
