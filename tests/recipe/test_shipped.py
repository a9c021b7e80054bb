"""Every recipe that ships with the package is whole, in our own names, and says in its first line what it is for."""

from pathlib import Path

import pytest

from swiftlite.recipe.load import load_recipe, shipped

NAMES = [
    *("gemma3-4b-lora", "llama3-70b-qlora", "llama3-8b-full", "llama3-8b-lora", "llama3-8b-qlora"),
    *("quickstart", "qwen3-8b-lora", "smollm2-135m-full"),
]


def test_names():
    assert list(shipped()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_whole(name):
    loaded = load_recipe(name)
    recipe = loaded.recipe
    assert loaded.notes == []  # a note would mean a name of another toolkit
    assert Path(str(loaded.path)).stem == name and recipe.output == f"runs/{name}"
    assert recipe.data.train and recipe.data.eval and recipe.export.formats
    assert loaded.method == ("full" if name.endswith("full") else "lora")
    assert (recipe.quantize is not None) == name.endswith("qlora")
    summary = shipped()[name]
    assert summary.endswith(".") and 20 < len(summary) <= 130
