"""Run a function on several gloo ranks, with a time limit and no process left behind. The one helper for such tests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A server that has imported the heavy packages once (and started no thread) forks the ranks: importing them anew
# took longer than most tests.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


def forked(function: Callable[..., Any], *args: Any) -> multiprocessing.context.ForkServerProcess:
    """A process, not yet started, that has the heavy packages and runs ``function(*args)``."""
    return _context.Process(target=function, args=args)


def run_on_ranks(
    function: Callable[..., Any], *args: Any, folder: Path, ranks: int = 2, timeout_s: float = 400
) -> list:
    """``function(*args)`` on each rank inside of a process group; the ranks' return values in order.

    function must be importable (module level). Raises AssertionError with the ranks' tracebacks, or at the time limit.
    """
    results = _context.Queue()
    store = folder / f"store-{time.monotonic_ns()}"
    workers = [
        _context.Process(
            target=_rank,
            args=(rank, ranks, str(store), timeout_s, results, function, args, dict(os.environ)),
            daemon=True,
        )
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    try:
        return _collect(results, workers, ranks, time.monotonic() + timeout_s)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _collect(results: Any, workers: list, ranks: int, deadline: float) -> list:
    values: dict[int, Any] = {}
    errors: list[str] = []
    while len(values) + len(errors) < ranks:
        assert time.monotonic() < deadline, f"ranks {sorted(set(range(ranks)) - set(values))} did not end in time"
        if not results.empty():
            rank, value, error = results.get()
            if error:
                errors.append(f"rank {rank}:\n{error}")
                deadline = min(deadline, time.monotonic() + 5)  # the others may wait for it; give them a moment
            else:
                values[rank] = pickle.loads(value)
        elif (errors and time.monotonic() > deadline - 1) or (
            not any(worker.is_alive() for worker in workers) and results.empty()
        ):
            break
        else:
            time.sleep(0.02)
    codes = [worker.exitcode for worker in workers]
    assert not errors, "\n".join(errors)
    assert len(values) == ranks, f"ranks ended without a result, exit codes {codes}"
    return [values[rank] for rank in range(ranks)]


def _rank(
    rank: int,
    ranks: int,
    store_file: str,
    timeout_s: float,
    results: Any,
    function: Callable[..., Any],
    args: tuple,
    environment: dict[str, str],
) -> None:
    os.environ.clear()  # the server's is that of the first test
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR"
    )
    try:
        import torch
        import torch.distributed as dist

        from glmexp.engine import distributed
        from glmexp.engine.build import quiet_deepspeed

        torch.set_num_threads(1)
        distributed.join(timeout_s, dist.FileStore(store_file, ranks))
        quiet_deepspeed()
        value = function(*args)
        # Plain bytes: a tensor in a queue would be shared memory that ends with this process.
        results.put((rank, pickle.dumps(value), None))
    except BaseException:  # noqa: BLE001 - shown by the test
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)
