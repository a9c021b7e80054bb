"""A weight that should train and gets no gradient is named once, in the first step."""

import pytest
import torch

from swiftlite.train import run as runs
from swiftlite.train import session
from swiftlite.train.console import Console
from tests.training import LORA, recipe

BUILD = runs.build


def with_bystander(*args, **kwargs):
    """A model with one more weight, which its forward pass never uses."""
    built, world = BUILD(*args, **kwargs)
    built.root.model.layers[1].register_parameter("bystander", torch.nn.Parameter(torch.zeros(2)))
    return built, world


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("reached", [True, False])
def test_weights_out_of_reach_are_named(tmp_path, monkeypatch, capsys, lora, reached):
    if not reached:
        monkeypatch.setattr(runs, "build", with_bystander)
    session.train(recipe(tmp_path, lora=lora, train={"max_steps": 3}), Console())
    said = [line for line in capsys.readouterr().out.splitlines() if "no gradient" in line]
    assert len(said) == (0 if reached else 1)
    assert reached or said[0].startswith(
        "warning: 1 trainable weights got no gradient in the first step, such as model.layers.1.bystander"
    )
