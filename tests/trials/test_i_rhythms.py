"""Kind I, the part a recipe decides: keep-best with rhythms that do not fit."""

import sys
import time

import pytest

from swiftlite.cli.main import run


@pytest.mark.parametrize("verb", ["train", "check"])
def test_I10_keep_best_with_rhythms_that_do_not_fit(tmp_path, capsys, verb):
    (tmp_path / "r.yaml").write_text(
        "model: no/such\ndata: {train: x, eval: y}\neval: {eval_strategy: steps, eval_steps: 50}\n"
        "checkpoint: {metric_for_best_model: eval_loss, save_strategy: steps, save_steps: 30}\n"
    )
    begin, before = time.process_time(), set(sys.modules)
    assert run([verb, str(tmp_path / "r.yaml")]) == 2
    assert time.process_time() - begin < 5
    assert "swiftlite.api" in before or "swiftlite.api" not in sys.modules  # no model was looked for
    message = capsys.readouterr().err
    for words in ("eval.eval_steps: 50", "checkpoint.save_steps: 30"):
        assert words in message


def test_I10_keep_best_without_an_evaluation_set(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("model: no/such\ndata: x\ncheckpoint: {metric_for_best_model: eval_loss}\n")
    assert run(["train", str(tmp_path / "r.yaml")]) == 2
    message = capsys.readouterr().err
    assert "checkpoint.metric_for_best_model" in message
    assert "data.eval" in message


@pytest.mark.parametrize(
    ("every", "save", "fits"),
    [(50, 50, True), (50, 100, True), (50, 25, True), (50, 30, False), (0.1, 0.2, True), (0.1, 0.25, False)],
)
def test_I10_rhythms(tmp_path, every, save, fits):
    from swiftlite.recipe.errors import RecipeError
    from swiftlite.recipe.load import load_recipe

    file = tmp_path / "r.yaml"
    file.write_text(f"model: a\ndata: {{train: x, eval: y}}\neval: {{eval_steps: {every}}}\ncheckpoint: {{save_steps: {save}}}\n")
    if fits:
        assert load_recipe(str(file)).recipe.eval.eval_strategy == "steps"
    else:
        with pytest.raises(RecipeError, match=r"checkpoint.save_steps: .* does not fit eval.eval_steps"):
            load_recipe(str(file))
