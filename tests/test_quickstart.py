"""The quickstart as a new user runs it: a real model, five minutes, and a measured difference."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_quickstart_learns_exports_and_answers(tmp_path):
    for folder in ("recipes", "examples"):
        shutil.copytree(REPO / folder, tmp_path / folder)
    done = subprocess.run(
        [sys.executable, "examples/quickstart/run.py"], cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Plain transformers answers the same: yes." in done.stdout and '"action":"book"' in done.stdout
    # peft imports bitsandbytes where that is installed, as for the tests, which on some processors misses a package.
    said = [line for line in done.stderr.splitlines() if "gemm_4bit_forward" not in line]
    assert not said, "a new user reads every line"
    assert (tmp_path / "runs/quickstart/adapter/adapter_model.safetensors").exists()
