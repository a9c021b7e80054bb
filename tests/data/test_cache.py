"""Prepared rows are made once, for exactly what they were made of, and nothing half-made is ever used."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from swiftlite.data import cache, prepare, store
from swiftlite.data.prepare import DataRefused
from swiftlite.data.render import Lessons
from swiftlite.recipe.errors import DataError
from tests.data.preparing import C1, chat, prep, write
from tests.fixtures import CHATML, LLAMA3, tok

ROWS = [{"messages": C1}, {"messages": chat("q", "a <|im_end|> b")}, {"messages": chat("q" * 300, "long")}, {"messages": C1}]


def entries(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock")) if folder.exists() else []


def was_cached(prepared: Any) -> bool:
    return prepared.cached is not None


def test_a_second_start_gives_the_same_and_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, kept = write(tmp_path / "d.jsonl", ROWS), str(tmp_path / "cache")
    first = prep(file, tok(None), cache_dir=kept, eval_split=1)
    monkeypatch.setattr(prepare, "make_all", None)
    second = prep(file, tok(None), cache_dir=kept, eval_split=1)
    assert (was_cached(first), was_cached(second)) == (False, True)
    assert list(first.samples) == list(second.samples) and list(first.held_back) == list(second.held_back)
    assert json.dumps(first.report) == json.dumps(second.report)
    assert first.report["findings"] and first.report["dropped"] and len(first.report["notes"]) == 2
    # What is held back or repeated is chosen among the same prepared rows.
    assert len(prep(file, tok(None), cache_dir=kept, seed=3).samples) == 3
    assert len(entries(tmp_path / "cache")) == 1


def test_the_renderer_learns_as_much_from_the_cache(tmp_path: Path):
    from swiftlite.data.render import Renderer
    from swiftlite.recipe.schema import DataSection, DataSource

    source = DataSource(path=str(write(tmp_path / "d.jsonl", ROWS)))
    data = DataSection(train=[source], cache_dir=str(tmp_path / "cache"))
    seen = []
    for _ in range(2):
        renderer = Renderer(tok(None))
        prepare.prepare([source], data, renderer, max_length=256, seed=0)
        seen.append((renderer.stop_ids, renderer.notes, renderer.template, renderer.prompt("x")))
    assert seen[0] == seen[1] and seen[0][2] and len(seen[0][1]) == 2


def test_what_decides_over_rows_makes_another_set(tmp_path: Path):
    file, kept = write(tmp_path / "d.jsonl", ROWS), tmp_path / "cache"
    changes: list[dict[str, Any]] = [
        {}, {"max_length": 255}, {"train_on": "last"}, {"overlong": "truncate"}, {"history_mismatch": "last"},
        {"allow_control_tokens": True}, {"chat_template": LLAMA3}, {"on_bad_rows": "skip"}, {"tokenizer": tok(eos="<|im_end|>")},
        {"tokenizer": tok(merge_newlines=True)}, {"chat_template": "{% set y = x %}" + CHATML, "template_kwargs": {"x": "y"}},
        {"format": "messages"},
    ]  # fmt: skip
    for number, keys in enumerate(changes, 1):
        assert not was_cached(prep(file, cache_dir=str(kept), **keys)), keys
        assert len(entries(kept)) == number
    for keys in changes:
        assert was_cached(prep(file, cache_dir=str(kept), **keys)), keys
    for keys in ({"packing": True}, {"num_proc": 1}, {"train_sampling_strategy": "sequential"}, {"seed": 9}, {"eval_split": 1}):
        assert was_cached(prep(file, cache_dir=str(kept), **keys)), keys
    assert len(entries(kept)) == len(changes)


def test_a_seed_matters_where_rows_are_drawn(tmp_path: Path):
    file, kept = write(tmp_path / "d.jsonl", [{"text": str(n)} for n in range(50)]), str(tmp_path / "cache")
    one, two = (prep(Path(f"{file}#5"), cache_dir=kept, seed=seed) for seed in (0, 1))
    assert [s.source for s in one.samples] != [s.source for s in two.samples]


def test_a_template_that_reads_the_clock_is_kept_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, kept = write(tmp_path / "d.jsonl", [{"messages": C1}]), str(tmp_path / "cache")
    dated = "{{ strftime_now('%Y') }}" + CHATML

    class Tomorrow:
        @staticmethod
        def today() -> Any:
            from datetime import date, timedelta

            return date.today() + timedelta(days=1)

    prep(file, cache_dir=kept, chat_template=dated), prep(file, cache_dir=kept)
    monkeypatch.setattr(cache, "date", Tomorrow)
    assert [was_cached(prep(file, cache_dir=kept, **keys)) for keys in ({"chat_template": dated}, {})] == [False, True]


def test_rows_that_are_refused_leave_nothing_behind(tmp_path: Path):
    for rows, error in (([{"messages": 7}], DataRefused), ([{"x": 1}], DataError), ([], DataRefused)):
        with pytest.raises(error):
            prep(write(tmp_path / "d.jsonl", rows), cache_dir=str(tmp_path / "cache"))
    assert entries(tmp_path / "cache") == []


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.StoreWriter, "add", full)
    with pytest.raises(DataError, match=r"the disk is full.*data\.cache_dir"):
        prep(write(tmp_path / "d.jsonl", ROWS), cache_dir=str(tmp_path / "cache"))
    assert entries(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_done_without_and_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    file = write(tmp_path / "d.jsonl", ROWS)
    got = prep(file, cache_dir=str(tmp_path / "file" / "cache"))
    assert list(got.samples) == list(prep(file, cache_dir=str(tmp_path / "cache")).samples)
    assert "cannot be used (Not a directory)" in got.notes[0]


def test_a_damaged_set_is_made_again(tmp_path: Path):
    file, kept = write(tmp_path / "d.jsonl", ROWS), tmp_path / "cache"
    whole = list(prep(file, cache_dir=str(kept)).samples)
    for name in (store.IDS, store.SAMPLES, store.FACTS, cache.ACCOUNT, cache.COMPLETE):
        (entry,) = kept.glob("[!.]*")
        (entry / name).write_bytes(b"") if name != cache.COMPLETE else (entry / name).unlink()
        again = prep(file, cache_dir=str(kept))
        assert list(again.samples) == whole and not was_cached(again), name
    assert was_cached(prep(file, cache_dir=str(kept)))


def test_a_cache_inside_the_data_is_no_data(tmp_path: Path):
    write(tmp_path / "d.jsonl", ROWS)
    for _ in range(2):
        got = prep(tmp_path, cache_dir=str(tmp_path / "cache"))
    assert was_cached(got) and len(entries(tmp_path / "cache")) == 1


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write(tmp_path / "d.jsonl", ROWS)
    original = prepare.make_all

    def changing(*args: Any) -> Any:
        yield from original(*args)
        write(file, ROWS * 2)

    monkeypatch.setattr(prepare, "make_all", changing)
    with pytest.raises(DataError, match="changed while it was read"):
        prep(file, cache_dir=str(tmp_path / "cache"))
    assert entries(tmp_path / "cache") == []


def build(folder: Path, log: Path, seconds: float = 0.5) -> tuple[dict[str, Any], Lessons]:
    """A set of one sample, slowly; every call is logged."""
    with log.open("a") as out:
        out.write("built\n")
    time.sleep(seconds)
    columns = store.Columns()
    columns.add([store.Sample([1, 2], [-100, 2], "")], "d:", 1)
    writer = store.StoreWriter(folder)
    writer.add(columns)
    writer.close()
    return {"read": 1}, Lessons({}, [], None)


def ask(root: str, log: Path, seconds: float = 0.5) -> None:
    found = cache.entry("key", root, lambda folder: build(folder, log, seconds))
    assert found.store[0].input_ids == [1, 2] and found.report == {"read": 1}


def test_of_several_processes_one_builds_and_the_others_wait(tmp_path: Path):
    fork, log = multiprocessing.get_context("fork"), tmp_path / "log"
    several = [fork.Process(target=ask, args=(str(tmp_path / "cache"), log)) for _ in range(4)]
    for process in several:
        process.start()
    for process in several:
        process.join(60)
    assert [p.exitcode for p in several] == [0] * 4
    assert log.read_text() == "built\n" and entries(tmp_path / "cache") == ["key"]


def test_a_builder_that_is_killed_is_no_hindrance(tmp_path: Path):
    fork, log, root = multiprocessing.get_context("fork"), tmp_path / "log", tmp_path / "cache"
    first = fork.Process(target=ask, args=(str(root), log, 60))
    first.start()
    while not log.exists():
        time.sleep(0.02)
    second = fork.Process(target=ask, args=(str(root), log))
    second.start()
    time.sleep(0.2)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    second.join(60)
    assert second.exitcode == 0 and entries(root) == ["key"]


def test_what_is_long_unused_goes_and_what_is_used_stays(tmp_path: Path):
    file, kept = write(tmp_path / "d.jsonl", ROWS), tmp_path / "cache"
    for length in (100, 101, 102):
        prep(file, cache_dir=str(kept), max_length=length)
    dead, alive = kept / ".dead.1.part", kept / ".alive.1.part"
    for part in (dead, alive):
        shutil.copytree(kept / entries(kept)[-1], part)
    old = time.time() - 31 * 86400
    for path in (*kept.glob("[!.]*/COMPLETE"), *kept.glob(".*.lock"), *dead.glob("*"), dead):
        os.utime(path, (old, old))
    assert was_cached(prep(file, cache_dir=str(kept), max_length=101))  # used, so it stays
    prep(file, cache_dir=str(kept), max_length=103)
    assert was_cached(prep(file, cache_dir=str(kept), max_length=101))
    assert len([e for e in entries(kept) if e[0] != "."]) == 2
    assert not dead.exists() and alive.exists()


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SWIFTLITE_CACHE", "/c")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.cache_root("~/d") == Path.home() / "d" and cache.cache_root(None) == Path("/c/data")
    monkeypatch.delenv("SWIFTLITE_CACHE")
    assert cache.cache_root(None) == Path("/x/swiftlite/data")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_root(None) == Path.home() / ".cache/swiftlite/data"
