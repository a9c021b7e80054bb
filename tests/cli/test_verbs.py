"""Verbs hand their arguments on; errors end in one place with one message and the right code."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swiftlite import api as real_api
from swiftlite.cli.main import VERBS, run
from swiftlite.infer.scores import as_text
from swiftlite.recipe.errors import DataError, ModelError, RecipeError, SwiftliteError
from tests.cli.stand_in import RESULTS, stand_in_api

DEBUGGABLE = ["train", "check", "export", "eval", "chat", "generate", "download", "selftest"]


@pytest.fixture
def api(monkeypatch):
    return stand_in_api(monkeypatch)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("model: a\ndata: b\nlora: {r: 4}\n")
    return "r.yaml"


def test_train_takes_overrides_and_flags(api, recipe):
    arguments = [
        "train",
        recipe,
        "seed=3",
        "output=x",
        "--strategy",
        "none",
        "--resume",
        "auto",
        "--output",
        "runs/é: y",
        "train.max_steps=0x",
    ]
    assert run(arguments) == 2
    assert run(arguments[:-1]) == 0
    ((name, (loaded,), _),) = api.calls
    assert name == "train"
    assert (loaded.recipe.seed, loaded.recipe.strategy.name, loaded.recipe.output) == (3, "none", "runs/é: y")
    assert (loaded.recipe.checkpoint.resume, loaded.origins["output"]) == ("auto", "command line")


def test_check_prints_the_effective_recipe_with_origins(api, recipe, capsys):
    assert run(["check", recipe, "seed=3", "--dump", "d.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "lora.rank: 4" in out
    assert "(r.yaml:3)" in out
    assert "(command line)" in out
    assert "note: r.yaml:3: lora.r is lora.rank here." in out
    (_, _, kwargs) = api.calls[0]
    assert kwargs == {"dump": Path("d.jsonl"), "nproc": None, "quiet": False}


def test_check_for_machines(api, recipe, capsys):
    assert run(["check", recipe, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["recipe"]["lora"]["rank"], found["origins"]["lora.rank"], found["plan"]) == (4, "r.yaml:3", {"steps": 3})
    assert found["notes"] == ["r.yaml:3: lora.r is lora.rank here."]


def test_other_verbs_hand_on(api, capsys):
    flags = ["--dtype", "bf16", "--onto", "original", "--output", "o", "--overwrite"]
    assert run(["export", "runs/x", "--format", "merged", *flags]) == 0
    assert run(["download", "a/b", "--revision", "r"]) == 0
    assert capsys.readouterr().out == "/cache/x\n"
    calls = {name: (args, kwargs) for name, args, kwargs in api.calls}
    assert calls["export"] == (
        ("runs/x",),
        {"format": "merged", "dtype": "bf16", "onto": "original", "output": Path("o"), "overwrite": True, "device": "auto"},
    )
    assert calls["download"] == (("a/b",), {"hub": "hf", "revision": "r"})


LOADING = {"base": None, "device": "auto", "dtype": "auto", "hub": "hf", "trust_remote_code": False}
LOADING_FLAGS = ["--base", "b", "--device", "cpu", "--dtype", "bf16", "--hub", "modelscope", "--trust-remote-code"]
DRAWING = {"system": None, "temperature": 0.0, "top_p": 1.0, "seed": None}
DRAWING_FLAGS = ["--system", "s", "--temperature", "0.5", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "7"]


@pytest.mark.parametrize(
    ("arguments", "given", "defaults", "flags"),
    [
        (
            ["eval", "x", "--data", "d"],
            ("x", "d"),
            LOADING
            | {"format": None, "train_on": None, "max_length": None, "generate": True, "batch_size": 8, "max_new_tokens": 256},
            [*LOADING_FLAGS, "--format", "text", "--train-on", "all", "--max-length", "9", "--no-generate", "--batch-size", "2"],
        ),
        (
            ["generate", "x", "--prompts", "p"],
            ("x", Path("p")),
            LOADING | DRAWING | {"output": "-", "batch_size": 8, "max_new_tokens": 256},
            [*LOADING_FLAGS, *DRAWING_FLAGS, "--output", "o", "--batch-size", "2"],
        ),
        (
            ["chat", "x"],
            ("x",),
            LOADING | DRAWING | {"raw": False, "trace": False, "max_new_tokens": 512},
            [*LOADING_FLAGS, *DRAWING_FLAGS, "--raw", "--trace"],
        ),
    ],
    ids=["eval", "generate", "chat"],
)
def test_each_flag_of_inference_reaches_the_function_it_is_for(api, arguments, given, defaults, flags):
    assert run(arguments) == 0
    assert run([*arguments, *flags]) == 0
    (name, args, plain), (_, _, flagged) = api.calls
    assert (args, plain) == (given, defaults)
    assert set(inspect.signature(getattr(real_api, name)).parameters) >= set(plain), "names that the function has"
    unchanged = {key for key in plain if plain[key] == flagged[key]}
    assert unchanged <= {"max_new_tokens"}, "each flag changes one"


def test_scores_for_people_and_machines(api, capsys):
    assert run(["eval", "runs/x", "--data", "d.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == 0.5
    assert run(["eval", "runs/x", "--data", "d.jsonl"]) == 0
    assert capsys.readouterr().out == "loss         0.5000 (perplexity 1.649) over 9 trained tokens of 2 rows\n"
    example = {"source": "d:1", "expected": "a\nb", "answer": "c" * 500, "match": False}
    answers = {"dropped": {"too long": 3}, "exact_match": 0.5, "matched": 1, "answered": 2, "examples": [example]}
    lines = as_text(RESULTS["evaluate"] | answers).splitlines()
    assert lines[1:5] == [
        "dropped      3 too long",
        "exact match  0.5000: 1 of 2 answers",
        "--- d:1: wrong",
        "expected     a\\nb",
    ]
    assert lines[5].endswith("c [... 100 more characters]")


@pytest.mark.parametrize(
    ("error", "code"),
    [(RecipeError("x"), 2), (DataError("x"), 3), (ModelError("x"), 4), (SwiftliteError("x"), 1), (KeyboardInterrupt(), 130)],
)
def test_errors_of_users_are_one_message(api, recipe, capsys, error, code):
    api.fail = error
    assert run(["train", recipe]) == code
    message = capsys.readouterr().err
    assert message == ("interrupted\n" if code == 130 else "error: x\n")


def test_debug_shows_the_traceback_and_so_do_faults_of_ours(api, recipe, capsys):
    api.fail = DataError("x")
    assert run(["train", recipe, "--debug"]) == 3
    message = capsys.readouterr().err
    assert "Traceback" in message
    assert message.endswith("error: x\n")
    api.fail = ZeroDivisionError("ours")
    assert run(["train", recipe]) == 1
    assert "ZeroDivisionError: ours" in capsys.readouterr().err


@pytest.mark.parametrize("verb", DEBUGGABLE)
def test_every_working_verb_takes_debug(verb, capsys):
    assert run([verb, "--help"]) == 0
    assert "--debug" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["train"],
        ["train", "r.yaml", "--nope"],
        ["export", "x"],
        ["eval", "x", "--data"],
        ["chat", "x", "--max-new-tokens", "0"],
    ],
)
def test_mistakes_on_the_command_line_exit_2(arguments, capsys):
    assert run(arguments) == 2
    message = capsys.readouterr().err
    assert "Error:" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, capsys):
    assert run([verb, "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 4


def test_explain_and_recipes(capsys):
    assert run(["explain", "lora_r"]) == 0
    assert "lora.rank" in capsys.readouterr().out
    assert run(["explain", "learningrate"]) == 2
    assert "train.learning_rate" in capsys.readouterr().err
    assert run(["explain", "lora", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["key"] == "lora"
    assert run(["recipes", "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_env_tells_versions_and_hardware_and_nothing_private(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_TESTONLY123")
    assert run(["env", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert found["packages"]["torch"]
    assert found["cpu"]["cores"] >= 1
    assert run(["env"]) == 0
    text = capsys.readouterr().out
    assert f"torch {found['packages']['torch']}" in text
    assert "gpu:" in text
    for private in (os.uname().nodename, str(Path.home()), "TESTONLY"):
        assert private not in out + text


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m swiftlite explain | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("model:")
    assert done.stderr == ""


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "swiftlite", "nope"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
