"""Defaults that depend on other keys, with their origin, and keys that must fit each other."""

import re

import pytest

from swiftlite.recipe import show
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.keys import keys
from swiftlite.recipe.load import dump_yaml, resolve

EVAL = "model: a\ndata: {train: x, eval: y}\n"


@pytest.mark.parametrize(
    ("text", "method", "rate", "formats"),
    [
        ("", "full", 1e-5, ["merged"]),
        ("lora: true", "lora", 2e-4, ["adapter"]),
        ("lora: {}", "lora", 2e-4, ["adapter"]),
        ("lora: {use_dora: true}", "dora", 1e-4, ["adapter"]),
        ("train: {trainable: ['*norm*']}", "partial", 1e-5, ["merged"]),
    ],
)
def test_defaults_of_the_method(load, text, method, rate, formats):
    loaded = load(text)
    assert loaded.method == method
    assert loaded.recipe.train.learning_rate == rate
    assert loaded.recipe.export.formats == formats
    assert loaded.origins["train.learning_rate"] == loaded.origins["export.formats"] == f"method: {method}"


def test_an_adapter_to_go_on_from_implies_lora(load):
    loaded = load("model: {name: a, adapter: b}\ndata: x\n", bare=True)
    assert (loaded.method, loaded.origins["lora"], loaded.recipe.export.formats) == ("lora", "method: model.adapter", ["adapter"])
    # Its own config says what it is: of ours nothing is shown or saved that the user did not say.
    assert "rank" not in show.as_text(loaded) + dump_yaml(loaded.recipe) and loaded.recipe.lora.alpha is None
    given = load("model: {name: a, adapter: b}\ndata: x\nlora: {rank: 4}\n", bare=True)
    assert "lora.rank: 4 " in show.as_text(given)
    assert not re.search(r"\balpha:", show.as_text(given) + dump_yaml(given.recipe))


def test_other_defaults(load):
    loaded = load("lora: {rank: 4}\ntrain: {per_device_train_batch_size: 2}\n")
    recipe = loaded.recipe
    assert (recipe.lora.alpha, loaded.origins["lora.alpha"]) == (8, "default: 2 * lora.rank")
    assert (recipe.output, recipe.eval.eval_strategy, recipe.eval.per_device_eval_batch_size) == ("runs/r", "no", 2)
    assert load(EVAL, bare=True).recipe.eval.eval_strategy == "epoch"
    assert load("model: a\ndata: {train: x, eval_split: 0.1}\n", bare=True).recipe.eval.eval_strategy == "epoch"


def test_steps_given_choose_their_strategy(load):
    loaded = load(EVAL + "eval: {eval_steps: 5}\ncheckpoint: {save_steps: 0.5}\n", bare=True)
    assert (loaded.recipe.eval.eval_strategy, loaded.recipe.checkpoint.save_strategy) == ("steps", "steps")
    assert loaded.origins["checkpoint.save_strategy"] == "derived: checkpoint.save_steps"


def test_every_key_has_an_origin_and_nothing_is_left_open(load):
    loaded = load("lora: true\n")
    assert set(loaded.origins) >= {path for path in keys() if "[]" not in path}
    train = loaded.recipe.train
    assert None not in (train.global_batch_size, train.gradient_accumulation_steps, train.learning_rate, loaded.recipe.output)


@pytest.mark.parametrize(
    ("text", "ranks", "batch"),  # batch: global, per device, accumulation
    [
        ("", 1, (16, 1, 16)),
        ("", 4, (16, 1, 4)),
        ("", 5, (16, 1, 4)),
        ("global_batch_size: 64", 2, (64, 1, 32)),
        ("per_device_train_batch_size: 4", 2, (16, 4, 2)),
        ("per_device_train_batch_size: 6", 1, (16, 6, 3)),
        ("gradient_accumulation_steps: 3", 1, (3, 1, 3)),
        ("gradient_accumulation_steps: 3, per_device_train_batch_size: 2", 4, (24, 2, 3)),
        ("gradient_accumulation_steps: 4, global_batch_size: 32", 2, (32, 4, 4)),
        ("gradient_accumulation_steps: 4, global_batch_size: 32, per_device_train_batch_size: 4", 2, (32, 4, 4)),
    ],
)
def test_batch(load, text, ranks, batch):
    once = load(f"train: {{{text}}}\n")
    loaded = resolve(once, ranks)
    train = loaded.recipe.train
    assert (train.global_batch_size, train.per_device_train_batch_size, train.gradient_accumulation_steps) == batch
    assert resolve(loaded, ranks) == loaded  # resolving again changes nothing
    assert resolve(resolve(once, 3 if "steps: 4" not in text else 2), ranks).recipe == loaded.recipe  # and forgets nothing


def test_three_batch_keys_must_agree(load, refuse):
    text = "train: {global_batch_size: 64, per_device_train_batch_size: 4, gradient_accumulation_steps: 7}\n"
    message = refuse(text)
    for words in ("r.yaml:3", "global_batch_size: 64", "per_device_train_batch_size: 4", "gradient_accumulation_steps: 7", "28"):
        assert words in message
    loaded = load(text.replace("7", "8"))
    assert "needs 2 processes" in loaded.notes[0]
    assert resolve(loaded, 2).recipe == loaded.recipe
    with pytest.raises(RecipeError, match="4 x 8 x 3 processes = 96"):
        resolve(loaded, 3)
    assert "32 is more than train.global_batch_size: 16 (its default)" in refuse("train: {per_device_train_batch_size: 32}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lora: true\ntrain: {trainable: [x]}", ("r.yaml:4: train.trainable", "lora")),
        ("train: {warmup_steps: 1.5}", ("r.yaml:3: train.warmup_steps", "1.5", "whole number")),
        ("strategy: {name: none, wrap: [Block]}", ("r.yaml:3: strategy.wrap", "strategy none")),
        ("export: adapter", ("r.yaml:3: export.formats", "'adapter' needs a lora section")),
        ("export: mergd", ("r.yaml:3: export.formats", "Did you mean 'merged'?")),
        ("strategy: fdsp", ("r.yaml:3: strategy.name", "Did you mean 'fsdp'?", "Known: none")),
        ("train: {objective: sfft}", ("r.yaml:3: train.objective", "'sft'")),
        ("eval: {eval_strategy: epoch}", ("r.yaml:3: eval.eval_strategy", "no rows to evaluate on", "data.eval")),
        ("eval: {eval_steps: 5}", ("eval.eval_steps", "no rows to evaluate on")),
        ("eval: {eval_on_start: true}", ("eval.eval_on_start", "no rows to evaluate on")),
        ("checkpoint: {save_strategy: steps}", ("'steps' needs checkpoint.save_steps",)),
        ("checkpoint: {save_strategy: epoch, save_steps: 5}", ("checkpoint.save_steps", "'epoch'")),
        ("checkpoint: {save_steps: 5.5}", ("checkpoint.save_steps", "5.5")),
    ],
)
def test_keys_that_do_not_fit(refuse, text, words):
    message = refuse(EVAL + text, bare=True) if text.startswith("checkpoint") else refuse(text)
    assert all(word in message for word in words)


def test_keys_of_evaluation_that_do_not_fit(refuse):
    assert "'steps' needs eval.eval_steps" in refuse(EVAL + "eval: {eval_strategy: steps}", bare=True)
    assert "not used while eval.eval_strategy is 'no'" in refuse(EVAL + "eval: {eval_strategy: no, eval_steps: 5}", bare=True)
    message = refuse("model: a\ndata:\n  train:\n    - path: x\n      format: alpca\n", bare=True)
    assert message.startswith("r.yaml:5: data.train.0.format: unknown name 'alpca'. Did you mean 'alpaca'?")


def test_warmup_of_one_step_is_a_step(load):
    assert load("train: {warmup_steps: 1}\n").recipe.train.warmup_steps == 1
