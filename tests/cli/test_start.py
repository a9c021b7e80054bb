"""The command line starts fast and loads nothing heavy before it is needed."""

import json
import resource
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "peft", "datasets", "numpy"}


def loaded_by(*arguments: str, cwd=None) -> tuple[int, set[str], str]:
    """Exit code, top-level modules and stderr of one command in a fresh interpreter."""
    code = (
        "import json, sys\nfrom swiftlite.cli.main import run\n"
        f"code = run({list(arguments)!r})\nprint('\\n' + json.dumps([code, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=cwd)
    exit_code, modules = json.loads(done.stdout.splitlines()[-1])
    return exit_code, {name.split(".")[0] for name in modules}, done.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["check", "--help"], ["selftest", "--help"], ["--version"]]
)
def test_help_loads_neither_torch_nor_the_recipe(arguments):
    code, modules, _ = loaded_by(*arguments)
    assert code == 0
    assert modules & {*HEAVY, "ruamel", "rich", "yaml"} == set()
    if arguments == ["--help"]:
        assert "pydantic" not in modules  # typer itself converts arguments by it


@pytest.mark.parametrize("verb", ["train", "check"])
def test_a_mistyped_key_loads_no_torch(verb, tmp_path):
    (tmp_path / "r.yaml").write_text("model: a\ndata: b\ntrain: {learning_rat: 1}\n")
    code, modules, message = loaded_by(verb, "r.yaml", cwd=tmp_path)
    assert code == 2
    assert modules & HEAVY == set()
    assert message == "error: r.yaml:3: train.learning_rat: unknown key. Did you mean 'train.learning_rate'?\n"


@pytest.mark.parametrize("arguments", [["explain"], ["explain", "lora", "--json"], ["explain", "--schema"], ["recipes"]])
def test_verbs_about_recipes_load_no_torch(arguments):
    code, modules, _ = loaded_by(*arguments)
    assert code == 0
    assert modules & HEAVY == set()


def seconds(*command: str, cwd=None) -> float:
    """Processor time of a command, best of 3: what it takes on an idle machine, also where other tests run beside it."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "swiftlite", *command], capture_output=True, cwd=cwd)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_within_half_a_second():
    assert seconds("--help") < 0.5


def test_a_mistyped_key_within_a_second(tmp_path):
    (tmp_path / "r.yaml").write_text("model: a\ndata: b\ntrain: {learning_rat: 1}\n")
    assert seconds("train", "r.yaml", cwd=tmp_path) < 1
