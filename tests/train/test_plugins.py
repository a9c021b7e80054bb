"""Rows of a user's own train, export and resume like the toolkit's; nothing of them runs where a finished run is only used."""

import json
import shutil

import pytest

from swiftlite.infer.locate import locate
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.load import load_recipe
from swiftlite.train import session
from swiftlite.train.console import Console
from tests.training import LORA, losses, recipe, train

PLUGIN = '''
from dataclasses import dataclass, replace

from swiftlite.data.formats import Format
from swiftlite.dist.strategies import FSDP
from swiftlite.export.adapter import EXPORTER
from swiftlite.models.families.family import Family
from swiftlite.objectives.sft import SFT


def parse(row):
    return {"kind": "completion", "prompt": row["question"], "completion": row["answer"]}


@dataclass(frozen=True)
class Half:
    """Half the loss of sft."""

    name: str = "half"

    def weight(self, batch):
        return SFT.weight(batch)

    def loss_sum(self, root, batch):
        return 0.5 * SFT.loss_sum(root, batch)


FORMATS = {"faq": Format("faq", ("question", "answer"), (), parse)}
OBJECTIVES = {"half": Half()}
STRATEGIES = {"wrapped": replace(FSDP, name="wrapped")}
EXPORTERS = {"again": replace(EXPORTER, name="again")}
FAMILIES = {"llama": Family("llama")}
'''
FAQ = [{"question": "what now", "answer": "nothing"}, {"question": "a?", "answer": "b! and more"}]
BUILT_IN = [{"prompt": row["question"], "completion": row["answer"]} for row in FAQ]
KEYS = {"lora": LORA, "train": {"max_steps": 2}, "checkpoint": {"save_strategy": "steps", "save_steps": 1}}


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(PLUGIN)
    return "my.py"


def run(path, plugin, **more):
    keys = {
        **KEYS, "plugins": [plugin], "data": {"format": "faq"}, "train": {"max_steps": 2, "objective": "half"},
        "strategy": "wrapped", "export": ["again"],
    }  # fmt: skip
    return recipe(path, rows=FAQ, **{**keys, **more})


def test_rows_of_the_tables_are_used(tmp_path, plugin, capsys):
    loaded = run(tmp_path, plugin)
    load_recipe("quickstart")  # another recipe in between takes nothing away
    output = session.train(loaded, Console())
    assert "plugin my.py (sha256" in capsys.readouterr().out
    assert session.make_plan(loaded).strategy.name == "wrapped"
    plain = train(recipe(tmp_path, rows=BUILT_IN, **KEYS, output=str(tmp_path / "plain")))
    assert losses(output)[0] == pytest.approx(0.5 * losses(plain)[0])
    assert (output / "again" / "adapter_model.safetensors").exists()
    assert json.loads((output / "environment.json").read_text())["plugins"] == loaded.hashes


def test_a_changed_plugin_is_no_resumed_run(tmp_path, plugin):
    output = train(run(tmp_path, plugin))
    shutil.rmtree(output / "again")
    resume = {"checkpoint": {**KEYS["checkpoint"], "resume": "auto"}}
    more = {"train": {"max_steps": 3, "objective": "half"}, **resume}
    (tmp_path / "my.py").write_text(PLUGIN + "\n# other bytes\n")
    with pytest.raises(RecipeError, match=r"plugins: the checkpoint was made with \{'my.py': '.*Set plugins back"):
        train(run(tmp_path, plugin, **more))
    (tmp_path / "my.py").write_text(PLUGIN)
    assert len(losses(train(run(tmp_path, plugin, **more)))) == 3


def test_who_uses_a_run_does_not_run_its_plugins(tmp_path, plugin):
    output = train(run(tmp_path, plugin))
    (tmp_path / "my.py").write_text("raise RuntimeError")
    place = locate(str(output / "checkpoints" / "step-000002"))
    assert place.recipe.data.format == "faq" and any("my.py" in note for note in place.notes)
    with pytest.raises(RecipeError, match=r"my.py:1: the plugin fails: RuntimeError"):
        load_recipe(str(output / "recipe.yaml"))
