"""A rank that stops is named, with its step, instead of letting all others wait for it in silence."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta

import torch.distributed as dist

from swiftlite.dist import worker
from swiftlite.dist.launch import FOLDER, Ranks, start


def meet(timeout: timedelta) -> dist.Store:  # type: ignore[name-defined]
    """The store in which the ranks of a launcher meet, for `init_process_group` and, cloned, for a `Pulse`.

    torch's agent keeps one store over all its starts: without a name for each, ranks read addresses of processes that are gone.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    return dist.PrefixStore(f"swiftlite.start-{start()}", store)  # type: ignore[attr-defined]


@dataclass
class Beat:
    """What a rank says of itself: `sign` grows with every word of its watching thread, `count` with every `Pulse.beat`."""

    sign: int = 0
    count: int = 0
    step: int = 0
    resting: bool = True
    done: bool = False


def end(what: str) -> None:
    """Ends this process, whose main thread may hang in a call that nothing interrupts."""
    worker.report(worker.SilentRankError(what), 1)
    sys.stdout.flush()
    os._exit(1)


class Pulse:
    """Says that this rank lives and gets on, and ends the process once another one does not.

    A thread leaves a word in the ranks' store and reads those of the others. A rank is silent when it leaves none for `timeout_s`
    (its process is stopped, its host is gone), or when no rank has called `beat` for so long, none rests, and it has called the
    fewest times: the others wait for it. With one rank there is nothing to watch.
    """

    def __init__(
        self,
        store: dist.Store | None,  # type: ignore[name-defined]
        place: Ranks,
        timeout_s: float,
        tell: Callable[[str], None] = end,
    ) -> None:
        """
        Args:
            store: of the process group, with an own connection (`Store.clone`): one thread at a time may use one.
            timeout_s: seconds of silence after which `tell` gets the message, once.
        """
        self._mine, self._place, self._timeout, self._tell = Beat(), place, timeout_s, tell
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None and place.size > 1:
            self._store = dist.PrefixStore("swiftlite.pulse", store)  # type: ignore[attr-defined]
            self._parent = os.getppid()
            now = time.monotonic()
            # Of each rank its newest word, when it came, and when its count last grew; no clock of another host is read.
            self._beats = [Beat() for _ in range(place.size)]
            self._signs, self._moved = [now] * place.size, [now] * place.size
            self._say()
            self._thread = threading.Thread(target=self._watch, name="swiftlite-pulse", daemon=True)
            self._thread.start()

    def beat(self, step: int) -> None:
        """The main thread gets on; `step` counts optimizer steps that are done."""
        self._mine.step, self._mine.resting = step, False
        self._mine.count += 1

    def rest(self) -> None:
        """Nothing is expected of the main thread until its next beat: it saves, loads or exports."""
        self._mine.resting = True

    def close(self) -> None:
        """This rank is done. Others may still have work."""
        if self._thread is not None and not self._closed.is_set():
            self._closed.set()
            self._thread.join(timeout=10)

    def _watch(self) -> None:
        look, due = min(30.0, self._timeout / 10), 0.0
        while not self._closed.wait(min(1.0, look)):
            if FOLDER in os.environ and os.getppid() != self._parent:  # the launcher was killed: nobody would end this process
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                self._say()
                if time.monotonic() >= due:  # a word is cheap, reading all of many ranks is less so
                    due = time.monotonic() + look
                    self._listen()
            except dist.DistError:  # the store is gone, or does not answer: no word from anybody
                pass
            if (what := self._silent()) is not None and not self._closed.is_set():
                self._tell(what)
                return
        self._mine.done = True
        with suppress(dist.DistError):
            self._say()

    def _say(self) -> None:
        self._mine.sign += 1
        self._store.set(str(self._place.rank), json.dumps(astuple(self._mine)))

    def _listen(self) -> None:
        now, keys = time.monotonic(), [str(rank) for rank in range(self._place.size)]
        known = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        for key, text in zip(known, self._store.multi_get(known), strict=True):
            rank, beat = int(key), Beat(*json.loads(text))
            old, self._beats[rank] = self._beats[rank], beat
            if beat.sign != old.sign:
                self._signs[rank] = now
            if beat.count != old.count or beat.resting:
                self._moved[rank] = now

    def _silent(self) -> str | None:
        """The message about the rank that is silent, if one is."""
        now, waited = time.monotonic(), f"for {self._timeout:g} s"
        live = [rank for rank, beat in enumerate(self._beats) if not beat.done]
        for rank in live:
            if rank != self._place.rank and now - self._signs[rank] > self._timeout:
                return f"rank {rank} has been silent since step {self._beats[rank].step} {waited}"
        # Whose word is old may be about to count as silent itself: the better message.
        if not live or any(now - self._moved[r] <= self._timeout or now - self._signs[r] > self._timeout / 2 for r in live):
            return None
        least = min(self._beats[rank].count for rank in live)
        behind = [rank for rank in live if self._beats[rank].count == least]
        step = self._beats[behind[0]].step
        if len(behind) == len(live):
            return f"no rank has got on since step {step} {waited}"
        names = f"rank{'s' * (len(behind) > 1)} {', '.join(map(str, behind))}"
        return f"{names} ha{'ve' if len(behind) > 1 else 's'} been silent since step {step} {waited}: the others wait"
