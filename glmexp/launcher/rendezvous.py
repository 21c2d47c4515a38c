"""Where the ranks of a run meet: a port, the key-value store behind it, a roll call with a time limit."""

from __future__ import annotations

import errno
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from glmexp.config.errors import ConfigError, Problem
from glmexp.launcher.environment import set_defaults

if TYPE_CHECKING:
    from torch.distributed import Store

LISTENS = "GLMEXP_LISTEN_FD"
"""Variable of rank 0: the descriptor of the socket that its parent has bound already."""
DEFAULT_PORT = 29500
_store: Store | None = None


class RendezvousError(RuntimeError):
    """Not all ranks came within the time limit; the text names those that did not."""


def listening(port: int | None, several_machines: bool) -> socket.socket:
    """A bound and listening socket for rank 0 to inherit: no other process can take the port in between.

    port: null for a free one. Raises ConfigError at once where the port is taken.
    """
    try:
        if not several_machines:
            return socket.create_server(("127.0.0.1", port or 0), backlog=2048)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port or 0), family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        what = "is in use by another process" if error.errno == errno.EADDRINUSE else "may only be used by root"
        raise ConfigError(Problem("launcher.master_port", f"port {port} {what}", _OTHER_PORT)) from error


_OTHER_PORT = "another launcher.master_port; on a single machine leave it out, and a free one is taken"


def store(timeout_s: float) -> Store:
    """The key-value store of this world; one a process. It belongs to rank 0 or to the outside launcher.

    Raises ConfigError where the port is taken and RendezvousError where nobody answers within ``timeout_s``.
    """
    global _store
    if _store is None:
        _store = _joined(timeout_s)
    _store.set_timeout(timedelta(seconds=timeout_s))
    return _store


def _joined(timeout_s: float) -> Store:
    set_defaults()
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    inherited = os.environ.pop(LISTENS, None)
    # torchrun's agent holds the store itself; everywhere else rank 0 does.
    first = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    started = time.monotonic()
    try:
        made = dist.TCPStore(
            address,
            port,
            None,
            is_master=first,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=int(inherited) if inherited is not None else None,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            way = "another MASTER_PORT (deepspeed and torchrun: --master_port, accelerate: --main_process_port)"
            raise ConfigError(Problem("MASTER_PORT", f"port {port} is in use by another process", way)) from error
        raise _nobody(rank, address, port, time.monotonic() - started) from error
    except dist.DistStoreError as error:
        raise _nobody(rank, address, port, time.monotonic() - started) from error
    # The prefix that torch itself puts before its keys, so that both may use the same words.
    return _roll_call(dist.PrefixStore("glmexp", made), rank, world_size, timeout_s)


def _nobody(rank: int, address: str, port: int, waited_s: float) -> RendezvousError:
    return RendezvousError(
        f"rank {rank} found no rank 0 at {address}:{port} in {waited_s:.0f} s. Is it running, and may this machine "
        "reach that port (firewall)? launcher.master_addr, launcher.master_port, launcher.timeout_s"
    )


def _roll_call(made: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """Every rank says that it is here, and from where; rank 0 names those that did not come."""
    import torch.distributed as dist

    made.set(f"here/{rank}", socket.gethostname())
    if rank != 0:
        return made
    deadline, missing = time.monotonic() + timeout_s, []
    for other in range(world_size):
        try:
            made.wait([f"here/{other}"], timedelta(seconds=max(0.05, deadline - time.monotonic())))
        except dist.DistStoreError:
            missing.append(other)
    if missing:
        came = {other: made.get(f"here/{other}").decode() for other in range(world_size) if other not in missing}
        raise RendezvousError(
            f"{', '.join(f'rank {other}' for other in missing)} of {world_size} did not come within "
            f"launcher.timeout_s={timeout_s:g}; here are "
            + ", ".join(f"rank {other} on {host}" for other, host in came.items())
        )
    return made
