"""What a key does, takes and defaults to: the help behind `swiftlite explain`."""

from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel

from swiftlite.recipe.aliases import ADVICE, ALIASES, VALUES, other_names, our_name
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.keys import Key, children, keys
from swiftlite.recipe.writing import flow


def find(query: str) -> list[Key]:
    """The keys that a word names: a path, a section (with its keys), a bare name, another toolkit's name, a part of a name.

    Raises:
        RecipeError: when nothing fits; names the nearest key.
    """
    word = query.strip().lower()
    if word in keys():
        return [keys()[word], *(key for key in keys().values() if key.path.startswith((f"{word}.", f"{word}[].")))]
    section, _, name = word.rpartition(".")
    homes = [home for other in ALIASES if (not section or other == section) and (home := our_name(other, name))]
    found = {path: keys()[path] for path in homes if path in keys()}
    if not found:
        found = {path: key for path, key in keys().items() if key.name.startswith(word) or path.startswith(word)}
    if not found and len(word) > 2:
        found = {path: key for path, key in keys().items() if word in path or word in key.help.lower()}
    if not found:
        names = {key.name: key.path for key in reversed(keys().values())} | dict.fromkeys(keys(), "")
        close = get_close_matches(word, list(names), n=1)
        hint = f"Did you mean '{names[close[0]] or close[0]}'?" if close else "`swiftlite explain` lists all."
        raise RecipeError(f"no key is called '{query}'.", fix=ADVICE.get(word, hint))
    return list(found.values())


def as_text(query: str | None = None) -> str:
    """Help for a query; all keys, a line each, without one."""
    if query is None:
        return "\n\n".join(_block(key) for key in children("").values())
    found = find(query)
    if len(found) == 1:
        return _detail(found[0])
    if found[0].section and all(key.path.startswith(found[0].path) for key in found):
        return _block(found[0])
    return "\n\n".join(_detail(key) for key in found) if len(found) < 4 else _table(found)


def as_data(query: str | None = None) -> list[dict[str, Any]]:
    """The same as JSON-able data."""
    return [
        {
            "key": key.path,
            "type": key.kind,
            "default": _plain_default(key),
            "required": key.required,
            "help": key.help,
            "allowed": key.allowed,
            "also": other_names(key.path),
        }
        for key in (keys().values() if query is None else find(query))
    ]


def _plain_default(key: Key) -> Any:
    return key.default.model_dump(mode="json") if isinstance(key.default, BaseModel) else key.default


def _default(key: Key) -> str:
    if key.required:
        return "(required)"
    return "" if isinstance(key.default, BaseModel) else flow(key.default)


def _block(key: Key) -> str:
    """A section with its keys, or a key of the top level."""
    inner = [item for item in keys().values() if item.path.startswith((f"{key.path}.", f"{key.path}[]."))]
    if key.path == "data":  # the keys of a source are shown once
        inner = [item for item in inner if item.parent != "data.eval[]"]
    return "\n".join([f"{key.path}: {key.help}", _table(inner)] if inner else [f"{key.path} = {_default(key)}: {key.help}"])


def _table(found: list[Key]) -> str:
    names = [f"  {key.path} = {_default(key)}" if not key.section else f"  {key.path}" for key in found]
    width = min(52, max(map(len, names)))
    return "\n".join(f"{name:<{width}}  {key.help}" for name, key in zip(names, found, strict=True))


def _detail(key: Key) -> str:
    lines = [key.path, f"  {key.help}", f"  type:     {key.kind}"]
    if default := _default(key):
        lines.append(f"  default:  {default}")
    if any(key.allowed.values()):
        width = max(map(len, key.allowed))
        lines += ["  values:"] + [f"    {name:<{width}}  {line}" for name, line in key.allowed.items()]
    if names := other_names(key.path):
        lines.append(f"  also understood: {', '.join(names)}")
    if words := VALUES.get(key.path):
        lines.append(f"  also understood as values: {', '.join(f'{word} ({flow(ours)})' for word, ours in words.items())}")
    return "\n".join(lines)
