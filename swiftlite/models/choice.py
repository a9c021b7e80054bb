"""What of a model is packed, and what is left as it is."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from swiftlite.models import nf4
from swiftlite.models.experts import is_expert_linear
from swiftlite.models.families.family import Family, class_name, inside
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.schema import QuantizeSection


@dataclass(frozen=True)
class Choice:
    """What of a model is packed, chosen before adapters move it: linear layers, and modules with fused experts' weights."""

    linears: list[nn.Module]
    experts: list[tuple[nn.Module, list[str]]]
    notes: list[str]


def choose(model: Any, quantize: QuantizeSection, family: Family, in_full: Iterable[str] = ()) -> Choice:
    """Linear layers of the decoder blocks and routed experts; never head, embeddings, routers, towers, or what a kernel reads.

    Args:
        model: the bare Hugging Face model, on meta.
        in_full: modules that are trained in full.

    Raises:
        RecipeError: a name to skip matches nothing, or nothing is left to pack.
    """
    parts, modules = family.parts(model), dict(model.named_modules())
    for entry in quantize.skip:
        if not any(_named(n, [entry]) for n in modules) and "skip" in quantize.model_fields_set:
            raise RecipeError(f"'{entry}' matches no module", where="quantize.skip")
    blocked = [n for n in modules if n and _named(n, [*quantize.skip, *in_full])]
    multiple = nf4.BLOCK if quantize.method == "nf4" else 4
    linears, odd, others = [], [], []
    for name, module in modules.items():
        if inside(name, blocked) or not (parts.role(name) == "linear" or is_expert_linear(parts, name)):
            continue
        if type(module) is not nn.Linear:
            others.append((name, module))
        else:
            (odd if module.in_features % multiple else linears).append((name, module))
    experts: list[tuple[nn.Module, list[str]]] = []
    for name, module in modules.items():
        if not inside(name, parts.experts) or inside(name, blocked):
            continue
        fused = [(n, p) for n, p in module.named_parameters(recurse=False) if p.ndim == 3 and len(p) == parts.expert_count]
        odd += [(f"{name}.{n}", p) for n, p in fused if p.shape[-1] % multiple]
        if found := [n for n, p in fused if not p.shape[-1] % multiple]:
            experts.append((module, found))
    notes = []
    for left, why in ((odd, f"their rows are no multiple of {multiple}"), (others, "their classes compute in their own way")):
        if left:
            shown = f"{left[0][0]} ({class_name(left[0][1])})"
            notes.append(f"{len(left)} weights stay as they are, such as {shown}: {why}")
    if not linears and not experts:
        fault = "; ".join([f"no weight of {type(model).__name__} can be packed", *notes])
        raise RecipeError(fault, where="quantize", fix="Leave the key out.")
    notes = [f"quantize: {note}" for note in notes]
    return Choice([m for _, m in linears], experts, notes)


def _named(name: str, entries: Iterable[str]) -> bool:
    """Whether an entry names a module: its whole name, its last parts, or a pattern for the whole name."""
    return any(name == e or name.endswith(f".{e}") or fnmatchcase(name, e) for e in entries)
