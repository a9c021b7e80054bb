"""The launcher's side of a launch: torch's elastic agent, with signals, restarts and errors as people expect them."""

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from swiftlite.dist.launch import FOLDER, STARTS
from swiftlite.dist.worker import log_path, tidy
from swiftlite.recipe.errors import RecipeError, SwiftliteError

# Seconds that the other ranks have after one failed.
GRACE = 5.0
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class End:
    """How a worker ended: in its own words where it left any (see `worker.report`), else by its exit code."""

    rank: int | None
    code: int
    text: str
    lost: bool
    again: bool
    time: float
    trace: str = ""
    log: str | None = None

    def error(self) -> SwiftliteError:
        fix = f"See {self.log}" if self.log else None
        error = SwiftliteError(self.text, where=None if self.rank is None else f"rank {self.rank}", fix=fix)
        error.exit_code = self.code
        if self.trace:
            error.add_note(self.trace)
        return error


def died(rank: int, failure: ProcessFailure, hurried: bool, log: Path) -> End:
    """The end of a worker that left no word. SIGTERM is what elastic sends to those that are left."""
    code, told = failure.exitcode, str(log) if log.is_file() and log.stat().st_size else None
    text = f"its process was killed by {failure.signal_name()}" if code < 0 else f"its process ended with exit code {code}"
    if code == -signal.SIGKILL:
        text += ". Most often the machine ran out of memory: `dmesg` tells"
    return End(rank, 1, text, hurried or code == -signal.SIGTERM, True, float(failure.timestamp), log=told)


def cause(ends: Sequence[End]) -> End:
    """The one end that explains the others: interrupts and lost fellows follow from something else, and later ones too."""
    return min(ends, key=lambda end: (end.code == 130, end.lost, end.time))


class Agent(LocalElasticAgent):
    """Starts, watches and ends the workers of this host."""

    def __init__(self, spec: WorkerSpec, folder: Path, output: Path) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self.folder, self.output = folder, output
        self.starts, self.starting, self.stopping = 0, False, False
        self.ignored = {number for number in STOPS if signal.getsignal(number) is signal.SIG_IGN}  # as nohup does
        self.failed_at = 0.0  # seconds of time.monotonic
        self.hurried: set[int] = set()  # processes that this one had to kill
        self.ends: list[End] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for old in self.folder.iterdir():
            old.unlink()
        self.starts, self.failed_at = self.starts + 1, 0.0
        # Hosts may have started their workers another number of times: one of them counts, in the store of this meeting.
        store: Any = worker_group.store
        if worker_group.group_rank == 0:
            store.set("swiftlite.starts", str(self.starts))
        os.environ[STARTS] = store.get("swiftlite.starts").decode()
        self.starting = True
        started: dict[int, Any] = super()._start_workers(worker_group)
        self.starting = False
        self.listen()  # the start put elastic's handlers in place
        if self.stopping:
            self.send(signal.SIGTERM)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = [process.poll() for process in self.processes()]
        if None in codes and not self.hopeless(codes):
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self.ends = [self.end_of(rank, failure) for rank, failure in result.failures.items()]
            first = cause(self.ends)
            if self.stopping or not first.again:
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                left = self._remaining_restarts - 1
                print(f"warning: {first.error()}\nall ranks start again; restarts left: {left}", file=sys.stderr)
        return result

    def hopeless(self, codes: Sequence[int | None]) -> bool:
        """Whether those that still run are to be ended.

        After a stop ranks end one by one, and elastic would hurry the others. After a failure the rest can only find that they
        lost a fellow, or hang.
        """
        if set(codes) <= {None, 0, 130}:
            return False
        self.failed_at = self.failed_at or time.monotonic()
        if time.monotonic() - self.failed_at < GRACE:
            return False
        self.hurried = {process.pid for process in self.processes() if process.poll() is None}
        self.send(signal.SIGKILL)
        return True

    def end_of(self, rank: int, failure: ProcessFailure) -> End:
        try:
            return End(**json.loads((self.folder / f"{rank}.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            return died(rank, failure, failure.pid in self.hurried, log_path(self.output, rank))

    def processes(self) -> list[Any]:
        """The Popen objects of the workers; each leads a process group of its own."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc for handler in handlers.values()]

    def send(self, number: signal.Signals) -> int:
        """Sends a signal to each live worker, for SIGKILL with all its children. Returns how many were alive."""
        alive = [process for process in self.processes() if process.poll() is None]
        for process in alive:
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        return len(alive)

    def watch(self) -> RunResult:
        """Runs the workers to their end."""
        self.listen()
        try:
            result: RunResult = self.run()
            return result
        except (SignalException, KeyboardInterrupt):
            self.send(signal.SIGKILL)
            raise KeyboardInterrupt from None
        finally:
            self._worker_group.spec.rdzv_handler.shutdown()

    def listen(self) -> None:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN if number in self.ignored else self.stop)

    def stop(self, number: int, frame: Any) -> None:
        again, self.stopping = self.stopping, True
        if self.starting:
            return
        alive = self.send(signal.SIGKILL if again else signal.SIGTERM)
        if again or not alive:
            raise KeyboardInterrupt


def run(
    command: Sequence[str], *, output: Path, nproc: int, nnodes: int, node_rank: int | None, rdzv: str, restarts: int
) -> None:
    """See `launch.launch`."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    options: dict[str, Any] = {"min_nodes": nnodes, "max_nodes": nnodes, "timeout": 900}
    # A name of one's own that others can look up is more than one host needs.
    options |= {"local_addr": "localhost"} if nnodes == 1 else {} if node_rank is None else {"is_host": node_rank == 0}
    with tempfile.TemporaryDirectory(prefix="swiftlite-") as folder:
        os.environ[FOLDER] = folder
        meeting = RendezvousParameters("c10d", rdzv, run_id="swiftlite", **options)
        try:
            handler = get_rendezvous_handler(meeting)
            spec = WorkerSpec(
                "worker",
                nproc,
                handler,
                entrypoint=sys.executable,
                args=tuple(command),
                max_restarts=restarts,
                local_addr=options.get("local_addr"),
            )
            agent = Agent(spec, Path(folder), output)
            result = agent.watch()
        except RendezvousClosedError:
            raise SwiftliteError("another host has ended this run: see what it says", where="--rdzv") from None
        except RendezvousError as error:
            raise RecipeError(f"the hosts did not meet at {rdzv}: {error}", where="--rdzv") from error
        finally:
            tidy(output)
        if not result.is_failed():
            return
        first = cause(agent.ends)
        if first.code == 130 or (agent.stopping and first.lost):
            raise KeyboardInterrupt
        raise first.error()
