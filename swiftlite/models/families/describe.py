"""The parts of a model with their sizes, for the table printed before step 1."""

from collections import Counter
from dataclasses import dataclass

from transformers import PreTrainedModel

from swiftlite.models.families.family import Family, class_name, count, name_of


@dataclass(frozen=True)
class Row:
    """One line: the part, what it is, and its parameters (a tied weight counts once)."""

    part: str
    what: str
    parameters: int


def describe(model: PreTrainedModel, family: Family) -> list[Row]:
    """Blocks, embeddings, towers and the rest; the first row is the whole model."""
    parts = family.parts(model)
    total = count(model.parameters())
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    tied = outer is not None and getattr(outer, "weight", None) is getattr(inner, "weight", 0)
    names = [n for n in (name_of(model, inner), parts.head) if n]

    def classes(modules: list[str]) -> str:
        found = Counter(class_name(model.get_submodule(n)) for n in modules)
        return ", ".join(f"{n} x {c}" for c, n in found.items())

    def size(modules: list[str]) -> int:
        return count(p for n in modules for p in model.get_submodule(n).parameters())

    rows = [
        Row("decoder blocks", classes(parts.blocks), size(parts.blocks)),
        Row("embeddings", (" tied with " if tied else ", ").join(names), size(names)),
    ]
    if parts.towers:
        rows.append(Row("towers (frozen)", ", ".join(parts.towers), size(parts.towers)))
    rows.append(Row("other", "", total - sum(r.parameters for r in rows)))
    experts = f", {parts.expert_count} experts a layer" if parts.experts else ""
    return [Row("model", f"{class_name(model)} ({model.config.model_type}{experts})", total), *rows]
