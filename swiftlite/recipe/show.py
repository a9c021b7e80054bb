"""The effective recipe for people and machines: each key, its value, and where that comes from."""

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
    """One line a key: `train.learning_rate: 0.0002   (method: lora)`."""
    entries = [(f"{key}: {flow(value)}", origin) for key, value, origin in effective(loaded)]
    width = min(60, max(len(entry) for entry, _ in entries))
    return "\n".join(f"{entry:<{width}}  ({origin})" for entry, origin in entries)


def as_data(loaded: Loaded) -> dict[str, Any]:
    """`{recipe, origins, notes, path}`, JSON-able."""
    origins = {key: origin for key, _, origin in effective(loaded)}
    return {"path": loaded.path, "recipe": public(loaded.recipe), "origins": origins, "notes": loaded.notes}
