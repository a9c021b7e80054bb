"""Every key of the recipe by its path, with its type in words, read from the schema.

Paths are dotted; a key of each item of a list is written `data.train[].path`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from swiftlite.recipe import tables
from swiftlite.recipe.schema import Recipe, Section

Path = tuple[str | int, ...]

# Keys whose legal values are the rows of a table.
TABLE_OF: dict[str, tables.Table] = {
    "data.format": tables.FORMATS,
    "data.train[].format": tables.FORMATS,
    "data.eval[].format": tables.FORMATS,
    "strategy.name": tables.STRATEGIES,
    "train.objective": tables.OBJECTIVES,
    "export.formats": tables.EXPORTERS,
}


@dataclass(frozen=True)
class Key:
    """One key: where it stands, what it takes, what it does. `section` is set where it holds keys of its own."""

    path: str
    annotation: Any
    kind: str
    default: Any
    required: bool
    help: str
    section: type[Section] | None

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def allowed(self) -> dict[str, str]:
        """Legal words with their help lines (empty where there are none); no entries: any value of the kind."""
        rows = {name: row.help for name, row in TABLE_OF.get(self.path, {}).items()}
        if rows and self.path.startswith("data."):
            rows = {"auto": "found by the columns"} | rows
        return rows or {str(word): "" for word in _literals(self.annotation)}


def _literals(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(word for part in get_args(annotation) for word in _literals(part))


def options(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; of any other type, the type alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def section_of(annotation: Any) -> type[Section] | None:
    """The section class that an annotation holds: directly, optionally, or as items of a list."""
    for part in options(annotation):
        held = get_args(part)[0] if get_origin(part) is list else part
        if isinstance(held, type) and issubclass(held, Section):
            return held
    return None


def _bounds(metadata: tuple[Any, ...]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = [f"{sign} {getattr(m, name):g}" for name, sign in signs.items() for m in metadata if hasattr(m, name)]
    return (" " if found else "") + " and ".join(found)


def in_words(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """A type for the person at the keyboard: `a number > 0`, `one of a, b`, `a list of texts`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return in_words(args[0], (*args[1:], *metadata))
    if origin in (Union, UnionType):
        return " or ".join(in_words(part, metadata) for part in args if part is not NoneType)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is list:
        return "a list of texts" if args[0] is str else "a path, or a list of paths or sources {path: ...}"
    if origin is dict:
        return "a mapping {name: value}"
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _bounds(metadata)
    simple: dict[Any, str] = {bool: "true or false", str: "text"}
    return simple.get(annotation, "a section")


def _walk(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        held, path = section_of(field.annotation), prefix + name
        kind = in_words(field.annotation, tuple(field.metadata))
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        yield Key(path, field.annotation, kind, default, field.is_required(), field.description or "", held)
        if held:
            yield from _walk(held, f"{path}[]." if kind.startswith("a path") else f"{path}.")


@cache
def keys() -> dict[str, Key]:
    """All keys, sections included, in the order of the schema."""
    return {key.path: key for key in _walk(Recipe, "")}


@cache
def children(parent: str) -> dict[str, Key]:
    """The keys of one section by name; `""` is the top level."""
    return {key.name: key for key in keys().values() if key.parent == parent}


def dotted(path: Path) -> str:
    """`("data", "train", 0, "path")` as `data.train[].path`."""
    return ".".join("[]" if isinstance(part, int) else part for part in path).replace(".[]", "[]")


def key_at(path: Path) -> Key | None:
    """The key at a place of a recipe, or the one whose value that place lies in."""
    for end in range(len(path), 0, -1):
        if key := keys().get(dotted(path[:end]).removesuffix("[]")):
            return key
    return None
