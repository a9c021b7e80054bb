"""The way in: a file or a shipped name, overrides, and out comes a recipe without open questions."""

import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from swiftlite.recipe import aliases, deepspeed
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.keys import keys
from swiftlite.recipe.overrides import override
from swiftlite.recipe.plugins import install, load_plugins
from swiftlite.recipe.reading import Faults, Node, parse
from swiftlite.recipe.resolve import Loaded, resolve
from swiftlite.recipe.secrets import expand
from swiftlite.recipe.validate import validate
from swiftlite.recipe.writing import dump_yaml

__all__ = ["Loaded", "dump_yaml", "load_recipe", "resolve", "shipped"]


def load_recipe(path_or_name: str, overrides: Sequence[str] = (), *, run_plugins: bool = True) -> Loaded:
    """Reads, checks and completes a recipe.

    Args:
        path_or_name: a YAML file, or the name of a shipped recipe.
        overrides: `a.b=c`, each beats the file and those before it.
        run_plugins: False: the recipe's plugins are not run, and the names of table rows not checked where it has some.

    Raises:
        RecipeError: lists every mistake with its file and line.
    """
    path = _find(path_or_name)
    faults, notes = Faults(), list[str]()
    root = parse(_read(path), _label(path), faults)
    aliases.apply(root, faults, notes)
    for text in overrides:
        override(root, text, faults, notes)
    written = expand(root, faults)
    mapped = deepspeed.apply(root, faults, notes)
    recipe = validate(root, faults)
    faults.raise_any()
    assert recipe is not None
    recipe._written.update(written)
    origins = dict.fromkeys((key for key in keys() if "[]" not in key), "default") | dict(_origins(root, "")) | mapped
    places = [origins.get(f"plugins.{i}", origins["plugins"]) for i in range(len(recipe.plugins))]
    plugins = load_plugins(recipe.plugins, places) if run_plugins else ()
    install(plugins)
    notes += [plugin.note for plugin in plugins]
    return resolve(Loaded(recipe, origins, notes, str(path), plugins))


def shipped() -> dict[str, str]:
    """Names of the recipes that come with the package, with their first comment line."""
    found = sorted(
        (file for file in files("swiftlite.recipes").iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name
    )
    return {file.name.removesuffix(".yaml"): _summary(file.read_text("utf-8")) for file in found}


def _summary(text: str) -> str:
    return next(
        (line.lstrip("# ").strip() for line in text.splitlines() if line.startswith("#") and "yaml-language" not in line), ""
    )


def _find(path_or_name: str) -> Path:
    path, names = Path(path_or_name).expanduser(), shipped()
    if path.is_file():
        return path
    if path_or_name in names:
        return Path(str(files("swiftlite.recipes") / f"{path_or_name}.yaml"))
    if path.is_dir():
        inner = path / "recipe.yaml"
        fix = f"Did you mean '{inner}'?" if inner.is_file() else "Give a YAML file, or a name of `swiftlite recipes`."
        raise RecipeError("a folder, not a recipe.", where=path_or_name, fix=fix)
    if path.stem in names:
        raise RecipeError("no such file.", where=path_or_name, fix=f"A recipe of that name is shipped: write `{path.stem}`.")
    folder = path.parent if path.parent.is_dir() else Path()
    nearby = [str(file) for pattern in ("*.yaml", "*.yml") for file in folder.glob(pattern)]
    close = get_close_matches(path_or_name, [*nearby, *names], n=1) or get_close_matches(path.stem, names, n=1)
    raise RecipeError(
        "no such file or shipped recipe.",
        where=path_or_name,
        fix=f"Did you mean '{close[0]}'?" if close else f"Shipped: {', '.join(names)}.",
    )


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError("not UTF-8 text.", where=f"{_label(path)}:{line}", fix="Save the file as UTF-8.") from None
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}.", where=path) from None


def _label(path: Path) -> str:
    """The file in messages: relative where it lies below the working folder."""
    return os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)


def _origins(node: Node, path: str) -> Iterator[tuple[str, str]]:
    if path:
        yield path, node.where
    if isinstance(node.value, dict):
        inner = list(node.value.items())
    else:
        inner = [(str(i), item) for i, item in enumerate(node.value)] if isinstance(node.value, list) else []
    for name, child in inner:
        yield from _origins(child, f"{path}.{name}" if path else name)
