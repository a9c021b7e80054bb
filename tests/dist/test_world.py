"""Which device a run gets."""

import pytest
import torch

from swiftlite.dist.world import pick_device
from swiftlite.recipe.errors import RecipeError


def test_the_device_asked_for_is_given():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == (
        "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    )


@pytest.mark.parametrize(("name", "words"), [("cpuu", "Did you mean 'cpu'"), ("tpu", "Known: auto, cuda, mps, cpu")])
def test_a_device_that_is_none_is_named(name, words):
    with pytest.raises(RecipeError, match=f"train.device: '{name}' is no device.*{words}"):
        pick_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_said():
    with pytest.raises(RecipeError, match="this machine has no 'cuda' device"):
        pick_device("cuda")
