"""`a.b=c` of the command line, laid over the recipe's file."""

from swiftlite.recipe import aliases
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.reading import Faults, Node, parse_value

WHERE = "command line"


def override(root: Node, text: str, faults: Faults, notes: list[str]) -> None:
    """Lays one override over a tree that has our names and long forms already, in place.

    The value is YAML; a mapping is laid over a section key by key and replaces any other value.

    Raises:
        RecipeError: when the text is not `key=value`.
    """
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        raise RecipeError(f"'{text}' is not an override.", where=WHERE, fix="Write key=value, as train.learning_rate=1e-4.")
    if not value.strip():
        raise RecipeError(f"{path}: no value.", where=WHERE, fix=f"Write {path}=null for none, {path}='\"\"' for an empty text.")
    node = parse_value(value, path, faults)
    parts = path.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        node = Node({parts[depth]: node}, WHERE, ".".join(parts[:depth]), made=True)
    aliases.apply(node, faults, notes)
    _lay_over(root, node, 0, faults)


def _lay_over(below: Node, above: Node, depth: int, faults: Faults) -> None:
    """Depth 0 is the top level, depth 1 a section; deeper mappings are values, unless the path of an override leads on."""
    if isinstance(below.value, dict) and isinstance(above.value, dict) and (depth < 2 or above.made):
        for name, node in above.value.items():
            if name in below.value:
                _lay_over(below.value[name], node, depth + 1, faults)
            else:
                below.value[name] = node
    else:
        if above.made and below.value is not None:
            faults.at(below, f"not a section, so {above.key} has no keys to set.", fix="Write its keys below it.")
        below.value, below.where, below.key, below.text = above.value, above.where, above.key, above.text
