"""The shape of the code that import-linter cannot see. Floors themselves are held by `make lint`."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from swiftlite.recipe import tables

REPO = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
TOP_FOLDERS = {"swiftlite.cli": REPO / "cli", "swiftlite.recipes": REPO / "recipes"}
SOURCES = sorted(path for folder in ("swiftlite", "cli", "recipes") for path in (REPO / folder).rglob("*.py"))
TREES = {path.relative_to(REPO).as_posix(): ast.parse(path.read_text(), path.name) for path in SOURCES}
TABLES = {name: getattr(tables, name) for name in ("FAMILIES", "STRATEGIES", "FORMATS", "OBJECTIVES", "EXPORTERS")}
ROWS = [(table, name) for table, rows in TABLES.items() for name in rows]


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all that is imported anywhere in a module: `from a import b` gives `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with its name as written: `torch.load`, `fully_shard`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func), node


def python(code: str) -> str:
    """Runs code in a fresh interpreter and returns what it printed."""
    return subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True).stdout


def test_only_main_imports_the_command_line():
    importers = {
        file
        for file, tree in TREES.items()
        if not file.startswith("cli/")
        and any(name == "swiftlite.cli" or name.startswith("swiftlite.cli.") for name in imports(tree))
    }
    assert importers <= {"swiftlite/__main__.py"}


def test_fully_shard_is_called_in_one_file():
    callers = {file for file, tree in TREES.items() for name, _ in calls(tree) if name.split(".")[-1] == "fully_shard"}
    importers = {file for file, tree in TREES.items() for name in imports(tree) if name.split(".")[-1] == "fully_shard"}
    assert callers | importers == {"swiftlite/dist/shard.py"}


def test_package_init_imports_nothing():
    assert list(imports(TREES["swiftlite/__init__.py"])) == []


def test_recipe_floor_loads_no_torch():
    modules = [
        f"swiftlite.recipe.{path.stem}" for path in (REPO / "swiftlite" / "recipe").glob("*.py") if path.stem != "__init__"
    ]
    assert "swiftlite.recipe.load" in modules
    code = f"import importlib, json, sys\nfor m in {modules!r}: importlib.import_module(m)\nprint(json.dumps(list(sys.modules)))"
    loaded = {name.split(".")[0] for name in json.loads(python(code))}
    assert loaded.isdisjoint({"torch", "transformers", "peft", "accelerate", "datasets", "numpy", "safetensors"})


def test_no_module_is_a_drawer_for_leftovers():
    names = {part for file in TREES for part in Path(file).with_suffix("").parts}
    assert names.isdisjoint({"util", "utils", "common", "helper", "helpers", "misc"})


def test_nothing_is_pickled():
    """Checkpoints are safetensors and JSON; a foreign .bin is read by torch's safe loader only."""
    for file, tree in TREES.items():
        assert {"cloudpickle", "dill", "joblib"}.isdisjoint(name.split(".")[0] for name in imports(tree)), file
        assert not any(name.startswith("pickle.") for name in imports(tree)), file
        for name, call in calls(tree):
            where = f"{file}:{call.lineno}: {name}"
            assert name.split(".")[0] != "pickle", where
            assert name != "torch.save", where
            if name == "torch.load":
                assert {k.arg: ast.unparse(k.value) for k in call.keywords}.get("weights_only") == "True", where


def test_every_package_is_installed():
    """The list in pyproject.toml is kept by hand, because cli/ and recipes/ lie outside swiftlite/."""
    folders = {".".join(path.parent.relative_to(REPO).parts) for path in (REPO / "swiftlite").rglob("*.py")}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(folders | set(TOP_FOLDERS)) == sorted(listed)
    for package in listed:
        folder = TOP_FOLDERS.get(package, REPO.joinpath(*package.split(".")))
        assert (folder / "__init__.py").exists(), package


def test_every_import_is_declared():
    """A library that only another one brings may be gone with its next version."""
    requirements = PROJECT["project"]["dependencies"] + [
        requirement
        for name, extra in PROJECT["project"]["optional-dependencies"].items()
        if name != "dev"
        for requirement in extra
    ]

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    declared = {normal(re.split(r"[<>=!~ \[;]", requirement)[0]) for requirement in requirements}
    # pydantic pins its core with each release; torch's builds for GPUs bring triton, and only they use it.
    origin = packages_distributions() | {"pydantic_core": ["pydantic"], "triton": ["torch"]}
    undeclared = {
        f"{file}: {name}"
        for file, tree in TREES.items()
        for name in {name.split(".")[0] for name in imports(tree)} - sys.stdlib_module_names - {"swiftlite"}
        if declared.isdisjoint(normal(package) for package in origin.get(name, [name]))
    }
    assert undeclared == set()


@pytest.mark.parametrize(("table", "name"), ROWS)
def test_row_is_documented_and_importable(table, name):
    row = TABLES[table][name]
    assert re.fullmatch(r"[^\n]{10,120}", row.help)
    loaded = tables.load(TABLES[table], name)
    # A part that knows its name knows the table's.
    assert getattr(loaded, "name", name) == name


def test_every_recipe_key_is_read():
    """A key that nothing reads is a defect. Plugins are run by the recipe floor itself; all other keys are read behind it."""
    from swiftlite.recipe import schema

    sources = [p.read_text() for p in (REPO / "swiftlite").rglob("*.py") if "recipe" not in p.relative_to(REPO).parts]
    text = "\n".join(sources)
    sections = [c for c in vars(schema).values() if isinstance(c, type) and issubclass(c, schema.Section)]
    keys = {(c.__name__, key) for c in sections for key in c.model_fields if key != "plugins"}
    assert len(keys) > 80
    assert sorted(f"{c}.{k}" for c, k in keys if not re.search(rf"\.{k}\b", text)) == []
