"""LoRA on routed experts. transformers fuses them into 3-D parameters of one module; peft adapts those by target_parameters."""

from collections.abc import Iterable

from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel

from swiftlite.models.families.family import Family, Parts, inside, is_linear, matches
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.schema import LoraSection


def expert_parameters(model: PreTrainedModel, lora: LoraSection, family: Family) -> list[str]:
    """Full names of the fused expert weights that take an adapter: one of (experts, in, out) or (experts, out, in) each.

    Raises:
        RecipeError: the model has no routed experts, or an option that adapters on fused ones cannot honour.
    """
    parts = family.parts(model)
    left_out = [n for n, _ in model.named_modules() if any(n == e or n.endswith(f".{e}") for e in _taken(lora))]
    found = [
        n
        for n, p in model.named_parameters()
        if p.ndim == 3 and len(p) == parts.expert_count and inside(n, parts.experts) and not inside(n, left_out)
    ]
    if not found and not any(is_expert_linear(parts, n) for n, _ in model.named_modules() if n):
        fault = f"{type(model).__name__} has no routed experts that take an adapter."
        raise RecipeError(fault, where="lora.experts", fix="Leave the key out.")
    for key in ("dropout", "use_dora") if found else ():
        if getattr(lora, key):
            fault = "adapters on fused experts, which change weights and not outputs, cannot do that."
            raise RecipeError(fault, where=f"lora.{key}", fix="Leave it out, or lora.experts.")
    return found


def _taken(lora: LoraSection) -> list[str]:
    return [*lora.exclude_modules, *lora.modules_to_save]


def is_expert_linear(parts: Parts, name: str) -> bool:
    """Whether a module is a linear layer of one routed expert, and no router that stands among them."""
    module = parts.model.get_submodule(name)
    if not is_linear(module) or parts.role(name) != "expert":
        return False
    return getattr(module, "out_features", 0) != parts.expert_count and not matches(name, parts.family.routers)


def matched_parameters(model: nn.Module, config: LoraConfig) -> list[str]:
    """Full names of the parameters that a peft config selects, by peft's own rule."""
    ends = list(config.target_parameters or ())
    return [n for n, _ in model.named_parameters() if any(n == e or n.endswith(f".{e}") for e in ends)]


def wrappers(parameters: Iterable[str]) -> list[str]:
    """Names of the peft layers around parameters: those of one module are nested, the last one outermost."""
    names: list[str] = []
    for parameter in parameters:
        name = parameter.rpartition(".")[0]
        while name in names:
            name += ".base_layer"
        names.append(name)
    return names
