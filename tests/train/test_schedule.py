"""When things happen, and the learning rate of every step."""

import math

import pytest

from swiftlite.train.schedule import Rate, Schedule, _count


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "warmup_stable_decay"])
def test_every_rate_warms_up_to_the_peak_and_ends_at_its_floor(kind):
    rate = Rate(kind, peak=2e-4, total=100, warmup=10, floor=0.1)
    steps = [rate.at(s) for s in range(100)]
    assert steps[0] == pytest.approx(2e-5) and steps[9] == pytest.approx(2e-4) and max(steps) == pytest.approx(2e-4)
    assert steps[:10] == sorted(steps[:10]) and steps[10:] == sorted(steps[10:], reverse=True)
    last = {"constant": 2e-4, "linear": 2e-5 + 1.8e-4 / 90, "warmup_stable_decay": 2e-5 + 1.8e-4 / 9}
    expected = last.get(kind, 2e-5 + 1.8e-4 * 0.5 * (1 + math.cos(math.pi * 89 / 90)))
    assert steps[99] == pytest.approx(expected, rel=1e-6)


def test_a_run_of_one_step_has_the_peak_rate():
    assert Rate("cosine", 1.0, total=1, warmup=1, floor=0.0).at(0) == 1.0


@pytest.mark.parametrize(("value", "total", "steps"), [(0.03, 100, 3), (0.03, 10, 1), (0.5, 5, 3), (7, 100, 7)])
def test_shares_become_steps(value, total, steps):
    assert _count(value, total) == steps


def test_due_steps():
    s = Schedule(total=25, per_epoch=10, log_every=10, eval_every=10, save_every=12, rate=Rate("constant", 1, 25, 0, 0))
    every = range(1, 26)
    assert [n for n in every if s.log_due(n)] == [1, 10, 20, 25]
    assert [n for n in every if s.eval_due(n)] == [10, 20, 25]
    assert [n for n in every if s.save_due(n)] == [12, 24, 25]
    never = Schedule(25, 10, 10, 0, 0, s.rate)
    assert not any(never.eval_due(n) or never.save_due(n) for n in every)
