"""Recipes as texts."""

import pytest

from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.load import load_recipe

BASE = "model: org/name\ndata: rows.jsonl\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a recipe given as text; without `bare` it stands behind a model and data, in lines 1 and 2."""
    monkeypatch.chdir(tmp_path)

    def load(text="", *overrides, bare=False):
        (tmp_path / "r.yaml").write_text(text if bare else BASE + text)
        return load_recipe("r.yaml", overrides)

    return load


@pytest.fixture
def refuse(load):
    """Loads a recipe that must be refused, and gives the message."""

    def refuse(text="", *overrides, bare=False):
        with pytest.raises(RecipeError) as caught:
            load(text, *overrides, bare=bare)
        assert caught.value.exit_code == 2
        return str(caught.value)

    return refuse
