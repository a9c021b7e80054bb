"""The rows of the five tables by name, each with a help line and where its object lives (`module:attr`).

Names are known here so that a wrong one fails in a second, without torch; `load` imports the object when it is needed.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from swiftlite.recipe.errors import RecipeError, nearest


@dataclass(frozen=True)
class Row:
    """One row of a table: a help line and the lazy address of its object, or the object itself where a plugin brought it."""

    help: str
    target: str
    plugin: Any = None


Table = dict[str, Row]

FAMILIES: Table = {
    "generic": Row("any causal language model of transformers", "swiftlite.models.families.generic:FAMILY"),
    "molmo2": Row("Molmo 2: text only, no images", "swiftlite.models.families.molmo2:FAMILY"),
}
STRATEGIES: Table = {
    "none": Row("one process, nothing sharded", "swiftlite.dist.strategies:NONE"),
    "ddp": Row("the whole model on every rank, gradients summed once a step", "swiftlite.dist.strategies:DDP"),
    "fsdp": Row("FSDP2: weights, gradients and optimizer sharded over all ranks", "swiftlite.dist.strategies:FSDP"),
    "zero1": Row("optimizer sharded; gradients summed once a step", "swiftlite.dist.strategies:ZERO1"),
    "zero2": Row("optimizer and gradients sharded; weights whole during a step", "swiftlite.dist.strategies:ZERO2"),
    "zero3": Row("as fsdp, and the head is gathered anew for the backward pass too", "swiftlite.dist.strategies:ZERO3"),
    "hsdp": Row("sharded inside groups of strategy.shard ranks, the same in every group", "swiftlite.dist.strategies:HSDP"),
}
FORMATS: Table = {
    "messages": Row("messages: [{role, content}]", "swiftlite.data.formats:MESSAGES"),
    "sharegpt": Row("conversations: [{from, value}], optional system", "swiftlite.data.formats:SHAREGPT"),
    "alpaca": Row("instruction, input, output, optional history, system", "swiftlite.data.formats:ALPACA"),
    "prompt_completion": Row("prompt, completion (text or messages)", "swiftlite.data.formats:PROMPT_COMPLETION"),
    "query_response": Row("query, response, optional history, system", "swiftlite.data.formats:QUERY_RESPONSE"),
    "segments": Row("segments: [{text, label: true or false}], without a template", "swiftlite.data.formats:SEGMENTS"),
    "text": Row("text: every token is trained", "swiftlite.data.formats:TEXT"),
    "tokens": Row("input_ids, optional labels", "swiftlite.data.formats:TOKENS"),
    "preference": Row(
        "pairs: chosen, rejected (text or messages), prompt or what they share", "swiftlite.data.preference:PREFERENCE"
    ),
    "rejected_response": Row(
        "pairs: messages, whose last turn is chosen, and rejected_response", "swiftlite.data.preference:REJECTED_RESPONSE"
    ),
}
OBJECTIVES: Table = {
    "sft": Row("next-token cross-entropy on the trained tokens", "swiftlite.objectives.sft:SFT"),
    "dpo": Row("direct preference optimisation on pairs, against the model at the start", "swiftlite.objectives.dpo:DPO"),
}
EXPORTERS: Table = {
    "adapter": Row("a PEFT folder: adapter_config.json + adapter_model.safetensors", "swiftlite.export.adapter:EXPORTER"),
    "merged": Row("a Hugging Face folder with adapters merged in", "swiftlite.export.merged:EXPORTER"),
}

TABLES: dict[str, Table] = {
    "FAMILIES": FAMILIES,
    "STRATEGIES": STRATEGIES,
    "FORMATS": FORMATS,
    "OBJECTIVES": OBJECTIVES,
    "EXPORTERS": EXPORTERS,
}


def load(table: Table, name: str, where: str = "") -> Any:
    """The object behind a row.

    Raises:
        RecipeError: when no row has that name; lists the nearest and all legal ones.
    """
    if name not in table:
        raise RecipeError(f"unknown name '{name}'.{nearest(name, table)}", where=where, fix=f"Known: {', '.join(table)}.")
    if table[name].plugin is not None:
        return table[name].plugin
    module, attr = table[name].target.split(":")
    return getattr(import_module(module), attr)
