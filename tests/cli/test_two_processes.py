"""Whole runs on two processes, and what happens to them: a death, Ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.dist import checkpoint
from tests.training import LORA, recipe

pytestmark = pytest.mark.slow
STEPS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("two")
    train = {"max_steps": STEPS, "global_batch_size": 2}
    recipe(path, lora=LORA, train=train, checkpoint={"save_strategy": "steps", "save_steps": 5}, export=["adapter"])
    return path


def train(folder: Path, output: str, *arguments: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "swiftlite",
        "train",
        "recipe.yaml",
        f"output={output}",
        "--nproc",
        "2",
        "--strategy",
        "fsdp",
    ]
    return subprocess.Popen([*command, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_step(launcher: subprocess.Popen, step: int) -> None:
    while f"{step}/{STEPS} " not in launcher.stdout.readline():
        assert launcher.poll() is None


def worker(launcher: subprocess.Popen, rank: int) -> int:
    """The process id of a rank."""
    children = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=True).stdout.split()
    (found,) = [int(child) for child in children if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text()]
    return found


@pytest.fixture(scope="module")
def undisturbed(folder) -> dict[str, torch.Tensor]:
    with train(folder, "undisturbed") as launcher:
        out, err = launcher.communicate(timeout=200)
    assert (launcher.returncode, err) == (0, "")
    assert out.count(f"step     {STEPS}/{STEPS}") == 1, "one rank speaks"
    return load_file(folder / "undisturbed" / "adapter" / "adapter_model.safetensors")


def test_a_worker_dies_and_the_run_goes_on(folder, undisturbed):
    with train(folder, "died", "--max-restarts", "1") as launcher:
        until_step(launcher, 7)
        os.kill(worker(launcher, 1), signal.SIGKILL)
        out, err = launcher.communicate(timeout=200)
    assert launcher.returncode == 0
    assert err.splitlines()[-1] == "all ranks start again; restarts left: 0"
    assert "resumed   from died/checkpoints/step-0000" in out
    weights = load_file(folder / "died" / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(weights[name], undisturbed[name]) for name in undisturbed)
    assert weights.keys() == undisturbed.keys()


def test_ctrl_c_saves_on_all_ranks_and_the_run_can_go_on(folder, undisturbed):
    with train(folder, "stopped") as launcher:
        until_step(launcher, 7)
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=200)
    assert (launcher.returncode, err) == (130, "interrupted\n")
    good, passed_over = checkpoint.complete(folder / "stopped" / "checkpoints")
    assert good and checkpoint.step_of(good[-1]) < STEPS
    assert passed_over == {}
    with train(folder, "stopped", "--resume", "auto") as launcher:
        launcher.communicate(timeout=200)
    weights = load_file(folder / "stopped" / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(weights[name], undisturbed[name]) for name in undisturbed)
