"""Names from other toolkits work inside their section, with a note, and never in silence."""

import pytest

from swiftlite.recipe import aliases
from swiftlite.recipe.keys import children, key_at, keys


@pytest.mark.parametrize(
    ("section", "old", "new"), [(s, old, new) for s, names in aliases.ALIASES.items() for old, new in names.items()]
)
def test_every_alias_leads_to_a_key_and_hides_none(section, old, new):
    assert new in children(section)
    assert old not in children(section)


@pytest.mark.parametrize(
    "path", [*aliases.VALUES, *(f"{p.rpartition('.')[0]}.{new}".strip(".") for p, (new, _) in aliases.SWITCHES.items())]
)
def test_every_mapped_value_is_legal(path):
    key = keys()[path]
    words = list(aliases.VALUES.get(path, {}).values())
    words += [w for p, (new, ws) in aliases.SWITCHES.items() if f"{p.partition('.')[0]}.{new}" == path for w in ws.values()]
    legal = key.allowed
    assert all(word is None or not legal or word in legal for word in words)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("lora: {r: 8}", "lora.rank", 8),
        ("lora: {lora_r: 8}", "lora.rank", 8),
        ("lora: {lora_rank: 8}", "lora.rank", 8),
        ("lora: {lora_alpha: 8}", "lora.alpha", 8),
        ("lora: {lora_dropout: 0.1}", "lora.dropout", 0.1),
        ("lora: {lora_target: all}", "lora.target_modules", "all-linear"),
        ("lora: {lora_target_modules: [q_proj]}", "lora.target_modules", ["q_proj"]),
        ("lora: {lora_target_linear: true}", "lora.target_modules", "all-linear"),
        ("lora: {additional_target: lm_head}", "lora.modules_to_save", ["lm_head"]),
        ("train: {micro_batch_size: 2}", "train.per_device_train_batch_size", 2),
        ("train: {batch_size: 2}", "train.per_device_train_batch_size", 2),
        ("train: {epochs: 2}", "train.num_train_epochs", 2),
        ("train: {num_epochs: 2}", "train.num_train_epochs", 2),
        ("train: {lr: 1e-3}", "train.learning_rate", 1e-3),
        ("train: {lr_scheduler: linear}", "train.lr_scheduler_type", "linear"),
        ("train: {warmup_ratio: 0.1}", "train.warmup_steps", 0.1),
        ("train: {optimizer: adamw_torch}", "train.optim", "adamw"),
        ("train: {optim: paged_adamw_32bit}", "train.optim", "adamw"),
        ("train: {optim: paged_adamw_8bit}", "train.optim", "adamw_8bit"),
        ("quantization_config: {load_in_4bit: true, load_in_8bit: false}\nlora: {}", "quantize.method", "nf4"),
        ("quantization_config: {load_in_4bit: true, bnb_4bit_quant_type: nf4}\nlora: {}", "quantize.method", "nf4"),
        ("train: {bf16: true}", "train.precision", "bf16"),
        ("train: {bf16: false}", "train.precision", "fp32"),
        ("train: {bf16: auto}", "train.precision", "auto"),
        ("train: {bf16: true, fp16: false}", "train.precision", "bf16"),
        ("train: {bf16: false, fp16: true}", "train.precision", "fp16"),
        ("train: {fp16: false}", "train.precision", "auto"),
        ("train: {torch_dtype: bfloat16}", "train.precision", "bf16"),
        ("train: {mixed_precision: no}", "train.precision", "fp32"),
        ("train: {gradient_checkpointing: true}", "train.gradient_checkpointing", "full"),
        ("train: {gradient_checkpointing: false}", "train.gradient_checkpointing", "none"),
        ("train: {activation_checkpointing: true}", "train.gradient_checkpointing", "full"),
        ("train: {disable_gradient_checkpointing: true}", "train.gradient_checkpointing", "none"),
        ("eval: {evaluation_strategy: off}", "eval.eval_strategy", "no"),
        ("eval: {eval_strategy: false}", "eval.eval_strategy", "no"),
        ("checkpoint: {save_strategy: off}", "checkpoint.save_strategy", "no"),
        ("checkpoint: {resume_from_checkpoint: runs/x}", "checkpoint.resume", "runs/x"),
        ("checkpoint: {resume: true}", "checkpoint.resume", "auto"),
        ("checkpoint: {resume: false}", "checkpoint.resume", None),
        ("strategy: fsdp2", "strategy.name", "fsdp"),
        ("strategy: off", "strategy.name", "none"),
        ("log: {report_to: none}", "log.report_to", []),
        ("output_dir: x", "output", "x"),
        ("export: {format: merged, torch_dtype: bfloat16}", "export.dtype", "bf16"),
    ],
)  # fmt: skip
def test_alias(load, text, path, value):
    loaded = load(text)
    found = loaded.recipe
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert any(note.startswith("r.yaml:3: ") and path in note for note in loaded.notes)


@pytest.mark.parametrize("text", [
    "model_name_or_path: a/b\ndataset: x\n", "base_model: a/b\ndatasets: [{path: x}]\n",
    "model: {model_name_or_path: a/b}\ndata: {train_file: x}\n", "model: {base_model: a/b}\ndata: [x]\n",
    "model: {path: a/b}\ndata: {datasets: [{file: x}]}\n",
])  # fmt: skip
def test_names_of_model_and_data(load, text):
    recipe = load(text, bare=True).recipe
    assert (recipe.model.name, recipe.data.train[0].path) == ("a/b", "x")


@pytest.mark.parametrize("name", ["max_seq_length", "max_seq_len", "cutoff_len", "sequence_len"])
def test_names_of_length(load, name):
    loaded = load(f"model: a\ndata: {{train: x, {name}: 99, val_set_size: 0.2}}\n", bare=True)
    assert (loaded.recipe.data.max_length, loaded.recipe.data.eval_split) == (99, 0.2)
    assert f"r.yaml:2: data.{name} is data.max_length here." in loaded.notes


def test_our_own_names_leave_no_note(load):
    assert load("lora: {rank: 4}\ntrain: {precision: bf16}\neval: {eval_strategy: no}\n").notes == []


def test_eight_bits_are_named_and_their_switch_may_be_off(load, refuse):
    assert load("load_in_8bit: false\nload_in_4bit: false\n").recipe.quantize is None
    for text in ("load_in_8bit: true", "quantize: {method: nf4, load_in_8bit: true}"):
        message = refuse(text + "\n")
        assert "expected false, got true" in message and "`quantize: fp8`" in message


def test_two_names_for_one_key_are_refused(refuse):
    message = refuse("train:\n  lr: 1\n  learning_rate: 2\n")
    assert message.startswith("r.yaml:5: train.learning_rate: the same key as train.lr (r.yaml:4)")
    assert "contradicts train.precision (r.yaml:3)" in refuse("train: {precision: fp32, bf16: true}")
    assert "contradicts train.bf16" in refuse("train: {bf16: true, fp16: true}")
    assert "expected true or false" in refuse("train: {bf16: 3}")
    assert "a share below 1" in refuse("train: {warmup_ratio: 10}")


@pytest.mark.parametrize(
    "text", ["tokenizer: x", "tokenizer_name_or_path: x", "train: {tokenizer: x}", "data: {tokenizer_type: x}"]
)
def test_the_tokenizer_comes_with_the_model(refuse, text):
    message = refuse(f"model: a\n{text}\n", bare=True)
    assert "tokenizer comes with the model: model.name" in message


@pytest.mark.parametrize("name", aliases.ADVICE)
def test_every_advice_reaches_the_user_and_names_real_keys(refuse, name):
    assert aliases.ADVICE[name] in refuse(f"train: {{{name}: x}}\n")
    for word in aliases.ADVICE[name].replace("`", " ").replace(":", " ").split():
        if word.strip(".,").count(".") == 1 and "/" not in word:
            assert key_at(tuple(word.strip(".,").split("."))).path == word.strip(".,")
