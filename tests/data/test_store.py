"""Samples in files are those that were written, however they came in, and cost nothing where only their lengths are asked."""

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from swiftlite.data.loader import Loader
from swiftlite.data.render import IGNORE, Sample
from swiftlite.data.store import IDS, RECORD, Columns, Store, StoreWriter, Subset, highest_id, lengths_of


def made(count: int = 23) -> list[list[Sample]]:
    """The samples of each of `count` rows; every fifth row has none, every third two."""
    chance = random.Random(1)
    rows = []
    for n in range(count):
        ids = [[chance.randint(0, 200_000) for _ in range(chance.randint(1, 9))] for _ in range(1 + (n % 3 == 0))]
        source = f"d.jsonl:{n + 1}" if n < count // 2 else f"e.parquet:row {n + 1}"
        rows.append([Sample(i, [IGNORE, *i[1:]] if n % 4 else [IGNORE] * len(i), source) for i in ids] if n % 5 else [])
    return rows


def written(folder: Path, rows: list[list[Sample]], chunk: int) -> Store:
    writer = StoreWriter(folder)
    for start in range(0, len(rows), chunk):
        columns = Columns()
        for n, samples in enumerate(rows[start : start + chunk], start + 1):
            columns.add(samples, "d.jsonl:" if n - 1 < len(rows) // 2 else "e.parquet:row ", n)
        writer.add(columns)
    store = writer.close()
    assert store is not None
    return store


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_samples_come_back_as_they_were(tmp_path: Path, chunk: int):
    rows = made()
    flat = [s for samples in rows for s in samples]
    store = written(tmp_path / "s", rows, chunk)
    assert list(store) == flat == store[:] and len(store) == len(flat)
    assert store[-1] == flat[-1] and store[3:7] == flat[3:7] and store[::-2] == flat[::-2]
    assert all(type(i) is int for i in store[1].input_ids + store[1].labels)
    with pytest.raises(IndexError):
        store[len(flat)]
    assert store.lengths.tolist() == lengths_of(flat).tolist() == [len(s.input_ids) for s in flat]
    assert store.trained.tolist() == [s.trained for s in flat]
    assert store.rows.tolist() == [n for n, samples in enumerate(rows, 1) for _ in samples]
    assert store.top == highest_id(flat) == highest_id(store)
    assert store.digest == written(tmp_path / "other", rows, 3).digest  # it knows no chunks


def test_the_digest_sees_every_id_label_and_border(tmp_path: Path):
    def digest(*samples: Sample) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return written(folder, [list(samples)], 1).digest

    one = digest(Sample([1, 2, 3, 4], [IGNORE, 2, 3, 4], "d:1"))
    assert digest(Sample([1, 2, 3, 4], [IGNORE, 2, 3, 4], "other:7")) == one
    assert len({one, *(digest(*s) for s in (
        [Sample([1, 2, 3, 5], [IGNORE, 2, 3, 4], "")],
        [Sample([1, 2, 3, 4], [IGNORE, 2, IGNORE, 4], "")],
        [Sample([1, 2], [IGNORE, 2], ""), Sample([3, 4], [3, 4], "")],
        [Sample([1], [IGNORE], ""), Sample([2, 3, 4], [2, 3, 4], "")],
    ))}) == 5  # fmt: skip


def test_a_subset_repeats_and_leaves_out(tmp_path: Path):
    rows = made()
    store = written(tmp_path / "s", rows, 5)
    some = Subset(store, np.array([4, 0, 4, 2]))
    assert list(some) == [store[4], store[0], store[4], store[2]] == some[:] and some[1:3] == [store[0], store[4]]
    assert some.lengths.tolist() == [store.lengths[i] for i in (4, 0, 4, 2)] and some.trained.tolist() == [
        s.trained for s in some
    ]
    assert some.digest not in (store.digest, Subset(store, np.array([0, 4, 4, 2])).digest)
    assert some.digest == Subset(store, np.array([4, 0, 4, 2])).digest


def test_nothing_written_is_no_store_and_half_a_file_none_either(tmp_path: Path):
    writer = StoreWriter(tmp_path / "empty")
    columns = Columns()
    columns.add([], "d:", 1)
    writer.add(columns)
    assert writer.close() is None
    written(tmp_path / "s", made(), 5)
    file = tmp_path / "s" / IDS
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="damaged"):
        Store.open(tmp_path / "s")


@pytest.mark.parametrize(
    "keys", [{}, {"capacity": 20}, {"order": "group_by_length"}, {"order": "sequential", "padding_free": True}]
)
def test_a_loader_deals_the_same_from_files_as_from_lists(tmp_path: Path, keys: dict):
    rows = made()
    flat = [s for samples in rows for s in samples]
    keys = {"seed": 5, "order": "random", "rows_per_step": 3, "micro_batch": 2, "pad_id": 0, **keys}
    one, two = Loader(written(tmp_path / "s", rows, 5), **keys), Loader(flat, **keys)
    assert (one.steps_per_epoch, one.fill, one.longest) == (two.steps_per_epoch, two.fill, two.longest)
    for step in range(2 * one.steps_per_epoch):
        for a, b in zip(one.group(step), two.group(step), strict=True):
            assert a.sources == b.sources and all(a.tensors[name].equal(b.tensors[name]) for name in b.tensors)


@pytest.mark.parametrize("keys", [{}, {"capacity": 4096}, {"order": "group_by_length"}])
def test_planning_many_rows_reads_none_of_their_tokens(keys: dict):
    count = 100_000
    records = np.zeros(count, RECORD)
    records["end"] = np.cumsum(np.clip(np.random.default_rng(0).lognormal(5.6, 0.95, count).astype(int), 16, 4096))
    nothing = np.zeros(0, np.int32)  # a token asked for would be missing
    tracemalloc.start()
    keys = {"seed": 5, "order": "random", "rows_per_step": 64, "micro_batch": 2, "pad_id": 0, **keys}
    loader = Loader(Store(nothing, nothing, records, {}), **keys)
    rows = [i for step in range(loader.steps_per_epoch) for i in loader.rows_of(step)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sorted(rows) == list(range(count))
    assert peak < 300 * count
