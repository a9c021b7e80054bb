"""`swiftlite train` starts processes, or is one of those that were started."""

import os
import subprocess
import sys

import pytest

from swiftlite.cli.main import run
from swiftlite.dist import checkpoint, launch
from swiftlite.recipe.errors import SwiftliteError
from tests.cli.stand_in import stand_in_api


@pytest.fixture(autouse=True)
def api(monkeypatch, tmp_path):
    """The stand-in, and r.yaml for a run in out/."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", launch.FOLDER, launch.STARTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("model: a\ndata: b\noutput: out\ntrain: {device: cpu}\n")
    return stand_in_api(monkeypatch)


@pytest.fixture
def launched(monkeypatch):
    """Collects what is launched instead."""
    calls = []
    monkeypatch.setattr(launch, "launch", lambda command, **options: calls.append((command, options)))
    return calls


def test_one_process_runs_here(api, launched):
    assert run(["train", "r.yaml", "--nproc", "1"]) == run(["train", "r.yaml"]) == 0
    assert ([call[0] for call in api.calls], launched) == (["train", "train"], [])


def test_several_get_the_same_command(api, launched):
    arguments = ["r.yaml", "seed=3", "--strategy", "ddp", "--output", "o u", "--nproc", "2", "--max-restarts", "3", "--debug"]
    assert run(["train", *arguments]) == 0
    ((command, options),) = launched
    assert command == ["-m", "swiftlite", "train", "r.yaml", "seed=3", "--strategy=ddp", "--output=o u", "--debug"]
    assert (str(options["output"]), options["nproc"], options["max_restarts"]) == ("o u", 2, 3)
    assert api.calls == []


def test_hosts_and_restarts_need_a_launcher_for_one_process_too(launched):
    assert run(["train", "r.yaml", "--max-restarts", "1"]) == 0
    assert run(["train", "r.yaml", "--nnodes", "2", "--node-rank", "1", "--rdzv", "h:1"]) == 0
    assert [(o["nproc"], o["nnodes"], o["node_rank"], o["rdzv"]) for _, o in launched] == [(1, 1, None, None), (1, 2, 1, "h:1")]


def test_a_wrong_recipe_starts_nothing(launched, capsys):
    assert run(["train", "r.yaml", "lora.rnak=3", "--nproc", "2"]) == 2
    assert (launched, capsys.readouterr().err.count("error: ")) == ([], 1)


def test_a_worker_starts_none(api, launched, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["train", "r.yaml", "--nproc", "2"]) == 0
    assert ([call[0] for call in api.calls], launched) == (["train"], [])


@pytest.mark.parametrize(("starts", "saved", "resume"), [("1", True, None), ("2", True, "auto"), ("2", False, None)])
def test_started_again_it_goes_on_from_the_newest_checkpoint(api, monkeypatch, starts, saved, resume):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", launch.STARTS: starts}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(checkpoint, "complete", lambda root: ([root / "step-000002"] if saved else [], {}))
    assert run(["train", "r.yaml"]) == 0
    ((_, (loaded,), _),) = api.calls
    assert loaded.recipe.checkpoint.resume == resume


def test_an_error_of_a_worker_is_told_with_its_code(api, monkeypatch, capsys):
    error = SwiftliteError("no JSON", where="rank 1")
    error.exit_code = 3
    error.add_note("the worker's traceback")

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(launch, "launch", fail)
    assert run(["train", "r.yaml", "--nproc", "2"]) == 3
    assert capsys.readouterr().err == "error: rank 1: no JSON\n"
    assert run(["train", "r.yaml", "--nproc", "2", "--debug"]) == 3
    assert "the worker's traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_wrong_data_under_two_processes(tmp_path):
    """Our launcher, torchrun and `accelerate launch` end with the one message that one process has."""
    (tmp_path / "b.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]\n')
    verb = ["-m", "swiftlite", "train", "r.yaml", "data.train=b.jsonl", f"model={tmp_path}"]
    (tmp_path / "config.json").write_text("{}")
    by = {
        "swiftlite": [sys.executable, *verb, "--nproc", "2"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *verb],
        "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", *verb],
    }
    alone = subprocess.run([sys.executable, *verb], capture_output=True, text=True)
    assert alone.returncode in (3, 4)
    for name, command in by.items():
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
        (told,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert told.split(": ", 2)[1] in ("rank 0", "rank 1"), name
        assert told.split(": ", 2)[2] == alone.stderr.removeprefix("error: ").strip(), name
        if name == "swiftlite":
            assert done.returncode == alone.returncode
            assert done.stderr.count("\n") == 1
            assert not (tmp_path / "out").exists()
