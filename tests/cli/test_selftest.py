"""`swiftlite selftest`: it holds here, it sees what is broken, and it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swiftlite.cli.main import run
from swiftlite.dist.world import World
from swiftlite.recipe import tables
from swiftlite.recipe.errors import RecipeError
from swiftlite.train import comparing, loop, selftest
from swiftlite.train.console import Console
from tests.cli.stand_in import stand_in_api
from tests.ranks import run_ranks

HERE = selftest.Setting(2, "cpu")
SPREAD = [name for name in tables.STRATEGIES if name != "none"]


def on_two_ranks(folder: Path, function, *names: str) -> list[selftest.Result]:
    """Results of the cases whose names begin with `names`."""
    wanted = [case for case in selftest.cases(HERE, folder) if case.name.startswith(names)]
    assert len(wanted) == len(names)
    selftest.ask(folder, HERE, wanted, quiet=True)
    run_ranks(2, function, folder)
    return selftest.answers(folder)


def test_every_strategy_and_every_kind_of_split_is_in_it(tmp_path):
    for size in (1, 2, 3, 8):
        found = selftest.cases(selftest.Setting(size, "cpu"), tmp_path)
        assert len({case.name for case in found}) == len(found)
        for method, adapted in (("full", False), ("lora", True)):
            keys = [case.keys for case in found if ("model.adapter" in case.keys) == adapted]
            assert {k["strategy.name"] for k in keys} == set(SPREAD), method
            assert {k.get("strategy.offload") for k in keys} == {None, "params", "optimizer"}
            assert {k.get("data.packing") for k in keys} == {None, True}
            assert {k.get("train.per_device_train_batch_size") for k in keys} == {None, 1, 2, 3, 4}
            assert {k.get("train.gradient_checkpointing") for k in keys} == {None, "none", "full", "selective"}
        assert {kind for case in found for kind in case.resumed.get("export", [])} == set(tables.EXPORTERS)
        groups = {case.keys["strategy.shard"] for case in found if case.keys["strategy.name"] == "hsdp"}
        assert groups == {{1: 1, 2: 1, 3: 1, 8: 4}[size]}


def test_two_ranks_learn_what_one_process_learns(tmp_path):
    found = on_two_ranks(tmp_path, comparing.work, "zero2, full, micro-batch 2", "ddp, lora, packing", "fsdp, full, saved")
    assert [result.faults for result in found] == [[]] * 4
    assert found[-1].name == "  its merged export, in plain transformers"
    assert found[-1].differences["weights"] < selftest.LIMITS["weights"] and found[-1].differences["loss"] is None
    for result in found[:-1]:
        assert all(value >= 0 for value in result.differences.values())
    assert any(value > 0 for value in found[0].differences.values()), "another order of sums leaves a trace"


def wrong_factor(folder: Path) -> None:
    """The loss is not multiplied by the number of ranks over which FSDP averages."""
    World.data_size = property(lambda self: 1)
    comparing.work(folder)


def no_sum(folder: Path) -> None:
    """The last micro-batch is not said to be the last: where gradients are summed once a step, they never are."""
    right = loop.begin_micro_batch
    loop.begin_micro_batch = lambda root, strategy, last: right(root, strategy, False)
    comparing.work(folder)


def test_a_wrong_loss_factor_is_seen(tmp_path):
    for result in on_two_ranks(tmp_path, wrong_factor, "zero3, full, micro", "hsdp, lora, micro"):
        assert result.differences["gradients"] == pytest.approx(0.5, rel=1e-3)
        assert result.differences["norm"] == pytest.approx(0.5, rel=0.1), "of all steps"
        assert any(text.startswith("gradients 5.0e-01 apart in ") for text in result.faults)
        assert selftest.line(result).endswith("FAIL")


def test_gradients_that_are_not_summed_are_seen(tmp_path):
    ddp, zero2 = on_two_ranks(tmp_path, no_sum, "ddp, full, micro", "zero2, full, micro-batch 2")
    assert ddp.faults and not zero2.faults, "zero2 sums at each micro-batch"


@pytest.fixture
def few(monkeypatch):
    """A self test of one case, so that it takes a second."""
    every = selftest.cases
    monkeypatch.setattr(selftest, "cases", lambda *args: [c for c in every(*args) if c.name.startswith("zero1, lora, micro")])


def test_one_process_and_exit_codes(few, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def state() -> list[object]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        return handlers + [os.environ.get(name) for name in ("WORLD_SIZE", "TORCHINDUCTOR_CACHE_DIR")]

    before = state()
    assert run(["selftest", "--nproc", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["allowed", "1e-05", "1e-05", "5e-06", "1e-04"]
    assert lines[3].startswith("zero1, lora, micro-batch 1") and lines[3].endswith("ok")
    assert lines[4].startswith("1 of 1 rows are within what is allowed")

    right = loop.begin_micro_batch
    monkeypatch.setattr(loop, "begin_micro_batch", lambda root, strategy, last: right(root, strategy, False))
    assert run(["selftest", "--nproc", "1", "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err.startswith("error: selftest: zero1, lora, micro-batch 1, selective checkpointing: ")
    assert "gradients inf apart in model." in err
    assert [case["ok"] for case in found["cases"]] == [False]
    assert found["cases"][0]["differences"]["gradients"] == "inf", "plain JSON knows no infinity"
    assert list(tmp_path.iterdir()) == []
    assert state() == before


def test_a_case_that_breaks_is_named(few, monkeypatch, capsys):
    monkeypatch.setattr(comparing, "_differences", lambda *args: 1 / 0)
    assert run(["selftest", "--nproc", "1"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    fault = RecipeError("no such thing", where="strategy.name")
    monkeypatch.setattr(comparing, "train", lambda *args: (_ for _ in ()).throw(fault))
    assert run(["selftest", "--nproc", "1"]) == 1, "no recipe of the user's is wrong"
    assert capsys.readouterr().err == "error: case 'one process, full', strategy.name: no such thing\n"


def test_a_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match="processes of its own"):
        selftest.selftest(2, Console(quiet=True))


def test_the_verb_hands_on(monkeypatch, capsys):
    api = stand_in_api(monkeypatch)
    assert run(["selftest", "--nproc", "3", "--json"]) == 0
    assert api.calls == [("selftest", (), {"nproc": 3, "quiet": True})]
    assert json.loads(capsys.readouterr().out) == {"failed": []}
    assert run(["selftest", "--nproc", "0"]) == 2


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "swiftlite", "selftest", *arguments]
    env = os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.slow
def test_all_of_it_on_two_processes(tmp_path):
    with start(tmp_path, "--nproc", "2", "--json") as parent:
        out, err = parent.communicate(timeout=240)
    found = json.loads(out)
    assert (parent.returncode, err, found["failed"]) == (0, "", [])
    assert (found["size"], found["device"]) == (2, "cpu")
    assert len(found["cases"]) == len(selftest.cases(HERE, tmp_path)) + 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(tmp_path, number):
    with start(tmp_path, "--nproc", "2") as parent:
        while not parent.stdout.readline().startswith("ddp, full"):
            assert parent.poll() is None
        workers = subprocess.run(["pgrep", "-P", str(parent.pid)], capture_output=True, text=True, check=True).stdout.split()
        parent.send_signal(number)
        _, err = parent.communicate(timeout=60)
    assert (parent.returncode, err) == (130, "interrupted\n")
    assert len(workers) == 2 and not any(Path("/proc", pid).exists() for pid in workers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_worker_that_dies_is_told_with_its_case(tmp_path):
    with start(tmp_path, "--nproc", "2") as parent:
        while not parent.stdout.readline().startswith("ddp, full"):
            assert parent.poll() is None
        workers = subprocess.run(["pgrep", "-P", str(parent.pid)], capture_output=True, text=True, check=True).stdout.split()
        os.kill(next(int(w) for w in workers if "\0RANK=1\0" in Path("/proc", w, "environ").read_text()), signal.SIGKILL)
        _, err = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert err.startswith("error: case '") and "rank 1: its process was killed by SIGKILL" in err
    assert list(tmp_path.iterdir()) == []
