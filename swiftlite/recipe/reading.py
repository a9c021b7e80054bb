"""Strict YAML 1.2 with places: every value knows its file, line and spelling. Nothing but text is built from a file."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from swiftlite.recipe.errors import RecipeError

Scalar = str | int | float | bool | None

NUMBER = re.compile(r"[-+]?(\.\d+|\d[\d_]*(\.\d*)?)([eE][-+]?\d+)?")
WHOLE = re.compile(r"[-+]?\d[\d_]*")
# What must not be repeated in a message or a saved file.
SECRET_VALUE = re.compile(r"\b(hf_\w{6,}|sk-[\w-]{8,}|gh[pousr]_\w{8,})")
SECRET_KEY = re.compile(r"(?i)^token$|(^|_)(hf|hub|auth|access|api)_token$|(^|_)(api_?key|access_key|secret|password)$")
SECRET_ENTRY = re.compile(r"(?i)((?:token|key|secret|password)[\"']?\s*[:=]\s*)\S+")


@dataclass
class Node:
    """A value of the recipe.

    Attributes:
        where: `file:line` or `command line`.
        key: the key path as the user wrote it, before aliases.
        text: a scalar as written, quotes included.
        made: a mapping that only leads to an override, so it is laid over what stands there.
    """

    value: "dict[str, Node] | list[Node] | Scalar"
    where: str
    key: str = ""
    text: str = ""
    made: bool = False


@dataclass
class Faults:
    """Collects errors, so that one run shows them all."""

    items: list[RecipeError] = field(default_factory=list)

    def add(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.items.append(RecipeError(SECRET_VALUE.sub("***", what), where=where, fix=fix))

    def at(self, node: Node, what: str, *, fix: str | None = None) -> None:
        self.add(f"{node.key}: {what}" if node.key else what, where=node.where, fix=fix)

    def raise_any(self) -> None:
        """Raises the one error, or one that lists all in the order of their lines."""

        def line(error: RecipeError) -> int:
            return int(found.group(1)) if (found := re.search(r":(\d+)$", error.where or "")) else 1 << 30

        items = sorted(self.items, key=line)
        if len(items) == 1:
            raise items[0]
        if items:
            raise RecipeError(f"{len(items)} mistakes in the recipe:\n" + "\n".join(f"  {error}" for error in items))


def mask(text: str) -> str:
    """A line of a recipe without access tokens."""
    return SECRET_ENTRY.sub(r"\1***", SECRET_VALUE.sub("***", text))


def number(text: str) -> int | float | None:
    """The number that a text spells in any usual way, or None; infinite and NaN are none."""
    if WHOLE.fullmatch(text):
        return int(text)
    if not NUMBER.fullmatch(text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def scalar(text: str) -> Scalar:
    """What an unquoted word means in YAML 1.2: `no`, `off`, `on`, `yes` are words, `1e-5` is a number."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    found = None if "_" in text else number(text)
    return text if found is None else found


def parse(text: str, label: str, faults: Faults) -> Node:
    """The mapping that a recipe's text holds.

    Args:
        label: name of the file in messages and origins.

    Raises:
        RecipeError: when the text is not YAML, empty, or not a mapping. Repeated keys are added to `faults`.
    """
    root = _compose(text, label)
    if root is None:
        raise RecipeError("the recipe is empty.", where=label, fix="Start with `model: org/name` and `data: file.jsonl`.")
    if not isinstance(root, MappingNode):
        raise RecipeError(
            f"a recipe is a mapping of keys, not {'a list' if isinstance(root, SequenceNode) else 'a text'}.",
            where=f"{label}:{root.start_mark.line + 1}",
            fix="Write `key: value` with a space behind the colon.",
        )
    return _build(root, lambda line: f"{label}:{line + 1}", "", faults, [])


def parse_value(text: str, key: str, faults: Faults) -> Node:
    """The value of an override of the command line."""
    try:
        root = YAML(typ="safe", pure=True).compose(text)
    except YAMLError:
        faults.add(f"{key}: not a YAML value: {text}", where="command line", fix=f"Quote it: {key}='\"...\"'.")
        return Node(None, "command line", key, text)
    if root is None:  # only a comment: `#` begins one
        return Node(text, "command line", key, text)
    return _build(root, lambda line: "command line", key, faults, [])


def _compose(text: str, label: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        line = (error.problem_mark or error.context_mark).line
        raise RecipeError(_in_plain_words(error, text, line), where=f"{label}:{line + 1}") from None
    except YAMLError as error:
        line = text.count("\n", 0, getattr(error, "position", 0))
        raise RecipeError("a character that YAML does not allow.", where=f"{label}:{line + 1}", fix="Remove it.") from None


def _in_plain_words(error: MarkedYAMLError, text: str, line: int) -> str:
    lines = text.splitlines()
    excerpt = mask(lines[line].strip()) if line < len(lines) else ""
    problem = str(error.problem)
    if "\t" in problem or "\\t" in problem:
        return f"a tab in the indentation: '{excerpt}'. Use spaces."
    if "undefined alias" in problem or problem.startswith("while scanning an alias"):
        return f"'*' begins a YAML alias: '{excerpt}'. Quote the text."
    if "another document" in problem:
        return "a second YAML document ('---'). A recipe is one document."
    if "mapping values" in problem or "block end" in problem or "could not find expected ':'" in problem:
        return f"the indentation or a colon is wrong: '{excerpt}'. Align the keys of a section; quote a text that holds ': '."
    return f"not valid YAML ({problem}): '{excerpt}'."


def _build(node: Any, place: Any, key: str, faults: Faults, above: list[int]) -> Node:
    where = place(node.start_mark.line)
    tag = str(node.tag)
    if id(node) in above or not tag.startswith("tag:yaml.org,2002:") or "python/" in tag:
        raise RecipeError(
            f"{key}: YAML {'aliases of themselves' if id(node) in above else f'tags ({tag})'} are not read.", where=where
        )
    above = [*above, id(node)]
    if isinstance(node, ScalarNode):
        quote = {"'": "'", '"': '"'}.get(node.style or "", "")
        value = scalar(node.value) if node.style is None else node.value
        return Node(value, where, key, f"{quote}{node.value}{quote}")
    if isinstance(node, SequenceNode):
        return Node([_build(item, place, f"{key}[{i}]", faults, above) for i, item in enumerate(node.value)], where, key)
    entries: dict[str, Node] = {}
    for name_node, value_node in node.value:
        here = place(name_node.start_mark.line)
        if not isinstance(name_node, ScalarNode):
            raise RecipeError(f"{key}: a key is a word, not a list or mapping.", where=here)
        name = name_node.value
        path = f"{key}.{name}" if key else name
        value = _build(value_node, place, path, faults, above)
        value.where = here  # an entry is found by its key
        if name in entries:
            faults.add(f"{path}: repeated key, first on {entries[name].where}.", where=here, fix="Keep one of them.")
        else:
            entries[name] = value
    return Node(entries, where, key)
