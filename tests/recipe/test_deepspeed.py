"""A DeepSpeed JSON becomes recipe keys; what cannot be meant the same is refused by name."""

import json
import math

import pytest

from swiftlite.recipe import show
from swiftlite.recipe.deepspeed_keys import KNOWN, NO_EFFECT, ONLY, REFUSED, SCALE, SECTIONS, TAKEN, WORDS
from swiftlite.recipe.keys import keys
from swiftlite.recipe.load import dump_yaml, load_recipe, resolve
from swiftlite.train.schedule import Rate
from swiftlite.train.state import check_resumable, flat

CONFIG = "strategy: {config: ds.json}\n"

# In the manner of the Transformers documentation: everything is left to the trainer.
TRANSFORMERS_ZERO3 = """{
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto"
        }
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "cpu", "pin_memory": true},
        "overlap_comm": true,
        "contiguous_gradients": true,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false
}
"""
# In the manner of LLaMA-Factory's examples.
FACTORY_ZERO2 = """{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "zero_allow_untested_optimizer": true,
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
           "min_loss_scale": 1},
  "bf16": {"enabled": "auto"},
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "allgather_partitions": true,
    "allgather_bucket_size": 5e8,
    "overlap_comm": false,
    "reduce_scatter": true,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": true,
    "round_robin_gradients": true
  }
}
"""
# By hand: with every value written out, comments, trailing commas and tabs.
WRITTEN_OUT = """\t// our settings
{
\t"train_batch_size": 32, # rows
\t"train_micro_batch_size_per_gpu": 4, /* of one
\tGPU */
  "gradient_accumulation_steps": 8,
  "gradient_clipping": 0.5,
  "bf16": {"enabled": true,},
  "communication_data_type": "bf16",
  "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1,
    "torch_adam": true}},
  "scheduler": {"type": "WarmupCosineLR", "params": {
    "warmup_num_steps": 50, "warmup_type": "linear", "warmup_min_ratio": 0.0, "cos_min_ratio": 0.1,
  }},
  "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": false},
  "zero_optimization": {"stage": 3, "mics_shard_size": 2}, // "stage": 1, }
}
"""


@pytest.fixture
def ds(tmp_path):
    """Writes a DeepSpeed JSON: a text, or a mapping by dotted keys."""

    def write(config):
        if not isinstance(config, str):
            whole = {}
            for path, value in config.items():
                *sections, name = path.split(".")
                holder = whole
                for section in sections:
                    holder = holder.setdefault(section, {})
                holder[name] = value
            config = json.dumps(whole, indent=1)
        (tmp_path / "ds.json").write_text(config)

    return write


def at(recipe, path):
    for name in path.split("."):
        recipe = getattr(recipe, name)
    return recipe


ZERO, ADAM, RATE = "zero_optimization", "optimizer.params", "scheduler.params"
CPU = {"device": "cpu"}
LINEAR = {"scheduler.type": "WarmupLR", f"{RATE}.warmup_type": "linear"}


def test_tables_lead_to_keys_and_do_not_overlap():
    assert set(TAKEN.values()) <= set(keys())
    tables = [set(TAKEN), set(ONLY), set(REFUSED), set(NO_EFFECT)]
    assert sum(map(len, tables)) == len(set.union(*tables))
    assert set(WORDS) <= KNOWN and not KNOWN & SECTIONS
    for path, key in TAKEN.items():
        legal = keys()[key].allowed
        assert not legal or set(WORDS[path][0].values()) <= set(legal)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({f"{ZERO}.stage": 0}, {"strategy.name": "ddp"}),
        ({f"{ZERO}.stage": 1}, {"strategy.name": "zero1"}),
        ({f"{ZERO}.stage": 2}, {"strategy.name": "zero2"}),
        ({f"{ZERO}.stage": 3}, {"strategy.name": "zero3"}),
        ({f"{ZERO}.offload_optimizer": CPU}, {"strategy.offload": "optimizer"}),
        ({f"{ZERO}.offload_optimizer": CPU, f"{ZERO}.offload_param.device": "none"}, {"strategy.offload": "optimizer"}),
        ({f"{ZERO}.offload_optimizer": CPU, f"{ZERO}.offload_param": CPU}, {"strategy.offload": "params"}),
        ({f"{ZERO}.offload_optimizer.device": "none"}, {"strategy.offload": "none"}),
        ({f"{ZERO}.cpu_offload": True}, {"strategy.offload": "optimizer"}),
        ({f"{ZERO}.cpu_offload": True, f"{ZERO}.cpu_offload_params": True}, {"strategy.offload": "params"}),
        ({f"{ZERO}.stage": 3, f"{ZERO}.mics_shard_size": 8}, {"strategy.name": "hsdp", "strategy.shard": 8}),
        ({f"{ZERO}.stage": 3, f"{ZERO}.mics_shard_size": -1}, {"strategy.name": "zero3", "strategy.shard": None}),
        ({"bf16.enabled": True}, {"train.precision": "bf16"}),
        ({"bfloat16.enabled": True, "fp16.enabled": False}, {"train.precision": "bf16"}),
        ({"fp16.enabled": True, "fp16.initial_scale_power": 16, "fp16.loss_scale_window": 1000}, {"train.precision": "fp16"}),
        ({"fp16.enabled": False, "bf16.enabled": False}, {"train.precision": "fp32"}),
        ({"fp16.enabled": False}, {"train.precision": "auto"}),
        ({"fp16.enabled": False, "bf16.enabled": "auto"}, {"train.precision": "auto"}),
        ({"gradient_clipping": 0.3}, {"train.max_grad_norm": 0.3}),
        ({"gradient_clipping": 0}, {"train.max_grad_norm": 0}),
        ({"train_micro_batch_size_per_gpu": 4}, {"train.per_device_train_batch_size": 4, "train.global_batch_size": 16}),
        ({"gradient_accumulation_steps": 3}, {"train.gradient_accumulation_steps": 3, "train.global_batch_size": 3}),
        ({"train_batch_size": 12}, {"train.global_batch_size": 12}),
        ({"optimizer.type": "AdamW", f"{ADAM}.lr": 1e-3}, {"train.optim": "adamw", "train.learning_rate": 1e-3}),
        ({"optimizer.type": "adam", f"{ADAM}.adam_w_mode": True}, {"train.optim": "adamw"}),
        ({"optimizer.type": "AdamW", f"{ADAM}.adam_w_mode": False}, {"train.optim": "adamw"}),
        ({f"{ADAM}.betas": [0.8, 0.9]}, {"train.adam_beta1": 0.8, "train.adam_beta2": 0.9}),
        ({f"{ADAM}.betas": ["auto", 0.9]}, {"train.adam_beta1": 0.9, "train.adam_beta2": 0.9}),
        ({f"{ADAM}.eps": "1e-7", f"{ADAM}.weight_decay": 3e-7}, {"train.adam_epsilon": 1e-7, "train.weight_decay": 3e-7}),
        (
            LINEAR | {f"{RATE}.warmup_num_steps": 7, f"{RATE}.warmup_max_lr": 1e-4, f"{RATE}.warmup_min_lr": 0},
            {"train.lr_scheduler_type": "constant", "train.warmup_steps": 7, "train.learning_rate": 1e-4},
        ),
        ({"scheduler.type": "WarmupDecayLR"}, {"train.lr_scheduler_type": "linear", "train.min_lr_ratio": 0}),
        (
            {"scheduler.type": "WarmupCosineLR", f"{RATE}.warmup_num_steps": 0, f"{RATE}.cos_min_ratio": 0.2},
            {"train.lr_scheduler_type": "cosine", "train.warmup_steps": 0, "train.min_lr_ratio": 0.2},
        ),
        ({"communication_data_type": "bf16"}, {"strategy.reduce_dtype": "bf16"}),
        ({"data_types.grad_accum_dtype": "fp32", "communication_data_type": "fp32"}, {"strategy.reduce_dtype": "fp32"}),
        ({"activation_checkpointing.enabled": True}, {"train.gradient_checkpointing": "full"}),
        ({"activation_checkpointing.enabled": False}, {"train.gradient_checkpointing": "none"}),
        ({"activation_checkpointing.partition_activations": True}, {"train.gradient_checkpointing": "full"}),
        ({"activation_checkpointing.partition_activations": False}, {"train.gradient_checkpointing": None}),
    ],
)
def test_taken(load, ds, config, expected):
    ds(config)
    loaded = load(CONFIG)
    assert {path: at(loaded.recipe, path) for path in expected} == expected


@pytest.mark.parametrize("path", sorted(KNOWN))
def test_auto_and_null_leave_every_key_to_the_recipe(load, ds, path):
    for value in ("auto", None):
        ds({path: value})
        loaded = load(CONFIG)
        assert loaded.notes == [] and loaded.recipe == load("").recipe.model_copy(update={"strategy": loaded.recipe.strategy})


def test_with_everything_written_out(load, ds):
    ds(WRITTEN_OUT)
    loaded = load(CONFIG)
    train, strategy = loaded.recipe.train, loaded.recipe.strategy
    assert (train.global_batch_size, train.per_device_train_batch_size, train.gradient_accumulation_steps) == (32, 4, 8)
    assert (train.max_grad_norm, train.precision, train.optim, train.weight_decay) == (0.5, "bf16", "adamw", 0.1)
    assert (train.learning_rate, train.adam_beta1, train.adam_beta2, train.adam_epsilon) == (3e-5, 0.8, 0.95, 1e-6)
    assert (train.lr_scheduler_type, train.warmup_steps, train.min_lr_ratio) == ("cosine", 50, 0.1)
    assert (strategy.name, strategy.shard, strategy.reduce_dtype, train.gradient_checkpointing) == ("hsdp", 2, "bf16", "full")
    assert loaded.notes == [
        "ds.json: without effect here: optimizer.params.torch_adam, scheduler.params.warmup_min_ratio, "
        "activation_checkpointing.cpu_checkpointing."
    ]


def test_in_the_manner_of_transformers(load, ds):
    ds(TRANSFORMERS_ZERO3)
    loaded = load(CONFIG + "train: {learning_rate: 3e-5, warmup_steps: 10, precision: bf16, per_device_train_batch_size: 2}\n")
    train, strategy = loaded.recipe.train, loaded.recipe.strategy
    assert (strategy.name, strategy.offload, train.lr_scheduler_type) == ("zero3", "params", "linear")
    assert (train.learning_rate, train.warmup_steps, train.precision, train.max_grad_norm) == (3e-5, 10, "bf16", 1.0)
    assert (train.per_device_train_batch_size, train.global_batch_size) == (2, 16)
    warmup, unused = loaded.notes
    assert warmup.startswith("ds.json: scheduler.type: DeepSpeed's warm-up is logarithmic unless")
    for name in ("overlap_comm", "sub_group_size", "offload_param.pin_memory", "stage3_gather_16bit_weights_on_model_save"):
        assert f"zero_optimization.{name}" in unused
    assert "steps_per_print" in unused and "fp16.hysteresis" in unused and "reduce_bucket_size" not in unused


def test_in_the_manner_of_llama_factory(load, ds):
    ds(FACTORY_ZERO2)
    loaded = load(CONFIG + "lora: true\ntrain: {lr: 1e-4, bf16: true}\n")
    assert (loaded.recipe.strategy.name, loaded.recipe.strategy.offload) == ("zero2", "optimizer")
    assert (loaded.recipe.train.learning_rate, loaded.recipe.train.precision) == (1e-4, "bf16")
    assert [note for note in loaded.notes if note.startswith("ds.json")] == [loaded.notes[-1]]
    assert "zero_optimization.round_robin_gradients" in loaded.notes[-1]


REJECTED = [
    ({f"{ZERO}.offload_param.device": "nvme"}, "offload_param.device: \"nvme\" is not possible here. Write cpu"),
    ({f"{ZERO}.offload_optimizer.device": "nvme"}, "offload_optimizer.device: \"nvme\" is not possible here. Write cpu"),
    ({f"{ZERO}.offload_param": CPU}, "Set zero_optimization.offload_optimizer.device to cpu too"),
    ({f"{ZERO}.stage": 4}, "zero_optimization.stage: 4 is not possible here. Stages are 0, 1, 2 and 3."),
    ({f"{ZERO}": 2}, "zero_optimization: expected a section, got 2."),
    ({f"{ZERO}.cpu_offload": "yes"}, "expected true or false, got \"yes\"."),
    ({f"{ZERO}.mics_shard_size": 8, f"{ZERO}.stage": 2}, "8 is not possible here. Set zero_optimization.stage to 3."),
    ({f"{ZERO}.zero_hpz_partition_size": 8}, "mics_shard_size, our `strategy: hsdp`"),
    ({f"{ZERO}.stages": 3}, "zero_optimization.stages: unknown key. Did you mean 'stage'?"),
    ({f"{ZERO}.stage3_prefetch_buckets": 3}, "Did you mean 'stage3_prefetch_bucket_size'?"),
    ({"zero_optimisation.stage": 3}, "zero_optimisation: unknown key. Did you mean 'zero_optimization'?"),
    ({"train_micro_batch_size_per_gp": 3}, "Did you mean 'train_micro_batch_size_per_gpu'?"),
    ({"qqq": "auto"}, "qqq: unknown key. Leave it out"),
    ({"bf16.enabled": "true"}, "bf16.enabled: expected true or false, got \"true\"."),
    ({"bf16.enabled": True, "fp16.enabled": True}, "fp16.enabled: true contradicts bf16.enabled: true (ds.json:3)"),
    ({"fp16.enabled": True, "fp16.loss_scale": 128}, "fp16.loss_scale: 128 is not possible here. Leave it out: the scale"),
    ({"fp16.enabled": True, "fp16.initial_scale_power": 32}, "fp16.initial_scale_power: 32 is not possible"),
    ({"fp16.enabled": True, "fp16.loss_scale_window": 100}, "fp16.loss_scale_window: 100 is not possible"),
    ({"fp16.enabled": True, "fp16.min_loss_scale": 8}, "fp16.min_loss_scale: 8 is not possible"),
    ({"optimizer.type": "OneBitAdam", f"{ADAM}.freeze_step": 10}, "optimizer.type: \"OneBitAdam\" is not possible here."),
    ({"optimizer.type": "Lamb"}, "Use AdamW"),
    ({"optimizer.type": "Adam", f"{ADAM}.adam_w_mode": False}, "adam_w_mode: false is not possible here. Write true"),
    ({f"{ADAM}.betas": 0.9}, "optimizer.params.betas: expected a list of two numbers."),
    ({f"{ADAM}.lr": [1, 2]}, "optimizer.params.lr: expected one value, got a list."),
    ({f"{ADAM}.lr": -1}, "optimizer.params.lr: (our train.learning_rate) expected a number >= 0, got '-1'."),
    ({f"{ADAM}.betas": [0.9, 1.5]}, "betas[1]: (our train.adam_beta2) expected a number >= 0 and < 1, got '1.5'."),
    ({f"{ADAM}.lr": 1e-4, f"{RATE}.warmup_max_lr": 1e-3}, "warmup_max_lr: 0.001 contradicts optimizer.params.lr"),
    ({"scheduler.type": "OneCycle", f"{RATE}.cycle_min_lr": 0.1}, "scheduler.type: \"OneCycle\" is not possible here."),
    (LINEAR | {f"{RATE}.warmup_min_lr": 1e-8}, "warmup_min_lr: 1e-08 is not possible here. Write 0"),
    (LINEAR | {f"{RATE}.warmup_type": "log"}, "warmup_type: \"log\" is not possible here. Write linear"),
    ({"scheduler.type": "WarmupLR", f"{RATE}.warmup_num_steps": 10}, "Write \"warmup_type\": \"linear\" beside it."),
    (LINEAR | {f"{RATE}.warmup_num_steps": 0.1}, "warmup_num_steps: expected a whole number of steps, got 0.1."),
    ({"scheduler.type": "WarmupDecayLR", f"{RATE}.total_num_steps": 100}, "100 is not the recipe's train.max_steps"),
    ({"communication_data_type": "fp16"}, "communication_data_type: \"fp16\" is not possible here. Write fp32 or bf16."),
    ({"communication_data_type": "bf16", "data_types.grad_accum_dtype": "fp32"}, "\"fp32\" contradicts communication"),
    ({"gradient_accumulation_steps": "many"}, "(our train.gradient_accumulation_steps) expected a whole number > 0"),
    ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, "2 x 2 x 1 process = 4"),
    ({"tensor_parallel.autotp_size": 4}, "tensor_parallel.autotp_size: 4 is not possible here. Write 1"),
    ({"tensor_parallel.tp_size": 2}, "tensor_parallel.tp_size: 2 is not possible here. Write 1"),
]  # fmt: skip
for name, (values, fix) in ONLY.items():
    odd = next(value for value in (True, 2, "other") if value not in values)
    REJECTED.append(({name: odd}, f"{name}: {json.dumps(odd)} is not possible here. {fix}"))


@pytest.mark.parametrize(("config", "words"), REJECTED)
def test_refused(refuse, ds, config, words):
    ds(config)
    message = refuse(CONFIG)
    assert words in message
    assert message.startswith("ds.json:") and "mistakes" not in message


@pytest.mark.parametrize("name", REFUSED)
def test_sections_that_are_not_offered(load, refuse, ds, name):
    ds({f"{name}.enabled": True, f"{name}.x": 1})
    assert refuse(CONFIG).startswith(f"ds.json:{2 + name.count('.')}: {name}: not offered here. {REFUSED[name]}")
    ds({f"{name}.x": 1})
    assert "not offered" in refuse(CONFIG)
    for off in ({f"{name}.enabled": False, f"{name}.x": {"enabled": True}}, {f"{name}.a.enabled": False}, {name: {}}):
        ds(off)
        assert load(CONFIG).notes == [f"ds.json: without effect here: {name}."]
    ds({f"{name}.a.enabled": False, f"{name}.b.c.enabled": True})
    assert "not offered" in refuse(CONFIG)


def test_what_tunes_only_deepspeed_is_named_in_one_note(load, ds):
    ds(dict.fromkeys(NO_EFFECT, 1) | {name: values[0] for name, (values, _) in ONLY.items() if values})
    loaded = load(CONFIG)
    (note,) = loaded.notes
    assert note.startswith("ds.json: without effect here: ")
    named = set(note.removesuffix(".").partition("here: ")[2].split(", "))
    assert named == set(NO_EFFECT) | {name for name, (values, _) in ONLY.items() if values}
    assert [key for key, origin in loaded.origins.items() if origin.startswith("ds.json")] == []


def test_the_loss_scale_matters_under_fp16_alone(load, refuse, ds):
    ds({"fp16.enabled": "auto", "fp16.initial_scale_power": 32, "fp16.loss_scale": 0})
    assert load(CONFIG + "train: {precision: bf16}\n").recipe.train.precision == "bf16"
    assert "fp16.initial_scale_power: 32 is not possible" in refuse(CONFIG + "train: {fp16: true}\n")
    ds({"fp16.enabled": True, "fp16.initial_scale_power": 32})
    assert load(CONFIG, "train.precision=bf16").recipe.train.precision == "bf16"
    ds({f"fp16.{name}": least for name, (least, _) in SCALE.items()})
    assert load(CONFIG + "train: {fp16: true}\n").recipe.train.precision == "fp16"


def test_steps_in_all_must_be_those_of_the_recipe(load, refuse, ds):
    ds({"scheduler.type": "WarmupDecayLR", f"{RATE}.total_num_steps": 100})
    assert load(CONFIG + "train: {max_steps: 100}\n").recipe.train.lr_scheduler_type == "linear"
    assert "total_num_steps: 100 is not" in refuse(CONFIG + "train: {max_steps: 200}\n")
    assert 'scheduler.type: "WarmupDecayLR"' in refuse(CONFIG + "train: {max_steps: 100, min_lr_ratio: 0.1}\n")


def test_a_file_that_switches_fp16_off_contradicts_it(load, refuse, ds):
    ds({"fp16.enabled": False})
    assert "fp16.enabled: false (ds.json:3)" in refuse(CONFIG + "train: {precision: fp16}\n")
    assert load(CONFIG + "train: {precision: bf16}\n").recipe.train.precision == "bf16"


def test_all_faults_of_a_file_are_reported_together(refuse, ds):
    ds({"aio.block_size": 1, f"{ZERO}.stage": 7, f"{ZERO}.stges": 1, f"{ADAM}.lr": "fast", "optimizer.type": "Lion"})
    message = refuse(CONFIG + "train: {precision: bf17}\n")
    places = (
        "r.yaml:4: train.precision",
        "ds.json:2: aio",
        "ds.json:6: zero_optimization.stage:",
        "ds.json:7: zero_optimization.stges",
    )
    for words in (*places, "ds.json:13: optimizer.type"):
        assert words in message
    assert message.startswith("5 mistakes")  # the rate of an optimizer that there is not is not looked at


def test_contradictions_name_both_places(refuse, load, ds):
    ds({f"{ZERO}.stage": 3, "gradient_clipping": 0.5})
    message = refuse("train: {max_grad_norm: 1}\nstrategy:\n  name: zero2\n  config: ds.json\n")
    assert (
        "r.yaml:3: train.max_grad_norm: 1 here, and gradient_clipping: 0.5 (ds.json:5) says train.max_grad_norm: 0.5." in message
    )
    assert "r.yaml:5: strategy.name: zero2 here, and zero_optimization.stage: 3 (ds.json:3) says strategy.name: zero3." in message
    # The same value in both is none, in any spelling, and `null` asks for the default.
    loaded = load("train: {max_grad_norm: 5e-1, learning_rate: null}\nstrategy: {name: deepspeed_zero3, config: ds.json}\n")
    assert (loaded.origins["train.max_grad_norm"], loaded.origins["strategy.name"]) == ("r.yaml:3", "r.yaml:4")
    assert load(CONFIG + "train: {max_grad_norm: null}\n").recipe.train.max_grad_norm == 0.5


def test_the_command_line_beats_the_file_and_says_so(load, ds):
    ds({f"{ZERO}.stage": 3, "gradient_clipping": 0.5, "train_batch_size": 8})
    loaded = load(CONFIG, "strategy=fsdp", "train.max_grad_norm=2", "train.global_batch_size=8")
    assert (loaded.recipe.strategy.name, loaded.recipe.train.max_grad_norm) == ("fsdp", 2)
    assert loaded.origins["strategy.name"] == "command line"
    assert loaded.notes == [
        "train.max_grad_norm: 2 of the command line beats gradient_clipping: 0.5 (ds.json:5).",
        "strategy.name: fsdp of the command line beats zero_optimization.stage: 3 (ds.json:3).",
    ]
    assert load(CONFIG, "strategy.name=null").recipe.strategy.name is None
    assert load("", "strategy.config=ds.json").recipe.strategy.name == "zero3"
    assert load(CONFIG, "strategy.config=null").recipe.strategy.name is None


def test_origins_and_what_is_shown(load, ds):
    ds({f"{ZERO}.stage": 3, f"{ADAM}.betas": [0.8, 0.9], "train_batch_size": 4})
    loaded = load(CONFIG)
    assert loaded.origins["strategy.name"] == "ds.json: zero_optimization.stage"
    assert loaded.origins["train.adam_beta2"] == "ds.json: optimizer.params.betas[1]"
    assert loaded.origins["strategy.config"] == "r.yaml:3" and loaded.given("train.global_batch_size")
    text = show.as_text(loaded)
    assert "(ds.json: zero_optimization.stage)" in text and "strategy.config: ds.json " in text
    assert resolve(loaded, 2).recipe.train.gradient_accumulation_steps == 2


def test_a_saved_recipe_needs_the_file_no_more(load, ds, tmp_path):
    ds(WRITTEN_OUT)
    loaded = load(CONFIG)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(loaded.recipe))
    (tmp_path / "ds.json").unlink()
    again = load_recipe("recipe.yaml").recipe
    assert again.strategy.config is None and "config: ds" not in dump_yaml(loaded.recipe)
    strategy = loaded.recipe.strategy.model_copy(update={"config": None})
    assert again == loaded.recipe.model_copy(update={"strategy": strategy})
    # A checkpoint of the one is resumed by the other without a word.
    assert check_resumable(flat(loaded.recipe), flat(again)) == check_resumable(flat(again), flat(loaded.recipe)) == []


def test_where_the_file_is_looked_for(load, refuse, ds, tmp_path, monkeypatch):
    ds({f"{ZERO}.stage": 1})
    message = refuse("strategy: {config: other.json}\ntrain: {lrr: 1}\n")
    assert "r.yaml:3: strategy.config: 'other.json' cannot be read: No such file" in message
    assert "A relative path starts at the working folder." in message and "train.lrr" in message
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe{")
    assert "is not UTF-8 text" in refuse("strategy: {config: b.yaml}\n")
    monkeypatch.setenv("DS", str(tmp_path / "ds.json"))
    loaded = load("strategy: {config: '${DS}'}\n")
    assert loaded.origins["strategy.name"] == f"{tmp_path}/ds.json: zero_optimization.stage"
    named = load("strategy: {deepspeed: ds.json}\n")
    assert named.recipe.strategy.name == "zero1" and "r.yaml:3: strategy.deepspeed is strategy.config here." in named.notes
    assert "write strategy.config" in refuse("deepspeed: ds.json\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n"train_batch_size": 4\n"bf16": {}}', "ds.json:3: not valid JSON: Expecting ',' delimiter."),
        ("", "ds.json:1: not valid JSON"),
        ("[1]", "ds.json: a DeepSpeed configuration is a JSON object."),
        ('{"train_batch_size": 4, /* open', "ds.json:1: not valid JSON"),
        ('{"train_batch_size": 4,\n"train_batch_size": 8}', "ds.json:2: train_batch_size: repeated key, first on ds.json:1"),
    ],
)
def test_files_that_are_no_json_object(refuse, ds, text, words):
    ds(text)
    assert words in refuse(CONFIG)


def test_comments_inside_texts_are_texts(refuse, ds):
    ds('\ufeff{"a//b": 1, "c/*d": "#,]", /* , } */ "train_batch_size": 4, # x\n}')
    message = refuse(CONFIG)
    assert "a//b: unknown key" in message and "c/*d: unknown key" in message and message.startswith("2 mistakes")


def test_the_rate_has_deepspeeds_shapes():
    """Its formulas behind the warm-up, where a number of steps makes the rate, for what its schedulers are mapped to."""
    total, warmup, low = 50, 10, 0.1
    for step in range(warmup, total):
        linear, cosine = (Rate(kind, 1.0, total, warmup, floor).at(step) for kind, floor in (("linear", 0), ("cosine", low)))
        assert linear == pytest.approx((total - step) / (total - warmup))
        assert cosine == pytest.approx(low + (1 - low) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2)
        assert Rate("constant", 1.0, total, warmup, 0).at(step) == 1
