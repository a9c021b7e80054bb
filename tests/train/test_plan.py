"""What is refused before a model is built: metrics that no evaluation gives, ids without a row, configs that cannot be read."""

import json

import pytest

from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.train.plan import make_plan
from tests.fixtures import tok
from tests.training import CHAT, losses, model_folder, recipe, train, write_rows


def test_a_metric_that_no_evaluation_gives(tmp_path):
    sets = [{"path": str(write_rows(tmp_path / f"{n}.jsonl", CHAT[:1])), "name": n} for n in ("one", "two")]
    for metric in ("eval_loss", "eval_loss/two"):
        make_plan(recipe(tmp_path, data={"eval": sets}, checkpoint={"save_strategy": "epoch", "metric_for_best_model": metric}))
    with pytest.raises(RecipeError, match=r"eval_loss/twp.*Did you mean 'eval_loss/two'"):
        make_plan(
            recipe(tmp_path, data={"eval": sets}, checkpoint={"save_strategy": "epoch", "metric_for_best_model": "eval_loss/twp"})
        )


def test_a_token_without_an_embedding_row_is_named_and_padding_is_not(tmp_path):
    model_folder(tmp_path, "LLAMA", vocab_size=256)  # the tokenizer has 261 ids; 'z' and the like stay below 256
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]} for text in ("a", "a long one")
    ]
    assert losses(
        train(recipe(tmp_path, rows=rows, train={"global_batch_size": 2, "per_device_train_batch_size": 2, "max_steps": 1}))
    )
    odd = next(t for t, i in tok().get_vocab().items() if i == 260)
    rows = [{"input_ids": [5, 6, 260, 7]}]
    with pytest.raises(ModelError, match="260") as error:
        make_plan(recipe(tmp_path, rows=rows, output=str(tmp_path / "o2")))
    assert odd in str(error.value) and "model.add_tokens" in str(error.value) and "rows.jsonl:1" in str(error.value)


@pytest.mark.parametrize("harm", [{"hidden_size": 33}, {"num_hidden_layers": "many"}, {"model_type": "no_such_type"}])
def test_a_config_that_cannot_be_read_is_one_line(tmp_path, harm):
    file = model_folder(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | harm))
    with pytest.raises(ModelError) as error:
        train(recipe(tmp_path))
    assert "config.json" in str(error.value) or "no_such_type" in str(error.value)
    assert error.value.exit_code == 4 and "\n" not in str(error.value)


def test_weights_are_for_training_rows(tmp_path):
    rows = write_rows(tmp_path / "more.jsonl", CHAT[:2])
    plan = make_plan(recipe(tmp_path, data={"train": [{"path": str(rows), "weight": 2.5}]}))
    assert len(plan.train.samples) in (4, 5, 6) and plan.reports["train"]["samples"] == 2
    assert f"{len(plan.train.samples)} rows" in plan.lines()[1]
    with pytest.raises(RecipeError, match="every row of an evaluation set counts once") as error:
        make_plan(recipe(tmp_path, data={"eval": [{"path": str(rows), "weight": 2}]}))
    assert error.value.exit_code == 2


def test_activation_offload_without_checkpointing_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"train\.activation_offload: .*gradient_checkpointing is none.*full"):
        make_plan(recipe(tmp_path, train={"activation_offload": True}))
