"""Several processes make what one makes: samples, report, notes, findings and errors, row by row; and none is left behind."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from swiftlite.data import workers
from swiftlite.data.prepare import DataRefused, Prepared, prepare
from swiftlite.data.render import Renderer
from swiftlite.recipe.errors import DataError, SwiftliteError
from swiftlite.recipe.schema import DataSection, DataSource
from tests.data.preparing import C1, chat, prep, write
from tests.fixtures import THINK, tok

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
pytestmark = linux


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes for sets of any size, and small chunks."""
    monkeypatch.setattr(workers, "PAYS_FROM", 0)
    monkeypatch.setattr(workers, "PAYS_BYTES", 1)
    monkeypatch.setattr(workers, "CHUNK_ROWS", 7)


def rows(count: int = 200) -> list[Any]:
    """Good rows, and of every kind that a report knows one in a while."""
    chance, found = random.Random(0), []
    for n in range(count):
        texts = [
            ("q", f"answer {n}"), ("again", "and again"), ("q", f"a <|im_end|> {n}"), ("q" * 400, "long"), ("only a question",),
            ("q", "<think>\nwhy\n</think>\n\nA", "r", f"B {n}"), ("q", ""), ("q", "CafÃ© olÃ©"), ("same", "same"),
        ]  # fmt: skip
        kinds: list[Any] = [{"messages": chat(*t)} for t in texts] + ["no json", "", {"messages": [{"role": "bot"}]}]
        found.append(chance.choices(kinds, [20] + [1] * 11)[0])
    return found


def everything(prepared: Prepared) -> str:
    return json.dumps([[(s.input_ids, s.labels, s.source) for s in prepared.samples], prepared.report, prepared.samples.digest])


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_any_number_of_processes_makes_the_same(tmp_path: Path, overlong: Any):
    write(tmp_path / "a.jsonl", rows())
    write(tmp_path / "b.jsonl", [{"prompt": "q" * n, "completion": f"a<|im_end|>{n}"} for n in range(30)])
    write(tmp_path / "c.jsonl", [{"segments": [{"text": "q", "label": False}, {"text": "a", "label": True}]}] * 20)
    sources = [DataSource(path=str(tmp_path / f"{name}.jsonl"), sample=25 if name == "b" else None) for name in "abca"]
    seen, learned = [], []
    for num_proc in (1, 2, 3):
        data = DataSection(
            train=sources, on_bad_rows="skip", max_bad_fraction=0.5, overlong=overlong, num_proc=num_proc,
            cache_dir=str(tmp_path / f"cache{num_proc}"),
        )  # fmt: skip
        renderer = Renderer(tok(THINK, eos=None))
        seen.append(everything(prepare(sources, data, renderer, max_length=64, seed=1, eval_split=0.1)))
        learned.append((renderer.stop_ids, renderer.notes, renderer.template))
    assert seen[0] == seen[1] == seen[2] and learned[0] == learned[1] == learned[2]
    report = json.loads(seen[0])[1]
    assert len(report["dropped"]) >= 4 and len(report["findings"]) >= 4 and len(report["notes"]) >= 2


def refusal(path: Path, num_proc: int, **keys: Any) -> tuple[str, str, Any]:
    with pytest.raises(SwiftliteError) as stopped:
        prep(path, num_proc=num_proc, cache_dir=str(path.parent / "cache"), **keys)
    return type(stopped.value).__name__, str(stopped.value), getattr(stopped.value, "report", None)


@pytest.mark.parametrize("bad", [1, 19, 20, 21, 60])
def test_bad_rows_stop_at_the_same_row(tmp_path: Path, bad: int):
    lines = [{"messages": C1}] * 200
    for n in random.Random(bad).sample(range(1, 200), bad):
        lines[n] = {"messages": bad}
    file = write(tmp_path / "d.jsonl", lines)
    one, two = refusal(file, 1), refusal(file, 2)
    assert one == two and one[0] == "DataRefused"
    assert one[2]["dropped"] == {"not messages": min(bad, 20)}


def test_what_is_wrong_with_a_source_is_said_for_the_first_row_that_shows_it(tmp_path: Path):
    file = write(tmp_path / "d.jsonl", [{"messages": C1}] * 50 + [{"messages": chat("q" * 300, "a")}] * 9 + ["x"] * 30)
    one, two = (refusal(file, n, overlong="error", on_bad_rows="skip", max_bad_fraction=1.0) for n in (1, 2))
    assert one == two and "line 51: too long" in one[1] and one[2]["read"] == 51
    # A row of prompt and completion says what train_on means; those of chat do not.
    one, two = (refusal(file, n, train_on="completion") for n in (1, 2))
    assert one == two and f"{file}:1: data.train_on" in one[1]
    # What goes wrong in reading comes after what the rows before it say.
    table = tmp_path / "d.csv"
    table.write_text("text\n" + "good\n" * 30 + '"open\n')
    one, two = (refusal(table, n) for n in (1, 2))
    assert one == two and one[0] == "DataError" and "line 32" in one[1]


def test_a_too_long_row_stops_behind_many_bad_ones(tmp_path: Path):
    lines = ["no json"] * 30 + [{"messages": C1}, {"messages": chat("q" * 300, "a")}, {"messages": C1}]
    with pytest.raises(DataRefused, match="too long") as stopped:
        prep(write(tmp_path / "d.jsonl", lines), overlong="error", on_bad_rows="skip", max_bad_fraction=1.0)
    assert f"{tmp_path}/d.jsonl:32" in str(stopped.value) and "Raise data.max_length" in str(stopped.value)


def test_a_process_that_dies_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here, original = os.getpid(), workers.make

    def dying(*args: Any) -> Any:
        return original(*args) if os.getpid() == here else os._exit(9)

    monkeypatch.setattr(workers, "make", dying)
    with pytest.raises(SwiftliteError, match=r"data\.num_proc: a process that prepares data died") as stopped:
        prep(write(tmp_path / "d.jsonl", [{"messages": C1}] * 50), num_proc=2, cache_dir=str(tmp_path / "cache"))
    assert not isinstance(stopped.value, DataError)
    assert [p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")] == []


def test_small_sets_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "PAYS_FROM", 100)
    for lines, size, started in ((90, 1, False), (200, 2**20, False), (200, 1, True)):
        monkeypatch.setattr(workers, "PAYS_BYTES", size)
        made: list[int] = []
        original = workers._Pool._start
        with monkeypatch.context() as patch:
            patch.setattr(workers._Pool, "_start", lambda pool, made=made, go=original: made.append(pool.num_proc) or go(pool))
            prep(write(tmp_path / f"{lines}{size}.jsonl", [{"messages": C1}] * lines), num_proc=2, cache_dir=str(tmp_path / "c"))
        assert made == ([2] if started else [])


SCRIPT = """
import sys, time
from pathlib import Path
from swiftlite.data import workers
from tests.data.preparing import prep
workers.PAYS_FROM, workers.PAYS_BYTES, workers.CHUNK_ROWS = 0, 1, 7
original = workers._make_chunk
def slow(*args):
    time.sleep(0.05)
    return original(*args)
workers._make_chunk = slow
from tests.fixtures import tok
tokenizer = tok()
tokenizer(["a b c d"] * 64)  # its own threads have run before processes are forked
print("begin", flush=True)
print(len(prep(Path(sys.argv[1]), tokenizer, num_proc=2, cache_dir=sys.argv[2]).samples))
"""


def begin(tmp_path: Path, count: int) -> "subprocess.Popen[str]":
    file = write(tmp_path / "d.jsonl", [{"messages": C1}] * count)
    known = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    command = [
        sys.executable,
        "-W",
        "always::DeprecationWarning:multiprocessing",
        "-c",
        SCRIPT,
        str(file),
        str(tmp_path / "cache"),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=known, start_new_session=True)


def running(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_tokenizers_neither_warn_nor_hang(tmp_path: Path):
    process = begin(tmp_path, 60)
    out, err = process.communicate(timeout=100)
    assert (out, err, process.returncode) == ("begin\n60\n", "", 0)


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_one_that_reads(tmp_path: Path, kill: signal.Signals):
    process = begin(tmp_path, 5000)
    assert process.stdout is not None and process.stdout.readline() == "begin\n"
    deadline = time.monotonic() + 60
    while len(running(process.pid)) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, kill) if kill == signal.SIGINT else os.kill(process.pid, kill)
    process.wait(30)
    while running(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    left = [p.name for p in (tmp_path / "cache").iterdir() if p.name.endswith(".part")]
    assert len(left) == (kill == signal.SIGKILL)  # the next builder removes it
    process.communicate()


def test_weights_repeat_rows_and_leave_some_out(tmp_path: Path):
    kinds = {"half": 0.5, "once": 1.0, "more": 2.25}
    for name in kinds:
        write(tmp_path / f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(400)])
    sources = [DataSource(path=str(tmp_path / f"{name}.jsonl"), name=name, weight=weight) for name, weight in kinds.items()]
    data = DataSection(train=sources, cache_dir=str(tmp_path / "cache"))
    got = prepare(sources, data, Renderer(tok()), max_length=64, seed=3, eval_split=0.1)
    held = [s.source for s in got.held_back]
    assert len(set(held)) == len(held) == 120
    for name, weight in kinds.items():
        here = [s.source for s in got.samples if f"{name}.jsonl" in s.source]
        assert set(here).isdisjoint(held)
        base = 400 - sum(f"{name}.jsonl" in source for source in held)
        counts = {here.count(source) for source in set(here)}
        assert counts <= ({1} if weight <= 1 else {2, 3}) and abs(len(here) / base / weight - 1) < 0.15
        counted = got.report["sources"][name].get("samples_an_epoch")
        assert counted == (None if weight == 1 else len(here))
    again = prepare(sources, data, Renderer(tok()), max_length=64, seed=3, eval_split=0.1)
    assert list(again.samples) == list(got.samples)
    other = prepare(sources, data, Renderer(tok()), max_length=64, seed=4, eval_split=0.1)
    assert list(other.samples) != list(got.samples)
    tiny = [DataSource(path=sources[0].path, weight=1e-9)]
    with pytest.raises(DataError, match="weight leaves no row"):
        prepare(tiny, data, Renderer(tok()), max_length=64, seed=3)
