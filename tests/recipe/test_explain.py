"""Help for every key; the JSON Schema."""

import json

import pytest

from swiftlite.recipe import explain, json_schema
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.keys import keys


@pytest.mark.parametrize("path", list(keys()))
def test_every_key_is_documented_and_found(path):
    key = keys()[path]
    assert len(key.help) > 8
    assert key.help.endswith(".")
    assert explain.find(path)[0] == key
    assert key.help in explain.as_text(path)
    if "data.eval[]" not in path:
        assert path in explain.as_text()


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("train.learning_rate", ["a number >= 0", "also understood: lr"]),
        ("learning_rate", ["train.learning_rate"]),
        ("lora_r", ["lora.rank", "default:  16"]),
        ("bf16", ["train.precision"]),
        ("lora.r", ["lora.rank"]),
        ("lora", ["lora.rank", "lora.use_dora"]),
        ("warm", ["train.warmup_steps"]),
        ("strategy.name", ["fsdp", "FSDP2"]),
        ("data.format", ["auto", "sharegpt"]),
        ("eval_strategy", ["one of no, steps, epoch"]),
        ("clip", ["train.max_grad_norm"]),
    ],
)
def test_explain(query, words):
    assert all(word in explain.as_text(query) for word in words)


def test_explain_names_the_nearest():
    with pytest.raises(RecipeError, match=r"Did you mean 'train\.learning_rate'"):
        explain.as_text("learningrate")
    with pytest.raises(RecipeError, match="comes with the model"):
        explain.as_text("tokenizer")
    with pytest.raises(RecipeError, match="lists all"):
        explain.as_text("qqqqqq")


def test_explain_for_machines():
    rows = json.loads(json.dumps(explain.as_data()))
    assert len(rows) == len(keys())
    assert next(row for row in rows if row["key"] == "lora.rank")["also"] == ["r", "lora_r", "lora_rank", "dim"]


def test_the_json_schema_is_fresh():
    assert json_schema.FILE.read_text("utf-8") == json_schema.as_text(), (
        "swiftlite explain --schema > swiftlite/recipe/recipe.schema.json"
    )


def test_the_json_schema_takes_short_forms():
    schema = json_schema.schema()
    assert schema["additionalProperties"] is False
    for name in ("model", "data", "strategy", "export"):
        assert {"type": "string"} in schema["properties"][name]["anyOf"]
    assert {"type": "boolean"} in schema["properties"]["lora"]["anyOf"]
    assert {"type": "string"} in schema["$defs"]["LogSection"]["properties"]["report_to"]["anyOf"]
    assert all(field.get("description") for d in schema["$defs"].values() for field in d["properties"].values())
