"""Steps prepared ahead: the same steps, in order, and an end without threads left over."""

import threading
import time

import pytest
import torch

from swiftlite.data.loader import Loader, MicroBatch
from swiftlite.data.prefetch import STEPS_AHEAD, Prefetcher
from tests.data.test_loader import samples
from tests.data.test_streaming import folder, named, stream


class Watched:
    """Gives a batch named by its step; notes which steps were asked for, and how many at once."""

    def __init__(self, in_order: bool = True, fails_at: int | None = None, seconds: float = 0.0) -> None:
        self.in_order, self.fails_at, self.seconds = in_order, fails_at, seconds
        self.asked: list[int] = []
        self.threads: set[str] = set()
        self.running = self.most = 0
        self.lock = threading.Lock()

    def group(self, step: int) -> list[MicroBatch]:
        with self.lock:
            self.asked.append(step)
            self.threads.add(threading.current_thread().name)
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(self.seconds)
        with self.lock:
            self.running -= 1
        if step == self.fails_at:
            raise RuntimeError(f"step {step} is broken")
        return [MicroBatch({}, [str(step)])]


def settled(source: Watched, count: int) -> list[int]:
    """The steps asked for once there are `count`, and no more come."""
    end = time.monotonic() + 20
    while len(source.asked) < count and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.05)
    return list(source.asked)


def test_works_ahead_so_far_and_no_further():
    source = Watched()
    ahead = Prefetcher(source, 2, 6)
    assert ahead.group(0)[0].sources == ["0"]
    assert settled(source, 1 + STEPS_AHEAD) == [0, 1, 2]
    assert [ahead.group(step)[0].sources for step in range(1, 6)] == [[str(step)] for step in range(1, 6)]
    assert settled(source, 6) == [0, 1, 2, 3, 4, 5], "no step of the next epoch is made for nothing"
    assert source.most == 1 and threading.current_thread().name not in source.threads
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name in source.threads]


def test_hides_the_time_that_preparing_takes():
    source = Watched(seconds=0.1)
    ahead = Prefetcher(source, 1, 10)
    ahead.group(0)
    time.sleep(0.5)  # training
    began = time.monotonic()
    ahead.group(1)
    ahead.group(2)
    assert time.monotonic() - began < 0.15
    ahead.close()


def test_several_threads_where_the_order_does_not_matter():
    source = Watched(in_order=False, seconds=0.05)
    ahead = Prefetcher(source, 4, 100)
    assert [ahead.group(step)[0].sources for step in range(20)] == [[str(step)] for step in range(20)]
    assert source.most > 1
    ahead.close()


def test_without_threads_nothing_is_made_ahead():
    source = Watched()
    ahead = Prefetcher(source, 0, 6)
    ahead.group(0)
    ahead.group(1)
    assert source.asked == [0, 1] and source.threads == {threading.current_thread().name}
    ahead.close()


def test_an_error_comes_with_its_own_step():
    ahead = Prefetcher(Watched(fails_at=2), 2, 10)
    assert [ahead.group(step)[0].sources for step in range(2)] == [["0"], ["1"]]
    with pytest.raises(RuntimeError, match="step 2 is broken"):
        ahead.group(2)
    ahead.close()


def test_closes_while_it_works():
    source = Watched(seconds=0.2)
    ahead = Prefetcher(source, 2, 10)
    ahead.group(0)
    ahead.close()
    assert len(source.asked) <= 2 and source.running == 0


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_loader_gives_the_same_batches_and_may_be_asked_for_another_step(workers):
    def loader() -> Loader:
        return Loader(samples(23), seed=3, order="random", rows_per_step=5, micro_batch=2, pad_id=0)

    ahead, plain = Prefetcher(loader(), workers, 40), loader()
    for step in [*range(17), 3, 4, *range(30, 40)]:
        for a, b in zip(ahead.group(step), plain.group(step), strict=True):
            assert a.sources == b.sources
            assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)
    ahead.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_is_that_of_the_steps_taken_not_of_those_made_ahead(tmp_path, workers):
    path = folder(tmp_path, 2, 60)
    one, plain = stream(path), stream(path)
    ahead = Prefetcher(one, workers, 50)
    seen = [named([ahead.group(step)]) for step in range(12)]
    state = one.state(10)
    ahead.close()
    plain.load_state(state)
    assert [named([plain.group(step)]) for step in (10, 11)] == seen[10:]
