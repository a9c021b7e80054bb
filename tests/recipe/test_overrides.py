"""The command line beats the file for every value."""

import pytest


@pytest.mark.parametrize(
    ("text", "given", "path", "value"),
    [
        ("train: {full_determinism: true}", "train.full_determinism=false", "train.full_determinism", False),
        ("train: {warmup_steps: 10}", "train.warmup_steps=0", "train.warmup_steps", 0),
        ("lora: {dropout: 0.1}", "lora.dropout=0", "lora.dropout", 0.0),
        ("lora: {modules_to_save: [a]}", "lora.modules_to_save=[]", "lora.modules_to_save", []),
        ("train: {max_steps: 3}", "train.max_steps=null", "train.max_steps", None),
        ("train: {weight_decay: 3}", "train.weight_decay=null", "train.weight_decay", 0.0),
        ("lora: {rank: 3}", "lora=null", "lora", None),
        ("lora: {rank: 3}", "lora=false", "lora", None),
        ("lora: null", "lora=true", "lora.rank", 16),
        ("lora: {rank: 3}", "lora=true", "lora.rank", 3),
        ("lora: null", "lora.rank=3", "lora.rank", 3),
        ("lora: {rank: 3}", "lora.lora_r=4", "lora.rank", 4),
        ("lora: {rank: 3, dropout: 0.1}", "lora={rank: 4}", "lora.rank", 4),
        ("lora: {lora_r: 3}", "lora.rank=4", "lora.rank", 4),
        ("strategy: none", "strategy=fsdp", "strategy.name", "fsdp"),
        ("strategy: {reduce_dtype: bf16}", "strategy=fsdp", "strategy.reduce_dtype", "bf16"),
        ("export: [merged]", "export=[]", "export.formats", []),
        ("lora: true\nexport: [merged]", "export=adapter", "export.formats", ["adapter"]),
        ("seed: 3", "seed=0", "seed", 0),
        ("", "model=c/d", "model.name", "c/d"),
        ("", "model=package://p/f.gguf", "model.name", "package://p/f.gguf"),
        ("", "output=a=b", "output", "a=b"),
        ("", "output='#x'", "output", "#x"),
        ("", "log.run_name=\"\"", "log.run_name", ""),
        ("", "train.learning_rate=1e-5", "train.learning_rate", 1e-5),
    ],
)  # fmt: skip
def test_override(load, text, given, path, value):
    loaded = load(text, given)
    found = loaded.recipe
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value) or isinstance(found, float)
    if value != 16 and "reduce" not in path and loaded.origins[path] != "r.yaml:3":
        assert loaded.origins[path] == "command line"


def test_a_section_is_laid_over_key_by_key_and_a_value_is_replaced(load):
    loaded = load("lora: {rank: 3, dropout: 0.1}\n", "lora={rank: 4}")
    assert (loaded.recipe.lora.rank, loaded.recipe.lora.dropout) == (4, 0.1)
    assert (loaded.origins["lora.rank"], loaded.origins["lora.dropout"]) == ("command line", "r.yaml:3")
    text = "model: a\ndata: {train: x, columns: {prompt: p, completion: c}}\n"
    assert load(text, "data.columns={prompt: q}", bare=True).recipe.data.columns == {"prompt": "q"}
    assert load(text, "data.columns.prompt=q", bare=True).recipe.data.columns == {"prompt": "q", "completion": "c"}


def test_data_of_the_command_line(load):
    assert [s.path for s in load("", "data=y").recipe.data.train] == ["y"]
    assert [s.path for s in load("", "data.train=[y, {path: z, sample: 3}]").recipe.data.train] == ["y", "z"]
    loaded = load("", "data.eval=y")
    assert (loaded.recipe.data.train[0].path, loaded.recipe.data.eval[0].path) == ("rows.jsonl", "y")
    assert load("model: a\ndata: {train: x, eval: y}\n", "data.eval=null", bare=True).recipe.data.eval == []


def test_the_last_one_wins(load):
    assert load("", "seed=1", "seed=2").recipe.seed == 2


def test_what_an_override_leads_through_must_be_a_section(refuse):
    assert refuse("train: 5\n", "train.lr=1").startswith("r.yaml:3: train: not a section")
    message = refuse("", "data.train.0.path=x", "data.train=y")
    assert message.startswith("command line: data.train: a list; one source of it cannot be set. Give it whole: data.train=[")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("train.learning_rat=1", "command line: train.learning_rat: unknown key. Did you mean 'train.learning_rate'?"),
        ("learning_rate=1", "write train.learning_rate"),
        ("train.learning_rate=fast", "command line: train.learning_rate: expected a number >= 0, got 'fast'"),
        ("learning_rate", "'learning_rate' is not an override. Write key=value"),
        ("=3", "is not an override"),
        ("train..x=3", "is not an override"),
        ("seed=", "seed: no value. Write seed=null"),
        ("output=[a", "output: not a YAML value: [a"),
        ("nope.x=1", "nope: unknown key"),
        ("strategy=fdsp", "command line: strategy.name: unknown name 'fdsp'. Did you mean 'fsdp'?"),
    ],
)
def test_a_bad_override_is_told(refuse, given, words):
    assert words in refuse("", given)
