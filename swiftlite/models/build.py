"""Builds a model in one written order; every step says why it stands where it does."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from swiftlite.dist import shard as sharding
from swiftlite.dist.checkpoint import Saved
from swiftlite.dist.launch import ranks
from swiftlite.dist.strategies import Strategy
from swiftlite.dist.world import World, join
from swiftlite.models import adapters, decompose, fp8, fp8_gap, given, head, isolation, lora, packed, varlen, weights
from swiftlite.models.balance import Balance, balance_of
from swiftlite.models.blocks import wrap_blocks
from swiftlite.models.choice import Choice, choose
from swiftlite.models.families.family import Family, class_name, count, name_of
from swiftlite.models.families.lookup import attention_for, auto_class, family_for
from swiftlite.models.neftune import add_noise
from swiftlite.models.sources import ModelFiles, open_weights
from swiftlite.models.tokenizer import init_new_rows, new_rows
from swiftlite.recipe.errors import ModelError
from swiftlite.recipe.schema import QuantizeSection, Recipe

# Methods of the root that run the model: all that FSDP2 gathers weights for.
METHODS = head.METHODS + isolation.METHODS + fp8_gap.METHODS
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Precision:
    """Types of a run: what matrices are multiplied in, and what trainable weights are kept in."""

    name: str
    compute: torch.dtype
    master: torch.dtype

    @classmethod
    def of(cls, wanted: str, device: torch.device) -> "Precision":
        """Resolves train.precision; auto is bf16 on a GPU that has it, else fp32."""
        if wanted == "auto":
            native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            wanted = "bf16" if native else "fp32"
        compute = DTYPES[wanted.removesuffix("_pure")]
        return cls(wanted, compute, compute if wanted == "bf16_pure" else torch.float32)


@dataclass
class Built:
    """A model on its way to training: `root` is the Hugging Face model itself, trained in place; `peft` holds its adapters."""

    root: Any
    family: Family
    blocks: list[str]
    peft: PeftModel | None
    new_rows: int
    base_dtype: torch.dtype
    balance: Balance | None = None
    notes: list[str] = field(default_factory=list)
    sliced: bool = False  # blocks take a batch in slices while they are recomputed


def load_config(files: ModelFiles, recipe: Recipe) -> tuple[Any, list[str]]:
    """The model's config with model.config_overrides applied, and notes on what was changed beside them.

    The model's own dropout is switched off unless an override asks for it: with it no two splits of a batch would learn the same.

    Raises:
        ModelError: when the config cannot be read.
    """
    overrides = recipe.model.config_overrides
    try:
        config = AutoConfig.from_pretrained(files.folder, trust_remote_code=recipe.model.trust_remote_code, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, StrictDataclassError) as e:
        raise ModelError(f"config.json cannot be used: {str(e).splitlines()[0]}", where=files.folder) from e
    text, notes = config.get_text_config(), []
    for name, value in overrides.items():
        setattr(text if hasattr(text, name) and not hasattr(config, name) else config, name, value)
    dropped = [
        k
        for k, v in text.to_dict().items()
        if ("dropout" in k or "pdrop" in k) and isinstance(v, float) and v > 0 and k not in overrides
    ]
    for name in dropped:
        setattr(text, name, 0.0)
    if dropped:
        notes.append(f"the model's own dropout is off ({', '.join(dropped)}); set it in model.config_overrides to use it")
    text.use_cache = config.use_cache = False
    return config, notes


def joined_by(recipe: Recipe) -> str | None:
    """The key that asks for rows joined into one, or None."""
    return "data.packing" if recipe.data.packing else "data.padding_free" if recipe.data.padding_free else None


def _packing(root: Any, files: ModelFiles, recipe: Recipe, family: Family) -> list[tuple[Choice, QuantizeSection]]:
    """What of a bare model is packed, and how."""
    if recipe.quantize is None:
        return []
    held = given.held(root, files, weights.conversions(root))
    in_full = recipe.lora.modules_to_save if recipe.lora else []
    chosen = (held.choose if held else choose)(root, recipe.quantize, family, in_full)
    # Scales of experts come from several tensors of packed files, which can only be joined in fp32.
    single = recipe.quantize.model_copy(update={"double_quant": False}) if held else recipe.quantize
    return [(replace(chosen, experts=[]), recipe.quantize), (replace(chosen, linears=[], notes=[]), single)]


def skeleton(
    files: ModelFiles, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, precision: Precision, device: torch.device
) -> Built:
    """The model on meta with its adapters: steps 1 to 3 of the build. Costs no memory, so `check` uses it too.

    Raises:
        ModelError, RecipeError: when the class cannot be served, or targets or patterns match nothing.
    """
    config, notes = load_config(files, recipe)
    vars(config).pop("quantization_config", None)  # the class is the plain one
    family = family_for(config)
    attention = attention_for(
        family, config, device.type, recipe.model.attn_implementation,
        packed=recipe.data.packing, joined=joined_by(recipe) is not None, half=precision.compute.itemsize == 2,
    )  # fmt: skip
    base_dtype = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    text = config.get_text_config()
    grown = new_rows(text.vocab_size, tokenizer) if recipe.model.add_tokens else 0
    text.vocab_size += grown
    if attention == "flex_attention":
        # Shapes that are seen twice would be compiled as unknown ones, for which torch 2.11 has no kernel at heads of 128.
        torch._dynamo.config.automatic_dynamic_shapes = False
    # 1. Modules on meta: no memory, no random numbers; frozen weights are kept in the compute type.
    with torch.device("meta"):
        root = auto_class(config).from_config(
            config, dtype=precision.compute, attn_implementation=attention, trust_remote_code=recipe.model.trust_remote_code
        )
        root.tie_weights()
    blocks = family.blocks(root, recipe.strategy.wrap)
    family.freeze(root)
    balance = balance_of(root, recipe.train.router_aux_loss_coef)
    built = Built(root, family, blocks, None, grown, base_dtype, balance, notes)
    # What is packed is chosen while layers still have their own names, and replaced inside the adapters.
    packing = _packing(root, files, recipe, family)
    # 2. Adapters come before sharding: afterwards they would stay plain tensors, and never be reduced.
    if recipe.lora is not None:
        built.peft, extra = adapters.attach(root, recipe, family, files, tokenizer)
        built.notes += extra
    else:
        adapters.select_trainable(root, recipe.train.trainable, family)
    for part, how in packing:
        packed.swap(root, part, how, fp8.native(device))
        built.notes += part.notes
    lora.cast_in_layers(root)
    # 3. Trainable weights are kept in fp32, so that small updates are not rounded away; the sharding policy casts them.
    # With an offloaded optimizer the masters of the base's own weights are in host memory, made from the base's values.
    kept = precision.compute if recipe.strategy.offload == "optimizer" and recipe.lora is None else precision.master
    for parameter in root.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(kept)
    # Slices save memory and cost some speed. Trained weights of the base would sum their gradients over slices in the compute
    # type, and routers are watched call by call.
    lean = recipe.train.activation_offload or (recipe.quantize is not None and recipe.quantize.method == "nf4")
    built.sliced = lean and built.peft is not None and balance is None
    if attention == "flex_attention" or (attention == varlen.NAME and joined_by(recipe) is not None):
        built.sliced = False  # masks and borders of a whole batch, which blocks could not divide
    return built


class _Grown:
    """A lazy checkpoint tensor with rows for added tokens behind its own."""

    def __init__(self, source: Any, rows: int, seed: int) -> None:
        self.source, self.rows, self.seed = source, rows, seed

    def get_shape(self) -> list[int]:
        first, *rest = self.source.get_shape()
        return [first + self.rows, *rest]

    def get_dtype(self) -> Any:
        return self.source.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        old: Tensor = self.source[...]
        whole = torch.cat([old, old.new_empty(self.rows, *old.shape[1:])])
        init_new_rows(whole, len(old), self.seed)
        return whole[index]


def _grow(root: Any, tensors: dict[str, Any], rows: int, seed: int) -> dict[str, Any]:
    """Gives the embedding and head tensors of a checkpoint the rows of added tokens."""
    modules = {id(m) for m in (root.get_input_embeddings(), root.get_output_embeddings()) if m is not None}
    ends = {
        name.split(".")[-1]
        for name, m in root.named_modules()
        if id(m) in modules or id(getattr(m, "original_module", None)) in modules
    }
    old = root.config.get_text_config().vocab_size - rows

    def grows(name: str) -> bool:
        parts = name.split(".")
        return parts[-1] in ("weight", "bias") and len(parts) > 1 and parts[-2] in ends

    return {n: _Grown(t, rows, seed) if grows(n) and next(iter(t.get_shape())) == old else t for n, t in tensors.items()}


def alone(built: Built) -> list[str]:
    """What is sharded one by one beside the blocks: other repeated layers, as of a vision tower, and the embedding, where it is
    tied to nothing (tied weights must be gathered together, with the root)."""
    root, embedding = built.root, built.root.get_input_embeddings()
    own = {id(p) for p in embedding.parameters()}
    shared = any(
        id(p) in own
        for n, p in root.named_parameters(remove_duplicate=False)
        if root.get_submodule(n.rpartition(".")[0]) not in set(embedding.modules())
    )
    return built.family.other_blocks(root) + ([] if shared else [name_of(root, embedding)])


def groups(built: Built) -> list[str]:
    """What is gathered together when the model is spread over ranks: like groups in one line, with their sizes."""
    names, modules = [*built.blocks, *alone(built)], dict(built.root.named_modules())
    sizes = Counter((class_name(modules[n]), count(modules[n].parameters())) for n in names)
    rest = count(built.root.parameters()) - sum(number * times for (_, number), times in sizes.items())
    shown = [f"{times} x {name} of {number:,}" for (name, number), times in sizes.items()]
    return [f"groups    {', '.join(shown)}; the rest, {rest:,}, with the root"]


def build(
    files: ModelFiles,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    *,
    precision: Precision,
    strategy: Strategy,
    device: torch.device,
    checkpointing: str,
    compiled: bool = False,
    saved: Saved | None = None,
) -> tuple[Built, World]:
    """The model ready to train, and the ranks it lives on. World size 1 takes the same road as any other.

    Args:
        saved: the checkpoint that is gone on from: where the base was split, it says how.

    Raises:
        ModelError, RecipeError: see `skeleton`; and when weights are missing or do not fit.
    """
    built = skeleton(files, recipe, tokenizer, precision, device)
    root = built.root
    # 4. The loss becomes a method of the root, and key conversions are looked up by class name: sharding renames the class.
    head.attach(root, head.Added(recipe.train.label_smoothing_factor, built.balance), compiled)
    isolation.attach(root)
    fp8_gap.attach(root)
    varlen.attach(root)
    if recipe.train.neftune_noise_alpha:
        add_noise(root, recipe.train.neftune_noise_alpha)
    mapping = weights.conversions(root)
    # 5. Shard while nothing has memory.
    spread = recipe.strategy
    cast = lora.cast_where_used(root)
    wrap = sharding.needs_wrap(root, strategy, precision.compute, ranks().size, spread.offload == "params", cast)
    world = join(device, strategy, wrap=wrap, shard=spread.shard, timeout_s=spread.timeout_s)
    if wrap:
        how = sharding.Sharding(precision.compute, DTYPES[spread.reduce_dtype], spread.offload == "params", spread.prefetch)
        own = alone(built)
        sharding.shard(root, built.blocks, strategy, world, how, alone=own, forward_methods=METHODS)
    # Offloaded weights wait in host memory and are fetched to the device by FSDP2; what it does not know of lives there always.
    home = torch.device("cpu") if wrap and how.offload else device
    # 6. Weights go straight into the shards; adapters after them, since DoRA's magnitudes are made from weights.
    tensors = open_weights(files)
    if built.new_rows:
        tensors = _grow(root, dict(tensors), built.new_rows, recipe.seed)
    built.notes += weights.stream(root, tensors, mapping, home, files.folder)
    if built.peft is not None:
        adapters.init_adapters(built.peft, recipe.lora, recipe.seed, home)
        if recipe.model.adapter:
            adapters.load_adapter_weights(built.peft, recipe.model.adapter, home)
        if recipe.lora is not None and recipe.lora.splits:
            built.notes.append(decompose.split(root, recipe.lora, device, saved))
    # 7. What no file holds.
    weights.materialise_buffers(root, device)
    weights.require_loaded(root)
    # 8. Where a class does more to its logits than we know, its own forward makes the loss. Without dropout and noise: compared.
    root.eval()
    ids = torch.arange(isolation.LENGTH, device=device)[None] % root.config.get_text_config().vocab_size
    if (note := head.verify(root, built.family.inputs({"input_ids": ids}))) is not None:
        built.notes.append(note)
    if (key := joined_by(recipe)) is not None:
        isolation.require(root, built.family, key, device)
    root.train()
    sharding.reshard(root)
    # 9. Last, so that the short rows of the trials above compile nothing.
    wrap_blocks(root, built.blocks, checkpointing, compiled, recipe.train.activation_offload, built.sliced)
    return built, world


__all__ = ["DTYPES", "Built", "ModelError", "Precision", "build", "load_config", "skeleton"]
