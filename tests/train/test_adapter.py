"""Training goes on from an existing adapter, which alone says how it is made."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from swiftlite import api
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.load import load_recipe
from tests.training import losses, model_folder, recipe, token_rows, train

ROWS = token_rows([9, 12, 7, 10])


@pytest.fixture
def first(tmp_path):
    """The adapter of an earlier run: rank 4, alpha 6, on two layers."""
    lora = {"rank": 4, "alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    train_keys = {"max_steps": 8, "learning_rate": 0.05}
    return (
        train(recipe(tmp_path, rows=ROWS, lora=lora, train=train_keys, export=["adapter"], output=str(tmp_path / "first")))
        / "adapter"
    )


def plain_loss(base, adapter):
    """Mean loss of the first row by plain transformers and peft."""
    net = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    net = PeftModel.from_pretrained(net, adapter) if adapter else net
    ids = torch.tensor([ROWS[0]["input_ids"]])
    with torch.no_grad():
        return float(net.eval()(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize(
    "lora", [{}, {"lora": {}}, {"lora": {"rank": 4, "alpha": 6, "dropout": 0.1}}], ids=["no", "empty", "same"]
)
def test_the_first_loss_is_that_of_the_adapted_model(tmp_path, first, lora):
    saving = {"save_strategy": "steps", "save_steps": 2}
    keys = {
        "rows": ROWS,
        "model": {"adapter": str(first)},
        "checkpoint": saving,
        "train": {"max_steps": 2, "optim": "sgd"},
        **lora,
    }
    output = train(recipe(tmp_path, **keys, export=["adapter"]))
    base = model_folder(tmp_path)
    if "dropout" not in lora.get("lora", {}):
        assert losses(output)[0] == pytest.approx(plain_loss(base, first), rel=1e-5)
    assert abs(losses(output)[0] - plain_loss(base, None)) > 0.01
    before, after = (json.loads((f / "adapter_config.json").read_text()) for f in (first, output / "adapter"))
    assert {**before, "lora_dropout": 0} == {**after, "lora_dropout": 0} and after["r"] == 4
    # The recipe that the run saved is the same run: it resumes and exports.
    more = ["train.max_steps=3", "checkpoint.resume=auto", "export.overwrite=true"]
    assert len(losses(train(load_recipe(str(output / "recipe.yaml"), more)))) == 3
    api.export(output, format="merged", output=tmp_path / "merged", device="cpu")


def test_a_recipe_that_contradicts_the_adapter_is_refused(tmp_path, first):
    for key, value in {"rank": 8, "target_modules": ["q_proj"], "use_dora": True}.items():
        loaded = recipe(tmp_path, rows=ROWS, model={"adapter": str(first)}, lora={key: value})
        with pytest.raises(RecipeError, match=f"lora.{key}: .* contradicts the adapter"):
            train(loaded)
