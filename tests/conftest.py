"""What every test stands on: no network, one thread a process, caches inside the repository."""

import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[1]
CACHE = REPO / ".cache" / "tests"

# Set before torch, tokenizers or huggingface_hub are imported: they read these once. Children inherit them.
os.environ |= {
    "OMP_NUM_THREADS": "1",  # test processes already fill the cores; also keeps the order of sums, so numbers repeat
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HOME": str(CACHE / "huggingface"),  # neither the developer's token nor their cached models decide a test
    "SWIFTLITE_CACHE": str(CACHE / "swiftlite"),  # kept between runs: dequantising the demo model takes a while
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
for name in ("HF_TOKEN", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
# A shell that starts the tests in the background lets them ignore Ctrl-C, and processes that tests interrupt would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class NetworkRefused(ConnectionRefusedError):
    """A test tried to leave this machine."""


def _is_local(host: object) -> bool:
    text = host.decode() if isinstance(host, bytes) else str(host or "localhost")
    own = {"localhost", socket.gethostname(), "::1", "::", "0.0.0.0"}
    return text in own or text.startswith("127.") or text.removeprefix("::ffff:").startswith("127.")


@pytest.fixture(autouse=True)
def network_guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Refuses every connection and look-up that leaves the machine, and fails the test that tried, even where
    the code under test swallowed the refusal. Yields the hosts asked for; `@pytest.mark.network` lets them be."""
    asked: list[str] = []

    def refuse(host: object) -> None:
        asked.append(str(host))
        raise NetworkRefused(f"tests do not leave this machine: {host}")

    def guard_connect(name: str) -> None:
        original = getattr(socket.socket, name)

        def connect(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
                refuse(address[0])
            return original(self, address)

        monkeypatch.setattr(socket.socket, name, connect)

    original_lookup = socket.getaddrinfo

    def lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_local(host):
            asked.append(str(host))
            raise socket.gaierror(socket.EAI_NONAME, f"tests do not leave this machine: {host}")
        return original_lookup(host, *args, **kwargs)

    guard_connect("connect")
    guard_connect("connect_ex")
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    yield asked
    if asked and request.node.get_closest_marker("network") is None:
        pytest.fail(f"the test tried to reach {', '.join(sorted(set(asked)))}", pytrace=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Prepared rows of tests are of no use to the next run. Those of another run at this moment are let be."""
    if not hasattr(session.config, "workerinput"):
        for entry in (CACHE / "swiftlite" / "data").glob("*"):
            if time.time() - entry.stat().st_mtime > 3600:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch  # slow to import, and most tests need none

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
