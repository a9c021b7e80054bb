"""Names of weights in an adapted model."""

import re

# Parts of a parameter's name that peft puts in front of a base weight, and parts that mark a weight of its own.
_WRAPPERS = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.)")
_ADAPTER = re.compile(r"\.(lora_\w+|modules_to_save|trainable_tokens_\w+)\.")


def base_name(name: str) -> str | None:
    """The Hugging Face name of a base weight in an adapted model; None for a weight that belongs to an adapter."""
    return None if _ADAPTER.search(name) else _WRAPPERS.sub("", name)
