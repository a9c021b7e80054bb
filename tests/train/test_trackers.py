"""Trackers get every metrics row and are ended; unknown and missing ones are refused before step 1."""

from typing import ClassVar

import pytest
from accelerate import tracking

from swiftlite.recipe.errors import RecipeError
from tests.training import LORA, recipe, train


class Memory(tracking.GeneralTracker):
    """A tracker that remembers."""

    name = "memory"
    requires_logging_directory = False
    seen: ClassVar[list] = []

    def __init__(self, run_name, **kwargs):
        super().__init__()
        self.run_name = run_name

    tracker = None

    def start(self):
        self.seen.append(("start", self.run_name))

    def store_init_configuration(self, values):
        self.seen.append(("config", values))

    def log(self, values, step=None, **kwargs):
        self.seen.append((step, values))

    def finish(self):
        self.seen.append(("end", None))


class Absent(Memory):
    name = "absent"

    def start(self):
        raise ImportError("No module named 'absent'")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    Memory.seen.clear()
    for kind in (Memory, Absent):
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, kind.name, kind)


def test_a_tracker_sees_the_run(tmp_path):
    train(recipe(tmp_path, lora=LORA, train={"max_steps": 2}, log={"report_to": ["memory"], "project": "trial"}))
    kinds = [kind for kind, _ in Memory.seen]
    assert kinds == ["start", "config", 1, 2, "end"] and Memory.seen[0][1] == "trial"
    assert Memory.seen[1][1]["train.learning_rate"] == 0.01 and Memory.seen[2][1]["loss"] > 0


@pytest.mark.parametrize(("name", "said"), [("memry", "Did you mean 'memory'"), ("absent", "pip install absent")])
def test_a_tracker_that_cannot_be_had_is_refused(tmp_path, name, said):
    with pytest.raises(RecipeError, match=said) as error:
        train(recipe(tmp_path, lora=LORA, log={"report_to": [name]}))
    assert error.value.exit_code == 2 and not (tmp_path / "out" / "metrics.jsonl").exists()
