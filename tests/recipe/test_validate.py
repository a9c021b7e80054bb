"""Every fault names file, line, key path, the text and what would be right; all are listed at once."""

import pytest

from swiftlite.recipe.aliases import ALIASES
from swiftlite.recipe.keys import children, keys


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("train: {learning_rat: 1}", "r.yaml:3: train.learning_rat", "Did you mean 'train.learning_rate'?"),
        ("train:\n  optimm: sgd", "r.yaml:4: train.optimm", "Did you mean 'train.optim'?"),
        ("lora: {lora_alhpa: 1}", "r.yaml:3: lora.lora_alhpa", "Did you mean 'lora.alpha'?"),
        ("learning_rate: 1", "r.yaml:3: learning_rate", "belongs into the section 'train': write train.learning_rate"),
        ("max_seq_length: 1", "r.yaml:3: max_seq_length", "write data.max_length"),
        ("train: {max_length: 3}", "r.yaml:3: train.max_length", "belongs into the section 'data': write data.max_length"),
        ("train: {lora: {}}", "r.yaml:3: train.lora", "belongs to the top level: write lora"),
        ("train: {output_dir: x}", "r.yaml:3: train.output_dir", "belongs to the top level: write output"),
        ("format: text", "r.yaml:3: format", "data.format"),
        ("train.learning_rate: 1", "r.yaml:3: train.learning_rate", "Write it as a section: `train: {learning_rate: ...}`"),
        ("trian: {}", "r.yaml:3: trian", "Did you mean 'train'?"),
        ("zzz: 1", "r.yaml:3: zzz", "model, data, lora"),
        ("train: {zzz: 1}", "r.yaml:3: train.zzz", "swiftlite explain train"),
        ("data_: {}", "r.yaml:3: data_", "'data'"),
        ("eval: {learning_rat: 1}", "r.yaml:3: eval.learning_rat", "Did you mean 'train.learning_rate'?"),
    ],
)
def test_an_unknown_key_names_where_it_belongs(refuse, text, where, words):
    message = refuse(text)
    assert message.startswith(where + ": unknown key.")
    assert words in message


def test_an_unknown_key_of_a_source(refuse):
    message = refuse("model: a/b\ndata:\n  train:\n    - rows.jsonl\n    - path: x\n      spilt: test\n", bare=True)
    assert message == "r.yaml:6: data.train[1].spilt: unknown key. Did you mean 'data.train[].split'?"


@pytest.mark.parametrize("path", [key.path for key in keys().values() if key.parent and "[]" not in key.path])
def test_every_key_one_level_too_high_is_sent_home(refuse, path):
    """The kind: no key of a section may be left without a hint at the top level."""
    name = path.rpartition(".")[2]
    if name in children("") or name in ALIASES[""]:
        pytest.skip("the name means something else there")
    message = refuse(f"{name}: 1\n")
    assert path in message


@pytest.mark.parametrize("path", [key.path for key in keys().values() if key.parent and "[]" not in key.path])
def test_every_mistyped_key_is_found_again(refuse, path):
    section, _, name = path.partition(".")
    if len(name) < 4:
        pytest.skip("too short to be mistyped safely")
    value = "x" if section == "data" else "1"
    broken = name[:2] + name[3:]  # a letter is missing
    text = {"model": f"model: {{name: a, {broken}: 1}}\ndata: x\n", "data": f"model: a\ndata: {{train: x, {broken}: {value}}}\n"}
    message = refuse(text.get(section, f"model: a\ndata: x\n{section}: {{{broken}: 1}}\n"), bare=True)
    assert f"{section}.{broken}: unknown key" in message
    assert f"'{path}'" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {learning_rate: fast}", "train.learning_rate: expected a number >= 0, got 'fast'."),
        ("train: {learning_rate: \"fast\"}", 'train.learning_rate: expected a number >= 0, got "fast".'),
        ("train: {learning_rate: .inf}", "train.learning_rate: expected a number >= 0, got '.inf'."),
        ("train: {learning_rate: true}", "train.learning_rate: expected a number >= 0, got 'true'."),
        ("train: {learning_rate: [1]}", "train.learning_rate: expected a number >= 0, got a list."),
        ("train: {learning_rate: {a: 1}}", "train.learning_rate: expected a number >= 0, got a section."),
        ("train: {max_steps: 0}", "train.max_steps: expected a whole number > 0, got '0'."),
        ("train: {max_steps: 2.5}", "train.max_steps: expected a whole number > 0, got '2.5'."),
        ("seed: -1", "seed: expected a whole number >= 0, got '-1'."),
        ("lora: {dropout: 1}", "lora.dropout: expected a number >= 0 and < 1, got '1'."),
        ("train: {full_determinism: 1}", "train.full_determinism: expected true or false, got '1'."),
        ("train: {full_determinism: no}", "expected true or false, got 'no'. `no` is a word in YAML 1.2: write false."),
        ("train: {full_determinism: 'true'}", "expected true or false, got 'true'. Remove the quotes."),
        ("train: {precision: bf61}", "got 'bf61'. Did you mean 'bf16'?"),
        ("train: {precision: true}", "expected one of auto, bf16, bf16_pure, fp16, fp32, got 'true'."),
        ("train: {optimizer: on}", "train.optimizer: (our train.optim) expected one of adamw, adamw_8bit, sgd, got 'on'."),
        ("output: true", "output: expected text, got 'true'. Quote it if it is a name."),
        ("log: {report_to: {a: 1}}", "log.report_to: expected a list of texts, got a section."),
        ("train: 5", "train: expected a section, got '5'. Write its keys below it; `swiftlite explain train` lists them."),
        ("train: [a]", "train: expected a section, got a list."),
        ("lora: 3", "lora: expected a section, got '3'."),
    ],
)  # fmt: skip
def test_a_wrong_value_says_what_was_expected(refuse, text, message):
    assert refuse(text).startswith("r.yaml:3: ")
    assert message in refuse(text)


def test_model_is_missing(refuse):
    assert "model: missing" in refuse("data: x\n", bare=True)
    assert "model.name: missing" in refuse("model: {hub: hf}\ndata: x\n", bare=True)
    assert "r.yaml:1: model: missing" in refuse("model:\ndata: x\n", bare=True)
    assert "data.train: missing" in refuse("model: a\n", bare=True)
    assert "data.train[].path: missing" in refuse("model: a\ndata: {train: [{name: x}]}\n", bare=True)
    assert "data.train[].path: missing" in refuse("model: a\ndata: {train: {}}\n", bare=True)


def test_all_mistakes_are_listed_in_the_order_of_their_lines(refuse):
    message = refuse("train:\n  learning_rate: fast\n  optimm: sgd\nlora: {rank: -1}\nseed: 1\nseed: 2\n", "trian.x=1")
    lines = message.splitlines()
    assert lines[0] == "5 mistakes in the recipe:"
    assert [line.split(": ")[0].strip() for line in lines[1:]] == ["r.yaml:4", "r.yaml:5", "r.yaml:6", "r.yaml:8", "command line"]


@pytest.mark.parametrize("spelling", ["1e-5", "1E-5", "1.0e-5", '"1e-5"', "'0.00001'"])
def test_numbers_in_any_spelling(load, spelling):
    value = load(f"train: {{learning_rate: {spelling}}}\n").recipe.train.learning_rate
    assert value == 1e-5
    assert isinstance(value, float)


def test_whole_numbers_may_be_written_as_floats(load):
    steps = load("train: {max_steps: 1e3}\nseed: '7'\n").recipe
    assert (steps.train.max_steps, steps.seed) == (1000, 7)
    assert isinstance(steps.train.max_steps, int)


def test_numbers_in_the_place_of_texts_keep_their_spelling(load):
    recipe = load("log: {run_name: 007, project: 1e-5}\nlora: {modules_to_save: [1.0]}\n").recipe
    assert (recipe.log.run_name, recipe.log.project, recipe.lora.modules_to_save) == ("007", "1e-5", ["1.0"])


def test_null_stands_for_the_default(load):
    loaded = load("log:\n  logging_steps:\n  report_to: null\ntrain:\nlora: {alpha: null}\n")
    assert (loaded.recipe.log.logging_steps, loaded.recipe.log.report_to, loaded.recipe.lora.alpha) == (10, [], 32)


def test_the_recipe_is_frozen(load):
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        load().recipe.train.learning_rate = 1.0
