"""A silent rank is named with its step. Two and three ranks in one process, each with its own connection."""

import time

import pytest
import torch.distributed as dist

from swiftlite.dist.launch import Ranks
from swiftlite.dist.pulse import Pulse

TIMEOUT = 1.0


@pytest.fixture
def group():
    """`group(n)` gives the pulses of n ranks and the lists of what each told."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pulses = []

    def start(size):
        told = [[] for _ in range(size)]
        for rank in range(size):
            pulses.append(Pulse(store.clone(), Ranks(rank, rank, size, size), TIMEOUT, told[rank].append))
        return pulses, told

    yield start
    for pulse in pulses:
        pulse.close()


def beat_for(seconds, pulses, step):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for pulse in pulses:
            pulse.beat(step)
        time.sleep(0.02)


def test_ranks_that_get_on_are_left_alone(group):
    pulses, told = group(2)
    beat_for(2.5 * TIMEOUT, pulses, 3)
    assert told == [[], []]


def test_a_process_that_is_stopped_is_named(group):
    pulses, told = group(3)
    beat_for(0.5, pulses, 17)
    pulses[2]._closed.set()  # its thread ends without a word...
    pulses[2]._say = lambda: None
    beat_for(2 * TIMEOUT, pulses[:2], 18)
    assert told == [["rank 2 has been silent since step 17 for 1 s"]] * 2 + [[]]


def test_a_main_thread_that_hangs_is_named_by_its_count(group):
    pulses, told = group(3)
    beat_for(0.3, pulses, 17)
    pulses[0].beat(17)
    pulses[2].beat(17)
    time.sleep(2 * TIMEOUT)
    assert told[0] == told[2] == ["rank 1 has been silent since step 17 for 1 s: the others wait"]


def test_all_hang(group):
    pulses, told = group(2)
    for pulse in pulses:
        pulse.beat(4)
    time.sleep(2 * TIMEOUT)
    assert told[0] == ["no rank has got on since step 4 for 1 s"]


def test_rest_and_end_are_no_silence(group):
    pulses, told = group(2)
    for pulse in pulses:
        pulse.beat(4)
    pulses[0].rest()
    time.sleep(2 * TIMEOUT)
    pulses[1].close()
    time.sleep(2 * TIMEOUT)
    assert told == [[], []]


def test_one_rank_watches_nothing():
    pulse = Pulse(None, Ranks(), TIMEOUT)
    pulse.beat(1)
    pulse.rest()
    pulse.close()
    assert pulse._thread is None
