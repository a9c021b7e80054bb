"""From a tree of values with places to a `Recipe`; every fault names file, line, key path, the text and what would be right."""

from types import NoneType
from typing import Any, Literal, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from swiftlite.recipe import aliases
from swiftlite.recipe.errors import nearest
from swiftlite.recipe.keys import Key, Path, dotted, key_at, options, section_of
from swiftlite.recipe.reading import Faults, Node, number
from swiftlite.recipe.schema import Recipe, Section


def validate(root: Node, faults: Faults) -> Recipe | None:
    """The recipe that a tree holds; None when it is not one, with the reasons in `faults`."""
    data = _fit_section(root, Recipe)
    try:
        return Recipe.model_validate(data, strict=True)
    except ValidationError as error:
        seen: set[Path] = set()
        for details in error.errors(include_url=False, include_context=False):
            _translate(root, details, seen, faults)
        return None


def plain(node: Node) -> Any:
    """The bare value."""
    if isinstance(node.value, dict):
        return {name: plain(inner) for name, inner in node.value.items()}
    return [plain(inner) for inner in node.value] if isinstance(node.value, list) else node.value


def _fit_section(node: Node, section: type[Section]) -> Any:
    if not isinstance(node.value, dict):
        return plain(node)
    data = {}
    for name, inner in node.value.items():
        field = section.model_fields.get(name)
        if field is None:
            data[name] = plain(inner)
        elif inner.value is not None or field.is_required() or NoneType in options(field.annotation):
            data[name] = _fit(inner, field.annotation)  # else: null stands for the key's default
    return data


def _fit(node: Node, annotation: Any) -> Any:
    """A value in the type that a key wants, where the spelling leaves no doubt; else as it is, to be refused."""
    value, parts = node.value, [_bare(part) for part in options(annotation)]
    kinds = {get_origin(part) or part for part in parts}
    if held := section_of(annotation):
        return [_fit_section(item, held) for item in value] if isinstance(value, list) else _fit_section(node, held)
    if isinstance(value, list):
        return [_text(item) for item in value]
    if isinstance(value, dict):
        return {name: _text(inner) if dict[str, str] in parts else plain(inner) for name, inner in value.items()}
    if value is None or bool in kinds or Literal in kinds:
        return value
    if float in kinds or int in kinds:
        found = number(value) if isinstance(value, str) else value
        if isinstance(found, float) and int in kinds and found.is_integer():
            return int(found)
        return value if found is None else found
    return [_text(node)] if list in kinds and str not in kinds else _text(node)


def _bare(annotation: Any) -> Any:
    """`int` of `Annotated[int, Gt(0)]`."""
    return annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation


def _text(node: Node) -> Any:
    """Numbers in the place of a text keep their spelling: `007` stays `007`."""
    is_number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
    return node.text if is_number else plain(node)


def _translate(root: Node, details: ErrorDetails, seen: set[Path], faults: Faults) -> None:
    node: Node = root
    path: Path = ()
    for part in details["loc"]:
        inner = node.value.get(str(part)) if isinstance(node.value, dict) else None
        if isinstance(node.value, list) and isinstance(part, int):
            inner = node.value[part]
        if inner is None:
            break
        node, path = inner, (*path, part)
    if details["type"] == "extra_forbidden":
        faults.at(node, "unknown key.", fix=aliases.advice(dotted(path[:-1]), str(path[-1])))
        return
    key = key_at(details["loc"] if details["type"] == "missing" else path)
    assert key is not None
    if details["type"] == "missing" or (key.required and node.value is None):
        example = key.path.rpartition(".")[2].removesuffix("[]")
        faults.add(f"{key.path}: missing. {key.help}", where=node.where, fix=f"Write `{example}: ...`.")
    elif path not in seen:  # a union reports each of its members
        _explain(node, key, faults)
    seen.add(path)


def _explain(node: Node, key: Key, faults: Faults) -> None:
    """What was expected, what was found, and the change that mends it."""
    got = {dict: "a section", list: "a list", NoneType: "nothing"}.get(type(node.value), node.text)
    got = f"'{got}'" if node.text and node.text[0] not in "\"'" else got
    what = f"expected {key.kind}, got {got}."
    if not key.path.startswith(node.key.partition("[")[0]):
        what = f"(our {key.path}) {what}"
    word, fix = str(node.value).lower(), None
    if key.annotation is bool and word in ("true", "false"):
        fix = "Remove the quotes."
    elif key.annotation is bool and word in ("no", "off", "n", "yes", "on", "y"):
        fix = f"`{word}` is a word in YAML 1.2: write {'true' if word in ('yes', 'on', 'y') else 'false'}."
    elif key.allowed:
        fix = nearest(word, key.allowed).strip() or None
    elif isinstance(node.value, bool) and key.kind == "text":
        fix = "Quote it if it is a name."
    elif key.section and not isinstance(node.value, dict | list | NoneType):
        fix = f"Write its keys below it; `swiftlite explain {key.path}` lists them."
    faults.at(node, what, fix=fix)
