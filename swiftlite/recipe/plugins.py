"""A user's own rows for the five tables: Python files that a recipe names under `plugins`.

A plugin defines one or more of the dicts FAMILIES, STRATEGIES, FORMATS, OBJECTIVES, EXPORTERS, each `{name: object}`, with
objects like those that the rows of `swiftlite.recipe.tables` lead to:

    from swiftlite.data.formats import Format

    def parse(row):
        return {"kind": "completion", "prompt": row["q"], "completion": row["a"]}

    FORMATS = {"faq": Format("faq", needs=("q", "a"), takes=(), parse=parse)}

A relative path starts at the working folder, as all paths of a recipe do. Loading a plugin runs its code, so only `train`,
`check` and `export` do, and say so; what merely uses a finished run does not.
"""

import hashlib
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from swiftlite.recipe import tables
from swiftlite.recipe.errors import RecipeError

# What the rest of the toolkit asks of a row's object.
_NEEDED = {
    "FAMILIES": ("blocks", "parts", "inputs"),
    "STRATEGIES": ("sharded", "mesh", "reshard", "reduce"),
    "FORMATS": ("name", "needs", "takes", "parse"),
    "OBJECTIVES": ("name", "weight", "loss_sum"),
    "EXPORTERS": ("name", "check", "write", "reload"),
}


@dataclass(frozen=True)
class Plugin:
    """A file that was run.

    Attributes:
        path: as the recipe writes it.
        sha256: of its bytes.
        rows: table name -> row name -> object.
    """

    path: str
    sha256: str
    rows: Mapping[str, Mapping[str, Any]]

    @property
    def note(self) -> str:
        """What happened, for a person."""
        added = "; ".join(f"{table}: {', '.join(rows)}" for table, rows in self.rows.items())
        return f"plugin {self.path} (sha256 {self.sha256[:12]}) was run, with all rights of this process. It adds {added}."


def load_plugins(paths: Sequence[str], wheres: Sequence[str | None]) -> tuple[Plugin, ...]:
    """Runs plugins in their order. Their rows are in the tables once `install` was called.

    Args:
        wheres: the place of each path in the recipe, for messages.

    Raises:
        RecipeError: a file that is missing, fails (names its line), defines no row, or a name that exists already.
    """
    loaded: list[Plugin] = []
    for path, where in zip(paths, wheres, strict=True):
        plugin = _load(path, where)
        for table, rows in plugin.rows.items():
            others = {name: p.path for p in loaded for name in p.rows.get(table, ())}
            known = {name: "swiftlite" for name, row in tables.TABLES[table].items() if row.plugin is None} | others
            for name in rows:
                if name in known:
                    what = f"{table} has a row '{name}' already, from {known[name]}."
                    raise RecipeError(what, where=_place(path, table), fix="Choose another name.")
        loaded.append(plugin)
    return tuple(loaded)


def install(plugins: Sequence[Plugin]) -> None:
    """Puts the rows of these plugins, and of no others, into the tables: a run never sees those of an earlier recipe."""
    for name, table in tables.TABLES.items():
        for row in [n for n, r in table.items() if r.plugin is not None]:
            del table[row]
        for plugin in plugins:
            table |= {n: tables.Row(f"from {plugin.path}", "", found) for n, found in plugin.rows.get(name, {}).items()}


def _load(path: str, where: str | None) -> Plugin:
    file = Path(path).expanduser()
    try:
        source = file.read_bytes()
    except OSError as error:
        what = f"plugins: '{path}' cannot be read: {error.strerror}."
        raise RecipeError(what, where=where, fix="A relative path starts at the working folder.") from None
    sha256 = hashlib.sha256(source).hexdigest()
    module = _run(path, file, source, sha256)
    rows: dict[str, dict[str, Any]] = {}
    for table, needed in _NEEDED.items():
        found = getattr(module, table, None)
        if found is None:
            continue
        fault = _fault(found, needed)
        if fault:
            raise RecipeError(f"{table} {fault}", where=_place(path, table))
        rows[table] = found
    if not any(rows.values()):
        raise RecipeError("the plugin adds no row.", where=path, fix=f"Define one of {', '.join(_NEEDED)}: {{name: object}}.")
    return Plugin(path, sha256, rows)


def _run(path: str, file: Path, source: bytes, sha256: str) -> ModuleType:
    """The module made of exactly the bytes that were hashed."""
    module = ModuleType(f"swiftlite_plugin_{sha256[:16]}")
    module.__file__ = str(file.absolute())
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines.append(error.lineno)
        where = f"{path}:{lines[-1]}" if lines else path
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise RecipeError(f"the plugin fails: {type(error).__name__}: {text}", where=where, fix="Mend that line.") from error
    return module


def _fault(found: Any, needed: Sequence[str]) -> str | None:
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        return "is not a dict {name: object}."
    for name, row in found.items():
        if isinstance(row, type):
            return f"row '{name}' is the class {row.__name__}: give an object of it."
        if missing := [attribute for attribute in needed if not hasattr(row, attribute)]:
            return f"row '{name}' has no '{missing[0]}'; needed are {', '.join(needed)}."
        if (own := getattr(row, "name", name)) != name:
            return f"row '{name}' holds an object that calls itself '{own}'."
    return None


def _place(path: str, table: str) -> str:
    """`file:line` of a table in a plugin."""
    lines = Path(path).expanduser().read_text("utf-8", errors="replace").splitlines()
    return next((f"{path}:{i}" for i, line in enumerate(lines, 1) if re.match(rf"{table}\s*[:=]", line)), path)
