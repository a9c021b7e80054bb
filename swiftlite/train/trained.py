"""From a run to what the exporters need. Of the data that is a few rows: checkpoints keep them, so an export needs no data."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftlite.export.trained import Trained
from swiftlite.models.build import Built, Precision
from swiftlite.models.files import ModelFiles
from swiftlite.recipe.schema import Recipe
from swiftlite.recipe.writing import public
from swiftlite.train.plan import Plan

# Rows on which exports are compared with the trained model: real ones, short enough to run twice on a CPU.
PROMPTS, PROMPT_TOKENS = 4, 256


def export_facts(plan: Plan) -> dict[str, Any]:
    """JSON-able: rows to compare on, the tokens that end an answer, and the template where it replaces the model's own."""
    template = plan.renderer.template
    return {
        "prompts": [s.input_ids[:PROMPT_TOKENS] for s in plan.train.samples[:PROMPTS]],
        "stop_ids": sorted(plan.renderer.stop_ids),
        "chat_template": template if template != plan.tokenizer.chat_template else None,
    }


def public_overrides(recipe: Recipe) -> dict[str, Any]:
    """model.config_overrides without values from the environment, which go into no file."""
    given, shown = recipe.model.config_overrides, public(recipe)["model"]["config_overrides"]
    return {k: v for k, v in given.items() if shown[k] == v}


def trained_of(
    built: Built,
    files: ModelFiles,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    precision: Precision,
    facts: dict[str, Any],
) -> Trained:
    """A built model, with trained weights in it, as the exporters take it. `facts`: see `export_facts`."""
    return Trained(
        model=built.root,
        peft=built.peft,
        files=files,
        tokenizer=tokenizer,
        tokens_added=bool(recipe.model.add_tokens),
        chat_template=facts["chat_template"],
        stop_ids=set(facts["stop_ids"]),
        prompts=facts["prompts"],
        base_dtype=built.base_dtype,
        compute_dtype=precision.compute,
        trust_remote_code=recipe.model.trust_remote_code,
        config_overrides=public_overrides(recipe),
    )
