"""Plugins: rows of a user's own; what is wrong with a file is told with its line, and no row outlives its recipe."""

import hashlib
import subprocess
import sys

import pytest

from swiftlite.recipe import tables

GOOD = """
from types import SimpleNamespace as Row

OBJECTIVES = {"mine": Row(name="mine", weight=None, loss_sum=None)}
FORMATS: dict = {"faq": Row(name="faq", needs=("q",), takes=(), parse=None)}
"""
USING = "plugins: [my.py]\ntrain: {objective: mine}\n"


@pytest.fixture
def plugin(load, tmp_path):
    """Writes a plugin beside the recipe."""

    def plugin(text, name="my.py"):
        (tmp_path / name).write_text(text)

    return plugin


def test_its_names_are_legal_for_that_recipe_alone(load, refuse, plugin):
    before = {name: list(table) for name, table in tables.TABLES.items()}
    plugin(GOOD)
    loaded = load(USING, "data.format=faq")
    digest = hashlib.sha256(GOOD.encode()).hexdigest()
    assert loaded.hashes == {"my.py": digest} and loaded.plugins[0].rows["FORMATS"]["faq"].needs == ("q",)
    assert tables.load(tables.OBJECTIVES, "mine") is loaded.plugins[0].rows["OBJECTIVES"]["mine"]
    (note,) = loaded.notes
    assert "my.py" in note and digest[:12] in note and "FORMATS: faq; OBJECTIVES: mine" in note

    assert "unknown name 'mine'" in refuse("train: {objective: mine}\n")
    load()
    assert {name: list(table) for name, table in tables.TABLES.items()} == before


def test_one_text_stands_for_a_list_of_one(load, plugin):
    plugin(GOOD)
    assert load("plugins: my.py\n").recipe.plugins == ["my.py"]
    assert load("", "plugins=[my.py]").recipe.plugins == ["my.py"]


def test_nothing_runs_before_the_recipe_is_right(refuse, plugin, tmp_path):
    plugin("open('ran', 'w')")
    assert "plugin adds no row" in refuse("plugins: [my.py]\n") and (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    refuse("plugins: [my.py]\nseed: -1\n")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        ("x = 1\nFORMATS = {", "my.py:2", "SyntaxError"),
        ("\nimport nothing_of_that_name\n", "my.py:2", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("def f():\n    return {}['a']\n\nFORMATS = f()\n", "my.py:2", "KeyError: 'a'"),
        ("raise SystemExit(3)", "my.py:1", "SystemExit: 3"),
        ("x = 1\n", "my.py", "adds no row. Define one of FAMILIES, "),
        ("FORMATS = {}\n", "my.py", "adds no row"),
        ("\nFORMATS = [1]\n", "my.py:2", "FORMATS is not a dict"),
        (GOOD + "\nSTRATEGIES = {'x': object()}\n", "my.py:7", "STRATEGIES row 'x' has no 'sharded'"),
        (GOOD + "\nclass O:\n    name, weight, loss_sum = 'o', 0, 0\n\nOBJECTIVES = {'o': O}\n", "my.py:4", "the class O"),
        (GOOD.replace('"mine":', '"other":'), "my.py:4", "row 'other' holds an object that calls itself 'mine'"),
        (GOOD.replace("mine", "sft"), "my.py:4", "OBJECTIVES has a row 'sft' already, from swiftlite."),
    ],
)
def test_a_broken_plugin_is_told_with_its_line(refuse, plugin, text, where, said):
    plugin(text)
    message = refuse("plugins: [my.py]\n")
    assert message.startswith(f"{where}: ") and said in message


def test_two_plugins_may_not_share_a_name(refuse, plugin):
    plugin(GOOD)
    plugin("\n" + GOOD, "other.py")
    assert refuse("plugins: [my.py, other.py]\n").startswith("other.py:6: FORMATS has a row 'faq' already, from my.py.")


def test_a_missing_plugin_is_named_where_the_recipe_names_it(refuse):
    message = refuse("plugins:\n  - gone.py\n")
    assert message.startswith("r.yaml:4: plugins: 'gone.py' cannot be read") and "working folder" in message


def test_a_recipe_without_plugins_loads_no_torch_and_one_with_loads_what_they_import(plugin, load, tmp_path):
    plugin(GOOD)
    load(USING)
    code = "import sys; from swiftlite.recipe.load import load_recipe as l; l('r.yaml'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True).stdout == "False\n"
