"""The kernel that unpacks NF4 on GPUs, tried without one; tests/models/test_lowbit_gpu.py runs it where there is one."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("interpreted", ["1", "0"])
def test_the_kernel_rounds_as_a_cpu_does(interpreted, tmp_path):
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": interpreted}
    subprocess.run([sys.executable, "-m", "tests.models.nf4_kernel"], env=env, check=True, timeout=300)
