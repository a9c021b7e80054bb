"""`${NAME}` in texts: read from the environment, shown and saved as `${NAME}`. Tokens written out are refused."""

import os
import re

from swiftlite.recipe.keys import Path
from swiftlite.recipe.reading import SECRET_KEY, SECRET_VALUE, Faults, Node

REFERENCE = re.compile(r"\$\{([^{}]*)\}")


def expand(root: Node, faults: Faults) -> dict[Path, str]:
    """Puts values of the environment into texts, in place.

    Returns:
        The texts as written, by place.
    """
    written: dict[Path, str] = {}
    _expand(root, (), faults, written)
    return written


def _expand(node: Node, path: Path, faults: Faults, written: dict[Path, str]) -> None:
    if isinstance(node.value, dict):
        for name, inner in node.value.items():
            _expand(inner, (*path, name), faults, written)
    elif isinstance(node.value, list):
        for index, inner in enumerate(node.value):
            _expand(inner, (*path, index), faults, written)
    elif isinstance(node.value, str):
        text = node.value
        names = REFERENCE.findall(text)
        if not names and (SECRET_VALUE.search(text) or (text and SECRET_KEY.search(str(path[-1])))):
            faults.at(node, "an access token is written out.", fix="Put it into the environment; write ${NAME} here.")
            node.value, node.text = "***", "***"
        missing = [name for name in names if name not in os.environ]
        for name in missing:
            faults.at(node, f"${{{name}}} is not set in the environment.", fix=f"export {name}=...")
        if names and not missing:
            written[path] = text
            node.value = REFERENCE.sub(lambda found: os.environ[found.group(1)], text)
