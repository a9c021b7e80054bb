"""A recipe as plain data and as YAML, with texts from the environment as `${NAME}`."""

import json
import re
from typing import Any

from swiftlite.recipe.reading import scalar
from swiftlite.recipe.schema import Recipe

# Texts that need no quotes, in brackets neither; readers of YAML 1.1 take some words for true and false.
PLAIN = re.compile(r"[\w./<][\w./@+:<>*-]*(?<!:)|~?/[\w./-]+")
WORDS_OF_YAML_1_1 = {"y", "n", "yes", "no", "on", "off"}


def public(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON-able data for printing, saving and trackers; no value of the environment is in it."""
    data = recipe.model_dump(mode="json")
    for part in ("train", "eval"):
        sources = getattr(recipe.data, part)
        data["data"][part] = [source.model_dump(mode="json", exclude_defaults=True) for source in sources]
    if recipe.lora and recipe.model.adapter:
        # The adapter says the rest: our defaults are not what it has, and written out they would contradict it.
        data["lora"] = recipe.lora.model_dump(mode="json", exclude_unset=True)
    for path, text in recipe._written.items():
        inner: Any = data
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = text
    return data


def flow(value: Any) -> str:
    """A value on one line of YAML that reads back as the same value."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(name)}: {flow(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if PLAIN.fullmatch(value) and scalar(value) == value and value.lower() not in WORDS_OF_YAML_1_1:
        return value
    return json.dumps(value, ensure_ascii=not value.isprintable())


def dump_yaml(recipe: Recipe) -> str:
    """A resolved recipe as YAML that loads to the same run."""
    # Accumulation follows from the two batch sizes and the world size; written out it would bind a run to its world size.
    # A metric where nothing is evaluated or saved is refused, as nothing could come of it.
    # What a DeepSpeed JSON said is in the keys; a run must not need that file again.
    left_out = {"gradient_accumulation_steps", "config"}
    if "no" in (recipe.eval.eval_strategy, recipe.checkpoint.save_strategy):
        left_out.add("metric_for_best_model")
    lines = []
    for name, value in public(recipe).items():
        if not isinstance(value, dict):
            lines.append(f"{name}: {flow(value)}")
            continue
        lines.append(f"{name}:")
        lines += [f"  {key}: {flow(inner)}" for key, inner in value.items() if key not in left_out]
    return "\n".join(lines) + "\n"
