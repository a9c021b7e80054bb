"""What the rest of the toolkit needs to know about a model family, as data, and how to find its parts in a model."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from posixpath import commonpath

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swiftlite.recipe.errors import ModelError, RecipeError

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts", "n_experts")


@dataclass(frozen=True)
class Family:
    """A model family. Patterns are regular expressions that must match a whole module name.

    The generic family holds for every causal language model of transformers; a row of its own is only for a family whose facts
    cannot be read from its config, its class and its module tree.

    Attributes:
        block_classes: class names of the repeated decoder blocks; empty: the model class says so itself (`_no_split_modules`).
        experts: routed experts, whether fused into 3-D parameters or one linear layer each.
        routers: what chooses experts; looked for only in modules that hold experts.
        towers: encoders of other kinds of input, where they are not models with a config of their own.
        bypassed: linear layers inside decoder blocks that `all-linear` leaves out, because no gradient of a text row reaches
            them: cross-attention to images, and indexers whose choice of keys has no derivative.
        skipped_blocks: classes of decoder blocks that a row of text jumps over.
        kernel_weights: linear layers of state-space mixers whose fused kernels read the weight itself, so that an adapter would
            train on a CPU and never run on a GPU.
        score_caps: config keys of a soft cap on attention scores.
        text_inputs: integer inputs that the class demands beside input_ids; 0 says text.
    """

    name: str
    block_classes: tuple[str, ...] = ()
    experts: tuple[str, ...] = (r"(.*\.)?experts(\..+)?",)
    routers: tuple[str, ...] = (r"(.*[._])?(router|gate)(\..+)?",)
    towers: tuple[str, ...] = (r"(.*\.)?[^.]*(vision|visual|image|audio|speech|video)[^.]*",)
    bypassed: tuple[str, ...] = (r".*cross_?att[^.]*(\..+)?", r".*\.indexer(\..+)?")
    skipped_blocks: tuple[str, ...] = (r".*CrossAttention.*Layer",)
    kernel_weights: tuple[str, ...] = ("out_proj", "x_proj", "dt_proj")
    score_caps: tuple[str, ...] = ("attn_logit_softcapping",)
    text_inputs: tuple[str, ...] = ()

    def blocks(self, model: PreTrainedModel, wrap: Sequence[str] = ()) -> list[str]:
        """Names of the decoder blocks in order: what is sharded, recomputed and compiled one by one.

        Args:
            model: the Hugging Face model, before or after adapters; weights may be on meta.
            wrap: class names that replace the family's own (`strategy.wrap`).

        Raises:
            RecipeError: no module has a class named in `wrap`.
            ModelError: the model has no repeated blocks at all; the message lists the classes it does have.
        """
        towers, modules = self.towers_of(model), dict(model.named_modules())
        classes = sorted({class_name(m) for m in modules.values()})
        if absent := [name for name in wrap if name not in classes]:
            known = f"Its classes: {', '.join(classes)}."
            raise RecipeError(f"the model has no class '{absent[0]}'.", where="strategy.wrap", fix=known)
        wanted = set(wrap or self.block_classes or getattr(model, "_no_split_modules", None) or ())
        lists = {n: m for n, m in modules.items() if isinstance(m, nn.ModuleList) and len(m) and not inside(n, towers)}
        items = {f"{n}.{i}" for n, m in lists.items() for i in range(len(m))}
        # The class lists name embeddings and classes of other models too: only what a list repeats is a block.
        named = (n for n, m in modules.items() if class_name(m) in wanted and (n in items or (wrap and not inside(n, towers))))
        if found := list(outermost(named)):
            return found
        if not lists:
            seen = f"{type(model).__name__} has no repeated decoder blocks. Its classes: {', '.join(classes)}."
            raise ModelError(seen, where=model.config.model_type)
        largest = max(lists, key=lambda n: count(lists[n].parameters()))
        return [f"{largest}.{i}" for i in range(len(lists[largest]))]

    def other_blocks(self, model: PreTrainedModel, share: float = 0.05) -> list[str]:
        """Items of further lists of like modules that hold more than `share` of all parameters (layers of a vision tower):
        worth sharding one by one, but no decoder blocks."""
        done, total = self.blocks(model), count(model.parameters())
        found: list[str] = []
        for name, module in model.named_modules():
            if not isinstance(module, nn.ModuleList) or len(module) < 2 or len({type(m) for m in module}) > 1:
                continue
            nested = inside(name, [*done, *found]) or any(d.startswith(f"{name}.") for d in done)
            if not nested and count(module.parameters()) > share * total:
                found += [f"{name}.{i}" for i in range(len(module))]
        return found

    def towers_of(self, model: PreTrainedModel) -> list[str]:
        """Names of the encoders of images, sound or video."""
        text = model.config.get_text_config()
        own = {type(model.config), type(text)}
        if not any(isinstance(v, PreTrainedConfig) and type(v) not in own for v in vars(model.config).values()):
            return []

        def is_tower(name: str, module: nn.Module) -> bool:
            apart = text is not model.config and isinstance(module, PreTrainedModel)
            return type(module.config) not in own if apart else matches(name, self.towers)

        return list(outermost(n for n, m in model.named_modules() if n and is_tower(n, m)))

    def freeze(self, model: PreTrainedModel) -> None:
        """Freezes what no row of text reaches: towers and projectors of a vision-language class."""
        parts = self.parts(model)
        for name, parameter in model.named_parameters():
            if not parts.reads_text(name):
                parameter.requires_grad_(False)

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch of text as the class wants it: `input_ids` [B, T] and whatever else is in it, with the inputs it demands."""
        return batch | {name: torch.zeros_like(batch["input_ids"]) for name in self.text_inputs if name not in batch}

    def parts(self, model: PreTrainedModel) -> "Parts":
        """Where the parts of one model are; gathered once and asked often."""
        blocks, towers, experts = self.blocks(model), self.towers_of(model), expert_count(model)
        holders = {}
        for name, module in model.named_modules():
            fused = experts > 1 and any(p.ndim == 3 and len(p) == experts for p in module.parameters(recurse=False))
            if inside(name, blocks) and (fused or matches(name, self.experts)) and not inside(name, holders):
                holders[name] = name.rpartition(".")[0]
        skipped = [b for b in blocks if matches(class_name(model.get_submodule(b)), self.skipped_blocks)]
        return Parts(
            family=self,
            model=model,
            blocks=blocks,
            skipped=skipped,
            towers=towers,
            experts=list(holders),
            holders=list(dict.fromkeys(holders.values())),
            expert_count=experts,
            text_root=_text_root(model, blocks),
            head=name_of(model, model.get_output_embeddings()),
        )


@dataclass(frozen=True)
class Parts:
    """Where the parts of one model are, by module name.

    Attributes:
        blocks: decoder blocks.
        skipped: those that rows of text jump over.
        towers: encoders of other inputs.
        experts: modules that hold routed experts.
        holders: their parents, in which the router sits too.
        expert_count: routed experts of a layer; 0 where the config does not say.
        text_root: the module around decoder blocks and input embedding; empty for the model itself.
        head: the output embedding; empty where the class names none.
    """

    family: Family
    model: PreTrainedModel
    blocks: list[str]
    skipped: list[str]
    towers: list[str]
    experts: list[str]
    holders: list[str]
    expert_count: int
    text_root: str
    head: str

    def role(self, name: str) -> str:
        """What a module is: tower, outside (the decoder blocks), expert, router, bypassed, linear (takes an adapter), other."""
        family, module = self.family, self.model.get_submodule(name)
        if inside(name, self.towers):
            return "tower"
        if not inside(name, self.blocks):
            return "outside"
        if inside(name, self.experts):
            return "expert"
        parent, _, leaf = name.rpartition(".")
        chooses = parent in self.holders and getattr(module, "out_features", None) == self.expert_count
        if chooses or (matches(name, family.routers) and inside(parent, self.holders)):
            return "router"
        if not is_linear(module):
            return "other"
        # The two parameters that mark a Mamba mixer; linear attention with a decay of its own has no D.
        mixer = {"A_log", "D"} <= dict(self.model.get_submodule(parent).named_parameters(recurse=False)).keys()
        if (mixer and leaf in family.kernel_weights) or matches(name, family.bypassed) or inside(name, self.skipped):
            return "bypassed"
        return "linear"

    def reads_text(self, name: str) -> bool:
        """Whether rows of text pass through a module or parameter: not through towers, nor projectors behind them."""
        if not self.towers:
            return True
        inner = not self.text_root or inside(name, [self.text_root])
        return not inside(name, self.towers) and (inner or bool(self.head and inside(name, [self.head])))


def class_name(module: nn.Module) -> str:
    """The class as Hugging Face names it: fully_shard puts a subclass in front."""
    return type(module).__name__.removeprefix("FSDP")


def is_linear(module: nn.Module) -> bool:
    """Whether a module takes an ordinary adapter. GPT-2 writes its linear layers as Conv1D."""
    return isinstance(module, (nn.Linear, Conv1D))


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(p, name) for p in patterns)


def inside(name: str, parents: Iterable[str]) -> bool:
    """Whether a module is one of `parents` or below one."""
    return any(name == p or name.startswith(f"{p}.") for p in parents)


def outermost(names: Iterable[str]) -> Iterator[str]:
    """Names that are not below an earlier one; `names` in the order of named_modules."""
    last = None
    for name in names:
        if last is None or not name.startswith(f"{last}."):
            last = name
            yield name


def count(parameters: Iterable[nn.Parameter]) -> int:
    """Elements of distinct parameters: a tied weight counts once."""
    return sum({id(p): p.numel() for p in parameters}.values())


def expert_count(model: PreTrainedModel) -> int:
    """Routed experts of a layer by the config; 0 where no known key says how many."""
    text = model.config.get_text_config()
    found = (getattr(text, key, None) for key in EXPERT_COUNTS)
    return next((n for n in found if isinstance(n, int) and n > 1), 0)


def name_of(model: nn.Module, module: nn.Module | None) -> str:
    """The full name of a module of the model; empty where it has none."""
    return next((n for n, m in model.named_modules() if m is module), "")


def _text_root(model: PreTrainedModel, blocks: list[str]) -> str:
    names = [n for n in [*blocks, name_of(model, model.get_input_embeddings())] if n]
    common = commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    return common if len(names) > 1 else ""
