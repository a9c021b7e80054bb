"""The coming steps, prepared while one trains."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from swiftlite.data.loader import MicroBatch

STEPS_AHEAD = 2


class Groups(Protocol):
    """What gives the micro-batches of a step: a Loader, or a Stream, which has `in_order`."""

    def group(self, step: int) -> list[MicroBatch]:
        """The micro-batches of step `step`."""
        ...


class Prefetcher:
    """Asks `source` for the coming steps in background threads, never for one that is `total` or more.

    Python threads share one core but where they wait or tokenise, so this hides preparation behind a GPU, and makes it no faster.

    Args:
        workers: threads; 0: each step is prepared when it is asked for. A source that gives its steps in order is asked by one.
    """

    def __init__(self, source: Groups, workers: int, total: int) -> None:
        self._source, self._total = source, total
        self._coming: dict[int, Future[list[MicroBatch]]] = {}
        threads = min(workers, 1) if getattr(source, "in_order", False) else workers
        self._ahead = max(STEPS_AHEAD, threads)
        self._pool = ThreadPoolExecutor(threads, "data") if threads else None

    def group(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step; another than the one behind the last begins anew from there, if the source can.

        Raises:
            whatever preparing this step raised.
        """
        if self._pool is None:
            return self._source.group(step)
        for old in [s for s in self._coming if not step <= s <= step + self._ahead]:
            self._coming.pop(old).cancel()
        for number in range(step, max(step, min(step + self._ahead, self._total - 1)) + 1):
            if number not in self._coming:
                self._coming[number] = self._pool.submit(self._source.group, number)
        return self._coming.pop(step).result()

    def close(self) -> None:
        """Waits for the step in preparation and drops those behind it."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
