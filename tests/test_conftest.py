"""The guards of conftest.py hold."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]

SWALLOWS = """
import socket

def test_it():
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    except OSError:
        pass
"""


@pytest.mark.network
def test_network_is_refused_by_name_and_by_address(network_guard):
    with pytest.raises(socket.gaierror, match="do not leave"):
        socket.create_connection(("example.org", 80), timeout=1)
    with socket.socket() as sock, pytest.raises(ConnectionRefusedError, match="do not leave"):
        sock.connect(("192.0.2.1", 80))
    assert network_guard == ["example.org", "192.0.2.1"]


def test_loopback_is_open():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("localhost", port)) as client:
            assert client.getpeername()[1] == port


def test_a_swallowed_refusal_still_fails_the_test(tmp_path):
    test = tmp_path / "test_swallows.py"
    test.write_text(SWALLOWS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", str(tmp_path), str(test)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    assert "the test tried to reach 192.0.2.1" in done.stdout


def test_hub_is_offline_and_caches_stay_in_the_repository():
    import huggingface_hub.constants as hub

    assert hub.HF_HUB_OFFLINE
    assert Path(hub.HF_HOME).is_relative_to(REPO)
    assert os.environ["OMP_NUM_THREADS"] == "1"
