"""Names and short forms that people bring from other toolkits, understood inside their section, each with a note."""

from collections.abc import Iterable
from difflib import get_close_matches

from swiftlite.recipe.keys import children, keys
from swiftlite.recipe.reading import SECRET_KEY, Faults, Node, Scalar

# Section -> other name -> ours. Value words are mapped behind it, by VALUES.
ALIASES: dict[str, dict[str, str]] = {
    "": {
        "base_model": "model",
        "model_name_or_path": "model",
        "pretrained_model_name_or_path": "model",
        "dataset": "data",
        "datasets": "data",
        "peft": "lora",
        "peft_config": "lora",
        "training": "train",
        "evaluation": "eval",
        "logging": "log",
        "checkpoints": "checkpoint",
        "output_dir": "output",
        **dict.fromkeys(("quantization", "quantization_config", "quantization_bit", "quant_bits"), "quantize"),
    },
    "model": {
        "model": "name",
        "model_name": "name",
        "model_name_or_path": "name",
        "base_model": "name",
        "pretrained_model_name_or_path": "name",
        "model_id": "name",
        "path": "name",
        "checkpoint_dir": "name",
        "adapter_name_or_path": "adapter",
        "attn_impl": "attn_implementation",
        "flash_attn": "attn_implementation",
        "new_tokens": "add_tokens",
    },
    "data": {
        "dataset": "train",
        "datasets": "train",
        "train_dataset": "train",
        "train_file": "train",
        "eval_dataset": "eval",
        "validation": "eval",
        "val": "eval",
        "test_datasets": "eval",
        "val_set_size": "eval_split",
        "val_size": "eval_split",
        "split_dataset_ratio": "eval_split",
        "max_seq_length": "max_length",
        "max_seq_len": "max_length",
        "cutoff_len": "max_length",
        "sequence_len": "max_length",
        "chat_template_kwargs": "template_kwargs",
        "excess_length_strategy": "overlong",
        "truncation_strategy": "overlong",
    },
    "data.train[]": {"file": "path", "type": "format", "system_prompt": "system", "max_samples": "sample"},
    "data.eval[]": {"file": "path", "type": "format", "system_prompt": "system", "max_samples": "sample"},
    "lora": {
        "r": "rank",
        "lora_r": "rank",
        "lora_rank": "rank",
        "dim": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "lora_target": "target_modules",
        "lora_target_modules": "target_modules",
        "additional_target": "modules_to_save",
        "lora_modules_to_save": "modules_to_save",
        "init_lora_weights": "init",
        "init_weights": "init",
        "use_rs_lora": "use_rslora",
        "rslora": "use_rslora",
        "dora": "use_dora",
        "loraplus_lr_ratio": "lr_ratio",
    },
    "quantize": {
        "quant_method": "method",
        "bnb_4bit_quant_type": "method",
        "bnb_4bit_use_double_quant": "double_quant",
        "double_quantization": "double_quant",
        "llm_int8_skip_modules": "skip",
        "modules_to_not_convert": "skip",
    },
    "strategy": {"strategy": "name", "deepspeed": "config", "deepspeed_config": "config", "ds_config": "config"},
    "train": {
        "epochs": "num_train_epochs",
        "num_epochs": "num_train_epochs",
        "micro_batch_size": "per_device_train_batch_size",
        "local_batch_size": "per_device_train_batch_size",
        "batch_size": "per_device_train_batch_size",
        "accumulation": "gradient_accumulation_steps",
        "gradient_accumulation": "gradient_accumulation_steps",
        "lr": "learning_rate",
        "lr_scheduler": "lr_scheduler_type",
        "warmup": "warmup_steps",
        "warmup_ratio": "warmup_steps",
        "optimizer": "optim",
        "mixed_precision": "precision",
        "torch_dtype": "precision",
        "dtype": "precision",
        "activation_checkpointing": "gradient_checkpointing",
        "enable_activation_checkpointing": "gradient_checkpointing",
        "label_smoothing": "label_smoothing_factor",
        "neftune_alpha": "neftune_noise_alpha",
        "noisy_embedding_alpha": "neftune_noise_alpha",
        "moe_aux_loss_coef": "router_aux_loss_coef",
        "aux_loss_coef": "router_aux_loss_coef",
        "max_norm": "max_grad_norm",
        "gradient_clipping": "max_grad_norm",
    },
    "eval": {
        "strategy": "eval_strategy",
        "evaluation_strategy": "eval_strategy",
        "steps": "eval_steps",
        "batch_size": "per_device_eval_batch_size",
        "eval_batch_size": "per_device_eval_batch_size",
    },
    "log": {"trackers": "report_to", "name": "run_name"},
    "checkpoint": {"resume_from_checkpoint": "resume", "strategy": "save_strategy", "steps": "save_steps"},
    "export": {"format": "formats", "torch_dtype": "dtype"},
}

_DTYPES: dict[str, Scalar] = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_OFF: dict[str, Scalar] = dict.fromkeys(("false", "off", "none", "never"), "no")
_FROM_OFF: dict[str, Scalar] = dict.fromkeys(("false", "off", "no"), "none")
_FORMATS: dict[str, Scalar] = dict.fromkeys(("chatml", "openai", "chat", "chat_template"), "messages")

# Key -> word as written, in lower case -> our value.
VALUES: dict[str, dict[str, Scalar]] = {
    "model.attn_implementation": {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "flex": "flex_attention"},
    "data.format": _FORMATS,
    "data.train[].format": _FORMATS,
    "data.eval[].format": _FORMATS,
    "data.overlong": {"delete": "drop", "right": "truncate", "raise": "error"},
    "lora.target_modules": {"all": "all-linear"},
    "lora.init": {"true": "default"},
    "quantize.method": {"4": "nf4", "4bit": "nf4", "bnb_4bit": "nf4", "float8": "fp8"},
    "strategy.name": _FROM_OFF
    | {"fsdp2": "fsdp", "full_shard": "fsdp", "hybrid_shard": "hsdp", "no_shard": "ddp", "shard_grad_op": "zero2"}
    | {f"{prefix}{n}": f"zero{n}" for n in (1, 2, 3) for prefix in ("deepspeed_zero", "zero_", "zero-", "stage")}
    | {"deepspeed_zero0": "ddp", "zero0": "ddp", "stage0": "ddp", "multi_gpu": "ddp"},
    "train.precision": _DTYPES | dict.fromkeys(("false", "no", "off", "none"), "fp32"),
    "train.gradient_checkpointing": _FROM_OFF | {"true": "full"},
    "train.optim": {
        # Paged ones learn the same; the memory plan says what fits, and strategy.offload moves what does not.
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw", "paged_adamw_32bit"), "adamw"),
        **dict.fromkeys(("adamw8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    },
    "eval.eval_strategy": _OFF,
    "log.report_to": {"none": None},
    "checkpoint.save_strategy": _OFF,
    "checkpoint.resume": {"true": "auto", "false": None},
    "export.dtype": _DTYPES,
}

# Switches that say the value of another key: word -> that value; None: the switch says nothing and is left out. Other words are
# refused, with what ADVICE has for the switch.
SWITCHES: dict[str, tuple[str, dict[str, Scalar]]] = {
    "load_in_4bit": ("quantize", {"true": "nf4", "false": None}),
    "load_in_8bit": ("quantize", {"false": None}),
    "quantize.load_in_4bit": ("method", {"true": "nf4", "false": None}),
    "quantize.load_in_8bit": ("method", {"false": None}),
    "model.flash_attention": ("attn_implementation", {"true": "flash_attention_2", "false": None}),
    "lora.lora_target_linear": ("target_modules", {"true": "all-linear", "false": None}),
    "lora.pissa_init": ("init", {"true": "pissa", "false": None}),
    "lora.match_all_linear": ("target_modules", {"true": "all-linear", "false": None}),
    "train.bf16": ("precision", {"true": "bf16", "false": "fp32", "auto": "auto"}),
    "train.fp16": ("precision", {"true": "fp16", "false": None}),
    "train.disable_gradient_checkpointing": ("gradient_checkpointing", {"true": "none", "false": "full"}),
}

_TOKENIZER = "The tokenizer comes with the model: model.name. Change it by model.add_tokens and data.chat_template."
_METHOD = "A `lora` section trains adapters; without one the whole model is trained."
_SHARDING = "Write `strategy: fsdp`; no engine file is needed."

# Names that have no key of their own here: what to do instead.
ADVICE: dict[str, str] = {
    **dict.fromkeys(("tokenizer", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_path", "tokenizer_type"), _TOKENIZER),
    "template": "The chat template comes with the model: model.name. data.chat_template replaces it.",
    "lora_target_parameters": "lora.experts: true adapts routed experts.",
    "target_parameters": "lora.experts: true adapts routed experts.",
    "revision": "Write it behind the name: `model.name: org/name@revision`.",
    **dict.fromkeys(("finetuning_type", "tuner_type", "use_peft", "train_type"), _METHOD),
    **dict.fromkeys(("fsdp_config", "accelerate_config", "fsdp_transformer_layer_cls_to_wrap"), _SHARDING),
    "adapter": "A `lora` section trains one, with `quantize: nf4` beside 4-bit weights; model.adapter names one to go on from.",
    "load_in_8bit": "Whole numbers of 8 bits are not kept here: write `quantize: fp8`, which takes as much, or nf4.",
    **dict.fromkeys(("quantization_method", "quant_method"), "Write `quantize: nf4` or `quantize: fp8`."),
    **dict.fromkeys(("bnb_4bit_compute_dtype", "bnb_4bit_comp_dtype"), "Packed weights are multiplied in train.precision."),
    "bnb_4bit_quant_storage": "Leave it out: packed weights are sharded as they are.",
    "pissa_convert": "Every adapter that is written is made for the whole base.",
    "load_best_model_at_end": "The best checkpoint is always kept; checkpoint.metric_for_best_model names its metric.",
    "overwrite_output_dir": "A run never overwrites another: choose a new `output`, or go on with checkpoint.resume.",
    "do_train": "`swiftlite train` trains.",
    "do_eval": "Evaluation runs where there is eval data: data.eval or data.eval_split.",
}


def apply(root: Node, faults: Faults, notes: list[str]) -> None:
    """Brings a tree to our names and long forms, in place. Each name or word changed leaves a line in `notes`."""
    _rename(root, "", faults, notes)
    assert isinstance(root.value, dict)
    for name, node in root.value.items():
        if name not in ALIASES:
            continue
        _lengthen_section(name, node)
        if isinstance(node.value, dict):
            _rename(node, name, faults, notes)
    data = root.value.get("data")
    for part in ("train", "eval"):
        if data and isinstance(data.value, dict) and part in data.value:
            _lengthen_sources(data.value[part], f"data.{part}[]", faults, notes)


def _lengthen_section(name: str, node: Node) -> None:
    """`model: X` as `model: {name: X}`, and the like."""
    if name == "lora" and isinstance(node.value, bool):
        node.value = {} if node.value else None
        return
    inner = {"model": "name", "data": "train", "quantize": "method", "strategy": "name", "export": "formats"}.get(name)
    short = str | int | float | bool | list if inner in ("train", "formats") else str | int | float | bool
    if inner and isinstance(node.value, short):
        node.value = {inner: Node(node.value, node.where, node.key, node.text)}


def _lengthen_sources(node: Node, section: str, faults: Faults, notes: list[str]) -> None:
    """A path, a source or a list of both as a list of sources."""
    if node.value is None:
        return
    if isinstance(node.value, dict) and node.value and all(name.isdecimal() for name in node.value):
        path = section.removesuffix("[]")
        faults.at(node, "a list; one source of it cannot be set.", fix=f"Give it whole: {path}=[a.jsonl, {{path: b.jsonl}}].")
        node.value = []
    items = node.value if isinstance(node.value, list) else [Node(node.value, node.where, node.key, node.text)]
    for item in items:
        if isinstance(item.value, dict):
            _rename(item, section, faults, notes)
        else:
            item.value = {"path": Node(item.value, item.where, item.key, item.text)}
    node.value, node.made = items, False


def spoken(node: Node) -> str:
    """A scalar as a lower-case word: `True` and `true` are `true`."""
    return str(node.value).lower() if isinstance(node.value, str | bool) else node.text


def _rename(section: Node, name: str, faults: Faults, notes: list[str]) -> None:
    """Gives the entries of one section our names and values."""
    assert isinstance(section.value, dict)
    entries: dict[str, Node] = {}
    later: list[tuple[str, Node]] = []  # switches give way to a key that says it outright
    for old, node in section.value.items():
        if _dotted(name, old) in SWITCHES:
            later.append((old, node))
            continue
        new = old if old in children(name) else ALIASES[name].get(old, old)
        if new in entries:
            faults.at(node, f"the same key as {entries[new].key} ({entries[new].where}).", fix="Keep one of them.")
            continue
        entries[new] = node
        if new != old:
            notes.append(f"{node.where}: {node.key} is {_dotted(name, new)} here.")
        if old == "warmup_ratio" and isinstance(node.value, int | float) and node.value >= 1:
            faults.at(node, f"expected a share below 1, got {node.text}.", fix="Steps are train.warmup_steps.")
        _translate(node, _dotted(name, new), notes)
    for old, node in sorted(later, key=lambda switch: spoken(switch[1]) == "false"):  # an `off` gives way to an `on`
        _switch(entries, name, old, node, faults, notes)
    section.value = entries


def _translate(node: Node, path: str, notes: list[str]) -> None:
    words = VALUES.get(path, {})
    if not isinstance(node.value, dict | list) and spoken(node) in words:
        node.value = words[spoken(node)]
        shown = "null" if node.value is None else node.value
        notes.append(f"{node.where}: {node.key}: {node.text} is {path}: {shown} here.")


def _switch(entries: dict[str, Node], name: str, old: str, node: Node, faults: Faults, notes: list[str]) -> None:
    new, words = SWITCHES[_dotted(name, old)]
    if isinstance(node.value, dict | list) or spoken(node) not in words:
        expected, fix = " or ".join(w for w in words if w != "auto"), ADVICE.get(old, f"Our key is {_dotted(name, new)}.")
        faults.at(node, f"expected {expected}, got {node.text or 'a section'}.", fix=fix)
        return
    value = words[spoken(node)]
    if value is None or (new in entries and (spoken(node) == "false" or entries[new].value == value)):
        notes.append(f"{node.where}: {node.key}: {node.text} says nothing here; see {_dotted(name, new)}.")
    elif new in entries:
        faults.at(node, f"contradicts {entries[new].key} ({entries[new].where}).", fix=f"Keep {_dotted(name, new)} alone.")
    else:
        entries[new] = Node(value, node.where, node.key, node.text)
        notes.append(f"{node.where}: {node.key}: {node.text} is {_dotted(name, new)}: {value} here.")


def _dotted(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def our_name(section: str, name: str) -> str | None:
    """The key path that a name stands for inside a section, ours or another's; None when it means nothing there."""
    if name in children(section):
        return _dotted(section, name)
    if _dotted(section, name) in SWITCHES:
        return _dotted(section, SWITCHES[_dotted(section, name)][0])
    return _dotted(section, ALIASES[section][name]) if name in ALIASES.get(section, {}) else None


def other_names(path: str) -> list[str]:
    """What other toolkits call a key."""
    section, _, name = path.rpartition(".")
    switches = [old.rpartition(".")[2] for old, (new, _) in SWITCHES.items() if old.startswith(f"{section}.") and new == name]
    return [old for old, new in ALIASES.get(section, {}).items() if new == name] + switches


def _closest(word: str, legal: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(word.lower(), list(legal), n=1, cutoff=0.6)), None)


def advice(section: str, name: str) -> str:
    """What to do about a key that its section does not know."""
    if SECRET_KEY.search(name):
        return "Access tokens stay out of recipes: set HF_TOKEN, or the tracker's own variable, in the environment."
    if name in ADVICE or name.startswith("tokenizer"):
        return ADVICE.get(name, _TOKENIZER)
    if "." in name and name in keys():
        return f"Write it as a section: `{name.replace('.', ': {', 1)}: ...}}`."
    exact = [f"{other}.{name}" if other else name for other in ALIASES if name in children(other)]
    homes = exact or [home for other in ALIASES if (home := our_name(other, name))]
    if homes:
        level = f"into the section '{homes[0].rpartition('.')[0]}'" if "." in homes[0] else "to the top level"
        return f"It belongs {level}: write {' or '.join(dict.fromkeys(homes))}."
    if here := _closest(name, [*children(section), *ALIASES.get(section, {})]):
        return f"Did you mean '{our_name(section, here)}'?"
    anywhere = {key.name: key.path for key in reversed(keys().values())}
    if far := _closest(name, anywhere):
        return f"Did you mean '{anywhere[far]}'?"
    known = children(section)
    return f"Known here: {', '.join(known)}." if len(known) < 15 else f"`swiftlite explain {section}` lists the known ones."
