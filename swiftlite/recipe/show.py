"""The effective recipe for people and machines: each key, its value, and where that comes from."""

from collections.abc import Sequence
from typing import Any

from swiftlite.recipe.keys import keys
from swiftlite.recipe.resolve import Loaded
from swiftlite.recipe.writing import flow, public


def effective(loaded: Loaded) -> list[tuple[str, Any, str]]:
    """`(key, value, origin)` of every key in the order of the schema; texts from the environment as `${NAME}`."""
    data, rows = public(loaded.recipe), []
    for key in keys().values():
        holder = data[key.parent] if key.parent and "[]" not in key.parent else data
        if "[]" in key.path or key.name not in (holder or ()) or (holder is data and isinstance(data[key.name], dict)):
            continue
        rows.append((key.path, holder[key.name], loaded.origins.get(key.path, "default")))
    return rows


def as_text(loaded: Loaded) -> str:
    """One line a key, `train.learning_rate: 0.0002   (method: lora)`, and behind them, closely set, what was left as it is."""
    rows, untouched = list[tuple[str, Any, str]](), dict[str, list[str]]()
    for key, value, origin in effective(loaded):
        if origin != "default" or keys()[key].section:
            rows.append((key, value, origin))
        else:
            untouched.setdefault(key.partition(".")[0], []).append(f"{key}: {flow(value)}")
    left = [line for entries in untouched.values() for line in _set_closely(entries)]
    return "\n".join([*table(rows), *(["left at their defaults", *left] if left else [])])


def table(rows: Sequence[tuple[str, Any, str]]) -> list[str]:
    """A line for each `(key, value, origin)`."""
    entries = [f"{key}: {flow(value)}" for key, value, _ in rows]
    width = min(60, max(map(len, entries), default=0))
    return [f"{entry:<{width}}  ({origin})" for entry, (_, _, origin) in zip(entries, rows, strict=True)]


def _set_closely(entries: list[str], width: int = 120) -> list[str]:
    """Entries side by side on lines that are indented, and broken between entries only."""
    lines = [""]
    for entry in entries:
        if len(lines[-1]) + len(entry) > width and lines[-1]:
            lines.append("")
        lines[-1] += f"  {entry}"
    return lines


def as_data(loaded: Loaded) -> dict[str, Any]:
    """`{recipe, origins, notes, path}`, JSON-able."""
    origins = {key: origin for key, _, origin in effective(loaded)}
    return {"path": loaded.path, "recipe": public(loaded.recipe), "origins": origins, "notes": loaded.notes}
