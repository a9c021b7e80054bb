"""Finding a recipe, saving it, short forms, secrets."""

import copy

import pytest

from swiftlite.recipe import show
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.load import dump_yaml, load_recipe, shipped
from swiftlite.recipe.writing import flow, public

FULL = """
model: {name: ./org/name, add_tokens: [<a>, "no", "a b: c"], config_overrides: {x: null, rope: {factor: 1e-3}}}
data:
  train: [a.jsonl, {path: b.jsonl, split: "on", sample: 3, columns: {prompt: "1"}}]
  eval: {path: c.jsonl, name: held}
  template_kwargs: {enable_thinking: false, note: "é\\n\\t'\\""}
lora: {r: 8, target_modules: [q_proj, "[0-9]*"]}
train: {learning_rate: 1e-5, gradient_accumulation_steps: 4, warmup_steps: 0.1}
eval: {eval_strategy: no}
log: {run_name: "007", project: "true"}
output: runs/x y
"""


ADAPTER = "model: {name: a, adapter: c}\ndata: b\n"


@pytest.mark.parametrize(
    "text",
    [
        FULL,
        "model: a\ndata: b\n",
        "model: a\ndata: b\nlora: true\nexport: [adapter, merged]\n",
        ADAPTER,
        ADAPTER + "lora: {rank: 4}\n",
    ],
)
def test_a_saved_recipe_is_the_same_run(load, text, tmp_path):
    first = load(text, bare=True)
    saved = dump_yaml(first.recipe)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(saved)
    again = load_recipe(str(tmp_path / "run" / "recipe.yaml"))
    assert again.recipe == first.recipe
    assert again.notes == []
    assert dump_yaml(again.recipe) == saved


TEXTS = [
    "",
    "a",
    "no",
    "Off",
    "null",
    "~",
    "~/x",
    "1",
    "1e-5",
    "a: b",
    "a #b",
    "#",
    "*",
    "-",
    "- a",
    "[",
    "{a}",
    "a,b",
    "é",
    "\n",
    "\u2028",
]
TEXTS += ["'", '"', "a'b", " a", "a ", "a:", "package://x/y.gguf", "${X}", "<|im_end|>", "!x", "%", "@x", "`", "?", ">", "|"]


@pytest.mark.parametrize("value", [*TEXTS, 1e-5, 3, True, None, [], {}, [["a", {"b": "c d"}]]])
def test_a_value_on_one_line_reads_back(value):
    from ruamel.yaml import YAML

    from swiftlite.recipe.reading import Faults, parse
    from swiftlite.recipe.validate import plain

    for text, expected in ((f"k: {flow(value)}\n", value), (f"k: [{flow(value)}]\n", [value])):
        assert plain(parse(text, "r", Faults())) == {"k": expected}
        assert YAML(typ="safe", pure=True).load(text) == {"k": expected}


def test_short_forms(load):
    text = "model: a/b@v1\ndata: [x, {path: y}]\nlora: true\nstrategy: none\nexport: merged\n"
    recipe = load(text, bare=True).recipe
    assert (recipe.model.name, [s.path for s in recipe.data.train]) == ("a/b@v1", ["x", "y"])
    assert (recipe.lora.rank, recipe.strategy.name, recipe.export.formats) == (16, "none", ["merged"])
    assert load("lora: false\n").recipe.lora is load("lora: null\n").recipe.lora is None
    assert load("log: {report_to: wandb}\n").recipe.log.report_to == ["wandb"]
    assert load("model: a\ndata: {train: {path: x}, eval: y}\n", bare=True).recipe.data.eval[0].path == "y"


def test_finding_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-run.yaml").write_text("model: a\ndata: x\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("model: a\ndata: x\n")
    assert load_recipe(str(tmp_path / "my-run.yaml")).origins["model.name"] == "my-run.yaml:1"

    def message(name):
        with pytest.raises(RecipeError) as caught:
            load_recipe(name)
        return str(caught.value)

    assert "Did you mean 'my-run.yaml'?" in message("my-rum.yaml")
    assert "Did you mean 'run/recipe.yaml'?" in message("run")
    assert message("nothing/like/it.yaml").startswith("nothing/like/it.yaml: no such file or shipped recipe.")


def test_shipped_names(tmp_path, monkeypatch):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "llama3-8b-lora.yaml").write_text("# Llama 3\nmodel: a\ndata: x\n")
    monkeypatch.setattr("swiftlite.recipe.load.files", lambda package: tmp_path / "pack")
    monkeypatch.chdir(tmp_path)
    assert shipped() == {"llama3-8b-lora": "Llama 3"}
    loaded = load_recipe("llama3-8b-lora")
    assert (loaded.recipe.output, loaded.origins["model.name"]) == ("runs/llama3-8b-lora", "pack/llama3-8b-lora.yaml:2")
    with pytest.raises(RecipeError, match="Did you mean 'llama3-8b-lora'"):
        load_recipe("llama3-8b-lor")
    with pytest.raises(RecipeError, match="write `llama3-8b-lora`"):
        load_recipe("recipes/llama3-8b-lora.yaml")


def test_values_of_the_environment_are_used_but_never_shown_or_saved(load, monkeypatch):
    monkeypatch.setenv("WHO", "secret-org")
    monkeypatch.setenv("STEPS", "7")
    text = (
        "model: ${WHO}/name\ndata: {train: ['${WHO}/a', b], template_kwargs: {k: '${WHO}'}}\n"
        "train: {max_steps: '${STEPS}'}\nexport: ${KIND}\n"
    )
    monkeypatch.setenv("KIND", "merged")
    loaded = load(text, "log.project=x-${WHO}", bare=True)
    recipe = loaded.recipe
    assert (recipe.model.name, recipe.data.train[0].path, recipe.train.max_steps) == ("secret-org/name", "secret-org/a", 7)
    assert (recipe.data.template_kwargs, recipe.log.project, recipe.export.formats) == (
        {"k": "secret-org"},
        "x-secret-org",
        ["merged"],
    )
    saved = dump_yaml(recipe)
    for shown in (saved, show.as_text(loaded), str(show.as_data(loaded)), str(public(copy.deepcopy(recipe)))):
        assert "secret-org" not in shown
        assert "${WHO}/name" in shown
    assert load(saved, bare=True).recipe == recipe


def test_a_variable_that_is_not_set_is_named(refuse, monkeypatch):
    monkeypatch.delenv("NOPE", raising=False)
    assert refuse("output: runs/${NOPE}\n") == "r.yaml:3: output: ${NOPE} is not set in the environment. export NOPE=..."


@pytest.mark.parametrize(
    "text",
    [
        "hub_token: wkey-TESTONLY",
        "model: {name: a, token: hf_TESTONLY123}",
        "log: {wandb_api_key: wkey-TESTONLY}",
        "log: {project: hf_TESTONLY123}",
        "lora: {rank: hf_TESTONLY123}",
        "hf_TESTONLY123: 1",
        "data: {train: x, template_kwargs: {api_key: wkey-TESTONLY}}",
    ],
)
def test_tokens_written_out_are_refused_and_not_repeated(refuse, text):
    message = refuse(text + "\n", bare=True)
    assert "TESTONLY" not in message
    assert "hf_TEST" in text or "environment" in message


def test_special_tokens_of_a_config_are_no_secrets(load):
    text = "model: {name: a, config_overrides: {eos_token: </s>, pad_token_id: 0}}\ndata: x\n"
    assert load(text, bare=True).recipe.model.config_overrides == {"eos_token": "</s>", "pad_token_id": 0}


def test_what_check_prints(load):
    loaded = load("train: {learning_rate: 1e-5}\n", "lora.rank=4")
    lines = {line.split(":")[0]: line for line in show.as_text(loaded).splitlines()}
    assert lines["train.learning_rate"].split() == ["train.learning_rate:", "1e-05", "(r.yaml:3)"]
    assert lines["lora.rank"].endswith("(command line)")
    assert lines["lora.alpha"].endswith("(default: 2 * lora.rank)")
    assert "lora: null  " in show.as_text(load("")) + " "
