"""Runs a function on several gloo ranks of this machine, forked from one process that has imported everything already."""

import io
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "transformers", "peft", "swiftlite.train.session", "tests.training"])


def _rank(connection: Any, rank: int, size: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    dist.init_process_group("cpu:gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        buffer = io.BytesIO()
        torch.save(function(*args), buffer)
        answer: tuple[str, Any] = ("done", buffer.getvalue())
    except BaseException as error:
        answer = ("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    connection.send(answer)
    connection.close()
    sys.stdout.flush()
    os._exit(0)  # the other ranks may be gone: no orderly farewell


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = 180) -> list[Any]:
    """What `function(*args)`, a function of a module, gives on each of `size` ranks that share a gloo process group.

    Raises:
        AssertionError: a rank raised, with its traceback, or did not answer in `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        pairs = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
        store = str(Path(folder) / "store")
        workers = [
            _CONTEXT.Process(target=_rank, args=(pairs[rank][1], rank, size, store, function, args)) for rank in range(size)
        ]
        for worker in workers:
            worker.start()
        for _, end in pairs:
            end.close()
        answers = []
        try:
            for rank, (end, _) in enumerate(pairs):
                try:
                    answers.append(end.recv() if end.poll(timeout) else ("failed", f"no answer in {timeout} s"))
                except EOFError:
                    answers.append(("failed", "died without a word"))
                assert answers[-1][0] == "done", f"rank {rank}: {answers[-1][1]}"
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    return [torch.load(io.BytesIO(value), weights_only=False) for _, value in answers]
