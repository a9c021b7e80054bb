"""What is trained and what is not, in numbers and by name."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from peft.tuners.lora import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from swiftlite.models.families.family import Family, Parts, class_name, count, inside
from swiftlite.models.packed import elements

_LABELS = {
    "expert": "experts",
    "router": "router",
    "tower": "tower",
    "linear": "linear layers",
    "bypassed": "out of reach",
}
# What peft puts between a module and its base weight.
_INNER = {"base_layer", "original_module", "token_adapter"}


@dataclass(frozen=True)
class Untrained:
    """One kind of module that neither trains nor has an adapter.

    Attributes:
        part: router, experts, head, embeddings, tower, norms and the like.
        classes: how many of which class, as `4 x MixtralExperts`.
    """

    part: str
    classes: str
    parameters: int


@dataclass(frozen=True)
class Coverage:
    """Parameters that train, and block weights out of an adapter's reach.

    Attributes:
        trainable, total: parameters; a tied weight counts once.
        adapted: modules with an adapter.
        block_weights: base weights inside the decoder blocks.
        uncovered: those of them that neither train nor have an adapter.
        untrained: by part, the largest first.
    """

    trainable: int
    total: int
    adapted: int
    block_weights: int
    uncovered: int
    untrained: list[Untrained]

    @property
    def uncovered_share(self) -> float:
        return self.uncovered / max(self.block_weights, 1)

    def lines(self) -> list[str]:
        """For the table before step 1."""
        adapters = f", {self.adapted} adapted modules" if self.adapted else ""
        share = self.trainable / max(self.total, 1)
        rows = [f"trainable {self.trainable:,} of {self.total:,} parameters ({share:.2%}){adapters}"]
        if self.untrained:
            what = "of the blocks' weights have no adapter" if self.adapted else "of the blocks' weights"
            listed = "; ".join(f"{u.part}: {u.classes} ({u.parameters:,})" for u in self.untrained)
            rows.append(f"frozen    {listed}; {self.uncovered_share:.1%} {what}")
        return rows


def coverage(model: PreTrainedModel, family: Family) -> Coverage:
    """Counts on a model with adapters injected or weights frozen; weights may be on meta.

    Args:
        model: the Hugging Face model (the root, not the peft wrapper).
    """
    parts = family.parts(model)
    seen: set[int] = set()
    sizes: dict[str, int] = defaultdict(int)
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    in_blocks = uncovered = total = 0
    for path, owner in model.named_modules():
        name, layer = _base_name(model, path)
        for own, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            if layer is None:
                seen.add(id(parameter))
                total += parameter.numel()
                continue
            seen.add(id(parameter))
            # Some rows of an embedding may train (added tokens); the rest of it does not.
            covered = parameter.requires_grad or isinstance(layer, (LoraLayer, ModulesToSaveWrapper))
            in_block, size = inside(name, parts.blocks), elements(owner, own, parameter)
            total += size
            in_blocks += in_block * size
            if not covered:
                uncovered += in_block * size
                part = _part(name, owner, parts)
                sizes[part] += size
                modules[part][name] = class_name(owner)
    order = sorted(sizes, key=lambda part: -sizes[part])
    counts = {part: Counter(modules[part].values()) for part in order}
    return Coverage(
        trainable=count(p for p in model.parameters() if p.requires_grad),
        total=total,
        adapted=sum(isinstance(m, LoraLayer) for m in model.modules()),
        block_weights=in_blocks,
        uncovered=uncovered,
        untrained=[Untrained(p, ", ".join(f"{n} x {c}" for c, n in counts[p].items()), sizes[p]) for p in order],
    )


def _base_name(model: nn.Module, path: str) -> tuple[str, nn.Module | None]:
    """The name a module had before peft, and the peft layer around it (itself where there is none).

    The layer is None for the adapter's own modules, which hold no base weight.
    """
    names, current, layer = [], model, model
    for part in path.split(".") if path else []:
        wrapper = isinstance(current, (LoraLayer, AuxiliaryTrainingWrapper))
        if wrapper and part not in _INNER:
            return "", None
        if not (wrapper or (part == "base_layer" and isinstance(layer, AuxiliaryTrainingWrapper))):
            names.append(part)
        current = getattr(current, part)
        if isinstance(current, (LoraLayer, AuxiliaryTrainingWrapper)):
            layer = current
    return ".".join(names), layer


def _part(name: str, owner: nn.Module, parts: Parts) -> str:
    role = parts.role(name)
    if role == "outside":
        if parts.head and inside(name, [parts.head]):
            return "head"
        return "embeddings" if isinstance(owner, nn.Embedding) else "outside the blocks"
    if role in _LABELS:
        return _LABELS[role]
    return "norms" if "norm" in type(owner).__name__.lower() else "other"
