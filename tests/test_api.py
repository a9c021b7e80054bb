"""The whole story from Python on a tiny model: check, train, export again, generate, evaluate, chat."""

import inspect
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from swiftlite import api
from swiftlite.recipe.errors import DataError, ModelError, RecipeError
from tests.training import CHAT, LORA, metrics, recipe, write_rows


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Evaluates on the rows it trains on, twice, and saves there."""
    folder = tmp_path_factory.mktemp("story")
    rows = write_rows(folder / "eval.jsonl", CHAT)
    return recipe(
        folder,
        lora=LORA,
        data={"eval": str(rows)},
        train={"max_steps": 8},
        eval={"eval_strategy": "steps", "eval_steps": 4},
        checkpoint={"save_strategy": "steps", "save_steps": 4},
        export=["adapter"],
    )


@pytest.fixture(scope="module")
def run(loaded) -> Path:
    return api.train(loaded)


@pytest.fixture(scope="module")
def rows(loaded) -> str:
    return loaded.recipe.data.eval[0].path


def test_importing_is_light():
    code = "import json, sys\nimport swiftlite.api\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert loaded.isdisjoint({"torch", "transformers", "peft", "numpy", "rich", "typer"})


def test_training_needs_no_inference():
    folder = Path(inspect.getfile(api)).parent
    assert [f for f in (folder / "train").glob("*.py") if "swiftlite.infer" in f.read_text()] == []


@pytest.mark.parametrize("name", api.__all__)
def test_functions_say_what_they_take(name):
    function = getattr(api, name)
    signature, text = inspect.signature(function), str(inspect.getdoc(function))
    assert "Raises:" in text
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        assert parameter.annotation is not inspect.Parameter.empty
        assert f"{parameter.name}" in text, f"{name}: {parameter.name} is not explained"


def test_check_tells_all_and_dumps_rows(loaded, tmp_path, capfd):
    found = api.check(loaded, dump=tmp_path / "rows.jsonl")
    assert json.loads(json.dumps(found)) == found
    assert (found["rows"], found["steps"], found["steps_per_epoch"]) == (4, 8, 4)
    assert found["settled"]["model.attn_implementation"] == {"value": "sdpa", "origin": "family: llama"}
    assert found["settled"]["train.gradient_checkpointing"]["value"] == "none"
    assert "train.device" not in found["settled"], "the recipe says it"
    assert found["memory"]["total_gib"] > found["memory"]["frozen_gib"] > 0
    assert found["coverage"]["adapted"] == 14
    out, err = capfd.readouterr()
    assert err == ""
    for said in (
        "strategy.name: none ", "train rows ", "eval rows ", "{+yo<|im_end|>+}", "trainable ", "steps     8 (4 an epoch)",
        "rate      constant", "rhythm    log every 1, evaluate every 4, save every 4 steps", "memory    about",
    ):  # fmt: skip
        assert out.count(said) == 1, said
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for number, line in enumerate(lines, 1):
        assert line.keys() == {"input_ids", "labels", "position_ids", "source"}
        assert len(line["input_ids"]) == len(line["labels"]) == len(line["position_ids"])
        assert line["source"] == [f"{loaded.recipe.data.train[0].path}:{number}"]
        assert set(line["labels"]) - {-100} <= set(line["input_ids"])


def test_a_quiet_check_prints_nothing_and_writes_no_run(loaded, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    api.check(loaded, quiet=True)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_train_leaves_a_run_and_check_warns_of_it(run, loaded):
    assert run == Path(loaded.recipe.output)
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step-000004", "step-000008"}
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert "memory    about" in (run / "train.log").read_text()
    (note,) = api.check(loaded, quiet=True)["notes"]
    assert note.startswith(f"training would stop here: {run}: it holds a run already, with checkpoints up to step 8.")
    with pytest.raises(RecipeError, match="--resume auto"):
        api.train(loaded)


def test_check_refuses_what_an_export_would_refuse(loaded):
    section = loaded.recipe.export.model_copy(update={"formats": ["merged"], "max_shard_size": "5 boxes"})
    with pytest.raises(RecipeError, match=r"export\.max_shard_size: '5 boxes'"):
        api.check(replace(loaded, recipe=loaded.recipe.model_copy(update={"export": section})), quiet=True)


def test_export_again_from_a_checkpoint(run, tmp_path):
    folder = api.export(run / "checkpoints" / "step-000004", format="merged", dtype="bf16", output=tmp_path / "else")
    assert folder == tmp_path / "else" / "merged"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}
    report = json.loads((tmp_path / "else" / "export_report.json").read_text())
    assert {name: part["verdict"] for name, part in report.items()} == {"merged": "verified"}
    assert not (run / "merged").exists()
    with pytest.raises(RecipeError, match="not empty"):
        api.export(run, format="merged", output=tmp_path / "else")
    assert api.export(run, format="merged", output=tmp_path / "else", overwrite=True) == folder


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"format": "merge"}, "Did you mean 'merged'"),
        ({"format": "merged", "dtype": "bf61"}, "export.dtype"),
        ({"format": "merged", "onto": "base"}, "export.onto"),
        ({"format": "merged", "onto": "original"}, "this base is not packed"),
        ({"format": "merged", "device": "gpu"}, "train.device"),
    ],
)
def test_export_refuses_what_it_does_not_know(run, given, words):
    with pytest.raises(RecipeError, match=words):
        api.export(run, **given)


def test_export_of_no_run(tmp_path):
    with pytest.raises(ModelError, match="no run is in this folder"):
        api.export(tmp_path, format="merged")


def test_evaluate_gives_the_loss_that_training_reports(run, rows, capsys):
    scores = api.evaluate(run, rows, max_new_tokens=8, examples=1)
    trained = [row["eval_loss"] for row in metrics(run) if "eval_loss" in row]
    assert scores["loss"] == pytest.approx(trained[-1], rel=1e-5)
    assert (scores["rows"], scores["answered"], len(scores["examples"])) == (4, 4, 1)
    assert capsys.readouterr().err.startswith(f"adapter {run}/adapter on base ")
    alone = api.evaluate(run / "checkpoints" / "step-000004", rows, generate=False, batch_size=1)
    assert alone["loss"] == pytest.approx(trained[0], rel=1e-5)
    assert "exact_match" not in alone


def test_generate_from_lists_and_files(run, tmp_path, capsys):
    messages = [{"role": "user", "content": "hi"}]
    said = api.generate(run, ["hi", messages], max_new_tokens=6)
    assert len(said) == 2
    assert said[0] == said[1], "a text is a user's message"
    out, err = capsys.readouterr()
    assert (out, err.count("adapter /")) == ("", 1)
    file = write_rows(tmp_path / "p.jsonl", [{"messages": messages, "id": 7}, {"prompt": "abc"}])
    from_file = api.generate(run, file, max_new_tokens=6, output=tmp_path / "a.jsonl")
    assert from_file == [said[0], *api.generate(run, ["abc"], raw=True, max_new_tokens=6)]
    written = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [(row["answer"], row.get("id")) for row in written] == [(from_file[0], 7), (from_file[1], None)]
    capsys.readouterr()
    api.generate(run, ["hi", messages], max_new_tokens=6, output="-")
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["answer"] for row in printed] == said
    assert [row.keys() for row in printed] == [{"prompt", "answer", "finish"}, {"messages", "answer", "finish"}]
    drawn = [api.generate(run, ["hi"], max_new_tokens=6, temperature=1.0, seed=3) for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_a_base_can_be_named(run, loaded, tmp_path):
    adapter = tmp_path / "lonely"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_bytes((run / "adapter" / name).read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(ModelError, match="--base"):
        api.generate(adapter, ["hi"])
    said = api.generate(adapter, ["hi"], base=loaded.recipe.model.name, max_new_tokens=6, dtype="fp32")
    assert said == api.generate(run, ["hi"], max_new_tokens=6)


def test_chat_answers_standard_input(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    api.chat(run, max_new_tokens=6, trace=True)
    out, err = capsys.readouterr()
    assert out.startswith("prompt ids: [")
    assert api.generate(run, ["hi"], max_new_tokens=6)[0] in out
    assert err.count("adapter /") == 1


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda rows: api.evaluate("gone", rows, train_on="assistent"), RecipeError, "Did you mean 'assistant'"),
        (lambda rows: api.evaluate("gone", rows, format="massages"), RecipeError, "Did you mean 'messages'"),
        (lambda rows: api.evaluate("gone", rows, batch_size=0), RecipeError, "batch_size"),
        (lambda rows: api.evaluate("gone", f"{rows}.gz"), DataError, "no such file"),
        (lambda rows: api.generate("gone", f"{rows}.gz"), DataError, "no such file"),
        (lambda rows: api.generate("gone", ["a"], top_p=0), RecipeError, "top_p"),
        (lambda rows: api.generate("gone", ["a"], batch_size=0), RecipeError, "batch_size"),
        (lambda rows: api.generate("gone", ["a"], dtype="f8"), RecipeError, "dtype"),
        (lambda rows: api.chat("gone", hub="hugging"), RecipeError, "hub"),
        (lambda rows: api.download("gone", hub="hugging"), RecipeError, "hub"),
        (lambda rows: api.generate("./gone", ["a"]), ModelError, "does not exist"),
    ],
)
def test_mistakes_are_told_before_a_model_is_looked_for(rows, call, kind, words):
    with pytest.raises(kind, match=words):
        call(rows)
