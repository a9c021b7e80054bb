"""Which modules take an adapter, and how the choice is written into adapter_config.json."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from peft import LoraConfig, TaskType
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swiftlite.models.experts import is_expert_linear
from swiftlite.models.families.family import Family, Parts, inside, is_linear, name_of
from swiftlite.models.families.lookup import family_for
from swiftlite.recipe.errors import RecipeError, nearest
from swiftlite.recipe.schema import LoraSection

ALL_LINEAR = "all-linear"


def lora_targets(model: PreTrainedModel, lora: LoraSection, family: Family) -> list[str]:
    """Full names of the modules that take an adapter, in model order.

    `all-linear` means every linear layer inside the decoder blocks but routers, experts, and what no text reaches; peft's own
    expansion would take routers and experts too. A list matches like peft's: the whole name or its last parts. A string is a
    regular expression for the whole name. Towers never take part. `experts` adds experts that are linear layers; fused ones are
    parameters, for `experts.expert_parameters`.

    Args:
        model: the bare Hugging Face model; weights may be on meta.

    Raises:
        RecipeError: a target, an excluded or a fully trained module matches nothing, or a target cannot take an adapter.
    """
    parts = family.parts(model)
    names = [n for n, _ in model.named_modules() if n and not inside(n, parts.towers)]
    for key in ("exclude_modules", "modules_to_save"):
        for entry in getattr(lora, key):
            if not any(has_suffix(n, entry) for n in names):
                raise RecipeError(f"'{entry}' matches no module.{_nearest(entry, names)}", where=f"lora.{key}")
    wanted = lora.target_modules
    if wanted == ALL_LINEAR:
        taken = reserved(model)
        found = {n for n in names if parts.role(n) == "linear" and n.rpartition(".")[2] not in taken}
        lost = renamed(model, found)
        if found and lost == found:
            fault = (
                f"peft could not load an adapter of {type(model).__name__} again: it looks for {min(lost)} under another name."
            )
            raise RecipeError(fault, where="lora", fix="Train without a lora section.")
        found -= lost
    elif isinstance(wanted, str):
        found = _by_regex(wanted, names, parts)
    else:
        found = {n for entry in wanted for n in _by_suffix(entry, names, parts)}
    if lora.experts:
        found |= {n for n in names if is_expert_linear(parts, n)}
    in_full = [n for n in names if any(has_suffix(n, m) for m in lora.modules_to_save)]
    if wanted != ALL_LINEAR and (both := sorted(n for n in found if inside(n, in_full))):
        raise RecipeError(f"'{both[0]}' would be adapted and trained in full.", where="lora.modules_to_save")
    left = [n for n in names if n in found and not inside(n, in_full) and not any(has_suffix(n, e) for e in lora.exclude_modules)]
    if not left:
        raise RecipeError(f"no module of {type(model).__name__} is left to take an adapter.", where="lora.target_modules")
    return left


def has_suffix(name: str, entry: str) -> bool:
    """peft's rule for lists: the whole name, or its last parts."""
    return name == entry or name.endswith(f".{entry}")


def matched(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Full names of the modules that a peft config selects, by peft's own rule."""
    return [n for n, _ in model.named_modules() if n and check_target_module_exists(config, n)]


def reserved(model: PreTrainedModel) -> set[str]:
    """Last parts of linear layers' names that peft reads as something else in this model.

    Since transformers 5 fuses experts, peft turns targets such as `gate_proj` of certain mixture-of-experts models into the fused
    parameters, wherever else the name occurs: an adapter on a dense or shared `gate_proj` there could never be loaded again.
    """
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return set()
    found = set()
    for leaf in {n.rpartition(".")[2] for n, m in model.named_modules() if is_linear(m)}:
        config = LoraConfig(target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # one half of a fused pair
            found.add(leaf)
        if config.target_modules != {leaf}:
            found.add(leaf)
    return found


def renamed(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Modules whose adapters peft would look for under another name when it loads them: a rule that renames keys of old base
    checkpoints changes keys of adapters too, where it has no border. They would be lost."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers as convert
    except ImportError:
        return set()
    keys = {f"base_model.model.{n}.lora_A.weight": n for n in names}
    kept = convert(model, LoraConfig(), dict.fromkeys(keys, torch.empty(0))).keys()
    return {n for key, n in keys.items() if key not in kept}


def _by_suffix(entry: str, names: list[str], parts: Parts) -> list[str]:
    model, where = parts.model, "lora.target_modules"
    hits = [n for n in names if has_suffix(n, entry)]
    linear = [n for n in hits if _takes_adapter(model.get_submodule(n))]
    usable = [n for n in linear if parts.role(n) != "bypassed"]
    if linear and not usable:
        raise RecipeError(f"'{entry}' is a layer through which no gradient of text passes: {linear[0]}.", where=where)
    if usable and entry.rpartition(".")[2] in reserved(model):
        fault = f"'{entry}' is what peft calls the fused experts of {model.config.model_type}: the adapter could not be loaded."
        raise RecipeError(fault, where=where, fix="Leave it out, as all-linear does.")
    if usable:
        return usable
    if any(has_suffix(n, entry) for n, p in model.named_parameters() if p.ndim == 3):
        fault = f"'{entry}' is a fused parameter of all experts, not a module."
        raise RecipeError(fault, where=where, fix="Leave it out; lora.experts: true adapts the experts.")
    if hits:
        inner = sorted({n.rpartition(".")[2] for n in names if inside(n, hits) and _takes_adapter(model.get_submodule(n))})
        fault = f"'{entry}' is a {type(model.get_submodule(hits[0])).__name__}, which takes no adapter."
        raise RecipeError(fault, where=where, fix=f"Linear layers in it: {', '.join(inner) or 'none'}.")
    raise RecipeError(f"'{entry}' matches no module.{_nearest(entry, names)}", where=where)


def _by_regex(pattern: str, names: list[str], parts: Parts) -> set[str]:
    where = "lora.target_modules"
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise RecipeError(f"'{pattern}' is no regular expression: {error}.", where=where) from None
    hits = (n for n in names if regex.fullmatch(n) and _takes_adapter(parts.model.get_submodule(n)))
    found = {n for n in hits if parts.role(n) != "bypassed"}
    if taken := sorted(n for n in found if n.rpartition(".")[2] in reserved(parts.model)):
        fault = f"'{taken[0]}' has a name by which peft means the fused experts: the adapter could not be loaded."
        raise RecipeError(fault, where=where, fix="Leave it out, as all-linear does.")
    if found:
        return found
    fix = f"Write it as a list: [{pattern}]." if any(has_suffix(n, pattern) for n in names) else _nearest(pattern, names).strip()
    raise RecipeError(f"'{pattern}' matches no linear layer's whole name.", where=where, fix=fix or None)


def _takes_adapter(module: nn.Module) -> bool:
    return is_linear(module) or isinstance(module, nn.Embedding)


def _nearest(entry: str, names: Iterable[str]) -> str:
    """The nearest name of as many parts as the entry has."""
    size = entry.count(".") + 1
    return nearest(entry, dict.fromkeys(".".join(n.split(".")[-size:]) for n in names))


def short_names(targets: Sequence[str], everything: Sequence[str], sizes: Sequence[int] = (1, 2)) -> list[str]:
    """The shortest suffixes that select exactly `targets` among all module names, by peft's rule; whole names where none does."""
    chosen, out = set(targets), set()
    for size in sizes:
        groups: dict[str, list[str]] = {}
        for name in everything:
            groups.setdefault(".".join(name.split(".")[-size:]), []).append(name)
        for suffix, members in groups.items():
            if chosen.issuperset(members):
                out.add(suffix)
                chosen -= set(members)
    return sorted(out) + [n for n in targets if n in chosen]


def peft_config(
    model: PreTrainedModel,
    lora: LoraSection,
    targets: Sequence[str],
    base_id: str,
    revision: str | None = None,
    token_indices: Sequence[int] = (),
    parameters: Sequence[str] = (),
) -> LoraConfig:
    """The peft config of a new adapter.

    Args:
        targets: full names from lora_targets.
        base_id: what adapter_config.json names as the base model.
        token_indices: ids of added tokens, whose embedding rows are trained beside the adapters (in the output embedding too
            where it is a weight of its own).
        parameters: full names of fused expert weights that take an adapter.

    Raises:
        RecipeError: added tokens on a model whose embeddings have no name.
    """
    everything = [n for n, _ in model.named_modules() if n]
    in_full, tie = _in_full(model, lora.modules_to_save, everything)
    alpha = lora.alpha if lora.alpha is not None else 2 * lora.rank
    return LoraConfig(
        r=lora.rank,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        # peft's own pissa and olora would split weights that are on meta here, and what is written belongs to the whole base.
        init_lora_weights=lora.init if lora.init == "gaussian" else True,
        target_modules=short_names(targets, everything),
        target_parameters=short_names(parameters, [n for n, _ in model.named_parameters()], sizes=(2,)) or None,
        modules_to_save=in_full or None,
        ensure_weight_tying=tie,
        trainable_token_indices=_token_rows(model, token_indices, in_full) or None,
        fan_in_fan_out=all(isinstance(model.get_submodule(n), Conv1D) for n in targets),
        bias="none",
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base_id,
        revision=revision,
    )


def _in_full(model: PreTrainedModel, entries: Sequence[str], everything: list[str]) -> tuple[list[str], bool]:
    """modules_to_save as peft will match them, and whether its copies of tied weights must stay tied.

    A tied embedding and head are one weight: naming either trains that weight, in both places.
    """
    names = [n for n in everything if any(has_suffix(n, e) for e in entries)]
    inner, outer, tied = _embeddings(model)
    tie = tied and bool({inner, outer} & set(names))
    if tie:
        names = [inner, *(n for n in names if n not in (inner, outer))]
    # peft compares the ends of names without a dot between, so that 'head' would take 'lm_head'.
    short = short_names(names, everything)
    exact = all(has_suffix(n, s) for s in short for n in everything if n.endswith(s))
    return (short if exact else names), tie


def _embeddings(model: PreTrainedModel) -> tuple[str, str, bool]:
    """Names of the input and the output embedding (empty where there is none), and whether they are one weight."""
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    # Some classes answer with a module that is no projection to the vocabulary.
    outer = outer if hasattr(outer, "weight") else None
    return name_of(model, inner), name_of(model, outer), outer is not None and outer.weight is inner.weight


def _token_rows(model: PreTrainedModel, indices: Sequence[int], in_full: list[str]) -> dict[str, list[int]]:
    if not indices:
        return {}
    everything = [n for n, _ in model.named_modules() if n]
    inner, outer, tied = _embeddings(model)
    if not inner:
        fault = f"{type(model).__name__} names no input embedding, so tokens cannot be added."
        raise RecipeError(fault, where="model.add_tokens")
    names = [inner] if tied or not outer else [inner, outer]
    rows = {}
    for name in names:
        if any(has_suffix(name, m) for m in in_full):
            continue  # trained in full, new rows with it
        leaf = name.rpartition(".")[2]
        rows[leaf if sum(n.endswith(leaf) for n in everything) == 1 else name] = sorted(indices)
    return rows


def select_trainable(model: PreTrainedModel, patterns: Sequence[str] | None, family: Family | None = None) -> list[str]:
    """Full tuning: marks the weights to train and freezes the rest. Returns the names of the trained ones.

    Args:
        patterns: fnmatch patterns of Hugging Face parameter names (`train.trainable`); None: everything that rows of text reach.

    Raises:
        RecipeError: a pattern matches no weight that text reaches.
    """
    parts = (family or family_for(model.config)).parts(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    reached = [n for n in named if parts.reads_text(n)]
    wanted: list[str] = reached
    if patterns is not None:
        for pattern in patterns:
            if not any(fnmatchcase(n, pattern) for n in reached):
                tower = any(fnmatchcase(n, pattern) for n in named)
                why = " that rows of text reach." if tower else f".{nearest(pattern, reached)}"
                raise RecipeError(f"'{pattern}' matches no weight{why}", where="train.trainable")
        wanted = [n for n in reached if any(fnmatchcase(n, p) for p in patterns)]
    for parameter in named.values():
        parameter.requires_grad_(False)
    for name in wanted:
        named[name].requires_grad_(True)
    return wanted
