"""Places that launchers give, which error explains the others, and two real processes under our launcher and torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from swiftlite.dist import agent, launch, worker
from swiftlite.dist.launch import Ranks
from swiftlite.recipe.errors import DataError, RecipeError

REPO = Path(__file__).resolve().parents[2]
SRUN = {
    "SLURM_STEP_NUM_TASKS": "20", "SLURM_PROCID": "17", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_JOB_ID": "77777",
    "SLURM_STEP_NODELIST": "gpu-[03-05,9],x", "SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_STEP_ID": "1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No launcher. `environment(RANK="1")` sets variables; all are as before at the end."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "ACCELERATE_")) or name in ("RANK", "WORLD_SIZE", launch.FOLDER):
            del os.environ[name]
    yield lambda **names: os.environ.update(names)
    os.environ.clear()
    os.environ.update(before)


def test_alone():
    assert (launch.ranks(), launch.is_worker(), launch.start()) == (Ranks(0, 0, 1, 1), False, 0)


def test_torchrun(environment):
    environment(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RESTART_COUNT="2")
    assert (launch.ranks(), launch.is_worker(), launch.start()) == (Ranks(3, 1, 4, 2), True, 2)
    environment(WORLD_SIZE="1", RANK="0")
    assert (launch.ranks(), launch.is_worker()) == (Ranks(), True)


def test_srun(environment):
    environment(**SRUN)
    assert launch.is_worker()
    assert launch.ranks() == Ranks(17, 1, 20, 4)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("gpu-03", "32778")


@pytest.mark.parametrize("nodes", ["n7", "n7,n9", "n[7,9]", "n[7-9]"])
def test_the_first_host_of_a_list(environment, nodes):
    environment(**SRUN | {"SLURM_STEP_NODELIST": nodes})
    launch.ranks()
    assert os.environ["MASTER_ADDR"] == "n7"


def test_a_batch_script_is_no_task_of_srun(environment):
    environment(SLURM_NTASKS="8", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_JOB_ID="1")
    assert (launch.ranks(), launch.is_worker()) == (Ranks(), False)


def test_processes(environment, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = [launch.processes(None, device, strategy) for device, strategy in [("auto", None), ("cpu", None), ("cuda", "none")]]
    assert found == [4, 1, 1]
    assert [launch.processes(wanted, "auto", None) for wanted in (1, 2, 4)] == [1, 2, 4]
    assert launch.processes(6, "cpu", None) == 6
    with pytest.raises(RecipeError, match="--nproc: 6 processes are wanted, and there are 4 GPUs here"):
        launch.processes(6, "auto", None)
    environment(ACCELERATE_MIXED_PRECISION="no")  # `accelerate launch --num_processes 1` sets no rank
    assert launch.processes(None, "auto", None) == 1


def test_hosts_need_a_place_to_meet(tmp_path):
    with pytest.raises(RecipeError, match=r"--nnodes: 2 hosts need a place to meet\. Give each host the same --rdzv"):
        launch.launch(["-c", ""], output=tmp_path, nproc=1, nnodes=2)


def end(rank, time, **changes):
    return agent.End(**{"rank": rank, "code": 1, "text": "x", "lost": False, "again": True, "time": time} | changes)


@pytest.mark.parametrize(
    "ends",
    [
        [end(0, 1.0, lost=True), end(1, 2.0)],
        [end(0, 2.0), end(1, 1.0)],
        [end(0, 1.0, code=130), end(1, 2.0, code=3)],
        [end(0, 1.0, code=130), end(1, 2.0, lost=True)],
    ],
)
def test_the_cause_is_told(ends):
    assert agent.cause(ends).rank == 1


def test_what_a_worker_reports(environment, tmp_path, monkeypatch):
    assert not worker.report(DataError("x"), 3)
    environment(RANK="1", WORLD_SIZE="2")
    environment(**{launch.FOLDER: str(tmp_path)})
    monkeypatch.setattr(worker._Voice, "log", tmp_path / "rank-1.log")

    def told(error, code):
        assert worker.report(error, code)
        found = json.loads((tmp_path / "1.json").read_text())
        return {key: found[key] for key in ("rank", "code", "text", "lost", "again")}

    mistake = {"rank": 1, "code": 3, "text": "a.jsonl:3: no JSON", "lost": False, "again": False}
    assert told(DataError("no JSON", where="a.jsonl:3"), 3) == mistake
    assert not (tmp_path / "rank-1.log").exists()
    lost = RuntimeError("[.../gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    assert told(lost, 1)["lost"]
    assert told(ZeroDivisionError("ours"), 1)["text"] == "ZeroDivisionError: ours"
    assert "ZeroDivisionError: ours" in (tmp_path / "rank-1.log").read_text()
    silent = told(worker.SilentRankError("rank 0 has been silent"), 1)
    assert (silent["rank"], silent["again"]) == (None, True)
    assert told(KeyboardInterrupt(), 130)["again"] is False


def test_logs_in_which_nothing_stands_are_removed(tmp_path):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-1.log").touch()
    (logs / "rank-2.log").write_text("x")
    worker.tidy(tmp_path / "run")
    assert [p.name for p in logs.iterdir()] == ["rank-2.log"]
    (logs / "rank-2.log").write_text("")
    worker.tidy(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nobody_is(tmp_path, monkeypatch):
    def refuse(parameters):
        assert parameters.endpoint == "h:1"
        raise RendezvousConnectionError("nobody listens")

    monkeypatch.setattr(agent, "get_rendezvous_handler", refuse)
    with pytest.raises(RecipeError, match="--rdzv: the hosts did not meet at h:1: nobody listens"):
        launch.launch(["-c", ""], output=tmp_path, nproc=1, nnodes=2, node_rank=1, rdzv="h:1")


# Two processes. The parent is a process too: signals and exit codes are what is tried.
PARENT = """
import signal, sys
from pathlib import Path
from swiftlite.dist.launch import launch
from swiftlite.recipe.errors import SwiftliteError
signal.signal(signal.SIGINT, signal.default_int_handler)
output, part, restarts = sys.argv[1:]
try:
    launch(["-m", "tests.dist.acting", output, part], output=Path(output), nproc=2, max_restarts=int(restarts))
except SwiftliteError as error:
    print("error:", error, file=sys.stderr)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
"""


def two(output, part, restarts=0, signals=()):
    """Exit code, stdout, stderr and the seconds from the first signal to the end; `signals` follow the word `ready`."""
    command = [sys.executable, "-c", PARENT, str(output), part, str(restarts)]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        if signals:
            assert parent.stdout is not None
            while "ready" not in parent.stdout.readline():
                pass
        began = time.monotonic()
        for number in signals:
            parent.send_signal(number)
            time.sleep(0.5)
        out, err = parent.communicate(timeout=120)
        return parent.returncode, out, err, time.monotonic() - began


def alive(output):
    return subprocess.run(["pgrep", "-f", f"tests.dist.acting {output}"], capture_output=True, text=True).stdout.split()


def test_a_mistake_is_told_once_with_its_rank_and_code(tmp_path):
    """And is not tried again: the same row is wrong the next time."""
    code, out, err, _ = two(tmp_path, "data", restarts=2)
    assert (code, err) == (3, "error: rank 1: rows.jsonl:3: it is no JSON\n")
    assert out.startswith("rank 0 of 2, OMP_NUM_THREADS 1\n")
    assert "rank 1" not in out
    assert (tmp_path / "logs" / "rank-1.log").read_text().startswith("rank 1 of 2")


def test_a_signal_leaves_time_to_save_on_all_ranks(tmp_path):
    code, _, err, seconds = two(tmp_path, "signal", signals=[signal.SIGINT])
    assert (code, err) == (130, "")
    assert {p.name: p.read_text() for p in tmp_path.glob("saved-*")} == {"saved-0": "1", "saved-1": "1"}  # one signal each
    assert seconds > 2, "rank 1 saves for two seconds, rank 0 for one"
    assert alive(tmp_path) == []


@pytest.mark.slow
def test_a_second_signal_kills(tmp_path):
    code, _, err, seconds = two(tmp_path, "stuck", signals=[signal.SIGTERM, signal.SIGINT])
    assert (code, err, alive(tmp_path)) == (130, "", [])
    assert seconds < 5


@pytest.mark.slow
def test_a_fault_names_its_log(tmp_path):
    code, _, err, _ = two(tmp_path, "fault")
    log = tmp_path / "logs" / "rank-1.log"
    assert (code, err) == (1, f"error: rank 1: ZeroDivisionError: ours. See {log}\n")
    assert "Traceback" in log.read_text()


@pytest.mark.slow
def test_a_killed_worker_is_told_or_started_again(tmp_path):
    code, _, err, _ = two(tmp_path / "a", "killed")
    assert code == 1
    assert err.startswith("error: rank 1: its process was killed by SIGKILL. Most often the machine ran out of memory")
    for _ in range(3):  # ranks of the second start that met dead ones of the first did so by chance
        code, out, err, _ = two(tmp_path / "b", "killed", restarts=1)
        assert (code, err.count("\n"), out.splitlines()[-1]) == (0, 2, "done, start 1")
        assert "all ranks start again; restarts left: 0" in err


@pytest.mark.slow
def test_a_stopped_process_is_named_with_its_step(tmp_path):
    code, _, err, _ = two(tmp_path, "stopped")
    assert (code, err) == (1, "error: rank 1 has been silent since step 7 for 2 s\n")
    assert alive(tmp_path) == []


@pytest.mark.slow
def test_under_torchrun_one_rank_tells(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tests.dist.acting", str(tmp_path)]
    done = subprocess.run([*command, "data"], cwd=REPO, capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "error: rank 1: rows.jsonl:3: it is no JSON"
    ]
    done = subprocess.run([*command[:3], "--max-restarts", "1", *command[3:], "killed"], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "done, start 1")


@pytest.mark.slow
def test_two_hosts_meet(tmp_path):
    """Two launchers on this host, one worker each."""
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    code = PARENT.replace("nproc=2", f'nproc=1, nnodes=2, node_rank=int(output[-1]), rdzv="localhost:{port}"')
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / f"{n}"), "ok", "0"], cwd=REPO, stdout=subprocess.PIPE, text=True
        )
        for n in range(2)
    ]
    said = [host.communicate(timeout=120)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    assert sorted(said) == ["", said[0] + said[1]]
    assert "rank 0 of 2" in said[0] + said[1]
