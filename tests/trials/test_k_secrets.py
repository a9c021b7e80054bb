"""Kind K, the part a recipe decides: tokens are masked everywhere."""

import pytest

from swiftlite.cli.main import run
from swiftlite.recipe.load import dump_yaml, load_recipe
from tests.cli.stand_in import stand_in_api

SECRETS = ("hf_TESTONLY123", "wkey-TESTONLY")


@pytest.mark.parametrize("extra", [[], ["--json"], ["--debug"]])
def test_K04_tokens_written_into_a_recipe_are_refused_unseen(tmp_path, capsys, extra):
    file = tmp_path / "r.yaml"
    file.write_text("model: {name: a, token: hf_TESTONLY123}\ndata: b\nlog: {report_to: wandb, wandb_api_key: wkey-TESTONLY}\n")
    assert run(["check", str(file), "log.api_key=wkey-TESTONLY", *extra]) == 2
    out, err = capsys.readouterr()
    assert "environment" in err
    assert all(secret not in out + err for secret in SECRETS)


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_K04_tokens_from_the_environment_are_used_but_masked(tmp_path, capsys, monkeypatch, extra):
    stand_in_api(monkeypatch)
    monkeypatch.setenv("MY_TOKEN", "hf_TESTONLY123")
    monkeypatch.setenv("MY_KEY", "wkey-TESTONLY")
    file = tmp_path / "r.yaml"
    file.write_text("model: {name: a, config_overrides: {token: '${MY_TOKEN}'}}\ndata: b\nlog: {project: '${MY_KEY}'}\n")
    assert run(["check", str(file), *extra]) == 0
    loaded = load_recipe(str(file))
    assert loaded.recipe.model.config_overrides == {"token": "hf_TESTONLY123"}
    out, err = capsys.readouterr()
    saved = dump_yaml(loaded.recipe)
    assert "${MY_TOKEN}" in out
    assert "${MY_TOKEN}" in saved
    assert all(secret not in out + err + saved for secret in SECRETS)
