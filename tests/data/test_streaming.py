"""Streamed rows: one order for any number of ranks, every row once an epoch, and a position that reads nothing again."""

import gzip
import json
from collections import Counter
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from swiftlite.data import read as reading
from swiftlite.data.loader import MicroBatch
from swiftlite.data.prefetch import Prefetcher
from swiftlite.data.prepare import DataRefused
from swiftlite.data.render import IGNORE, Renderer
from swiftlite.data.streaming import Stream, check_keys
from swiftlite.recipe.errors import DataError, ModelError, RecipeError
from swiftlite.recipe.schema import DataSection, DataSource
from tests.data.preparing import write
from tests.fixtures import tok

RENDERER = Renderer(tok())
ORDER = {
    "one file": {"files": 1, "rows": 200},
    "more than the buffer": {"files": 1, "rows": 350},
    "few files": {"files": 3, "rows": 60},
    "a file a stream": {"files": 13, "rows": 23},
    "sequential": {"files": 2, "rows": 70, "train_sampling_strategy": "sequential"},
    "packed": {"files": 2, "rows": 150, "packing": True},
    "padding free": {"files": 1, "rows": 100, "padding_free": True},
}


# As file:line.
PINNED = "0:12 1:47 1:34 0:37 1:7 2:4 2:43 2:27 0:49 0:26 2:53 1:28"


def row(file: int, line: int) -> dict:
    """A row whose length and text depend on its place."""
    return {"prompt": f"{file}", "completion": "x" * (line * 7 % 23) + f"{line}."}


def folder(tmp_path: Path, files: int, rows: int) -> Path:
    (tmp_path / "d").mkdir(exist_ok=True)
    for n in range(files):
        write(tmp_path / "d" / f"{n:02}.jsonl", [row(n, i + 1) for i in range(rows)])
    return tmp_path / "d"


def stream(
    *paths: Path | DataSource, rank: int = 0, size: int = 1, step: int = 6, micro: int = 2, seed: int = 5, **keys
) -> Stream:
    sources = [p if isinstance(p, DataSource) else DataSource(path=str(p)) for p in paths]
    data = DataSection(
        train=sources, **{"stream_shards": 12, "shuffle_buffer_size": 240, "max_length": 64, "streaming": True, **keys}
    )
    return Stream(
        sources, data, RENDERER, seed=seed, order=data.train_sampling_strategy, max_length=data.max_length,
        rows_per_step=step, micro_batch=micro, pad_id=1, capacity=data.max_length if data.packing else None,
        padding_free=data.padding_free, data_rank=rank, data_size=size,
    )  # fmt: skip


def run(one: Stream, steps: int) -> list[list[MicroBatch]]:
    return [one.group(step) for step in range(steps)]


def joined_state(states: list[dict]) -> dict:
    """What a checkpoint keeps of the states of all ranks."""
    return json.loads(json.dumps(states[0] | {"places": {s: place for state in states for s, place in state["places"].items()}}))


def named(groups: list[list[MicroBatch]]) -> list[str]:
    """Places of the rows, without the folder."""
    return [source.rpartition("/")[2] for group in groups for batch in group for source in batch.sources]


def trained(groups: list[list[MicroBatch]]) -> list[int]:
    return sorted(i for g in groups for b in g for i in b.tensors["labels"][b.tensors["labels"] != IGNORE].tolist())


@pytest.mark.parametrize("case", ORDER)
def test_one_order_for_any_ranks_and_threads(tmp_path, case):
    keys = dict(ORDER[case])
    path = folder(tmp_path, keys.pop("files"), keys.pop("rows"))
    whole, ahead = stream(path, micro=6, **keys), Prefetcher(stream(path, micro=6, **keys), 2, 1000)
    steps = 60
    expected = [whole.group(step) for step in range(steps)]
    for step in range(steps):
        assert named([ahead.group(step)]) == named([expected[step]])
    ahead.close()
    for size in (2, 3, 5):
        ranks = [stream(path, rank=r, size=size, **keys) for r in range(size)]
        for step in range(steps):
            groups = [rank.group(step) for rank in ranks]
            assert len({len(group) for group in groups}) == 1
            assert sorted(named(groups)) == sorted(named([expected[step]]))
            assert trained(groups) == trained([expected[step]])


@pytest.mark.parametrize("case", [c for c in ORDER if c != "packed"])
def test_every_row_once_an_epoch(tmp_path, case):
    keys = dict(ORDER[case])
    files, rows = keys.pop("files"), keys.pop("rows")
    one = stream(folder(tmp_path, files, rows), step=1, micro=1, **keys)
    total = files * rows
    seen = named([one.group(step) for step in range(3 * total)])
    everything = {f"{n:02}.jsonl:{i + 1}" for n in range(files) for i in range(rows)}
    # Around the end of an epoch rows of two epochs mix, as far as blocks of unlike size let one stream get ahead of others.
    window = one.layout.streams * (rows if one.own else one.layout.rows)
    for epoch in (1, 2):
        counts = Counter(seen[: epoch * total + window])
        assert counts.keys() == everything and min(counts.values()) >= epoch
        assert max(Counter(seen[: max(0, epoch * total - window)]).values(), default=0) <= epoch
    if case == "sequential":
        assert seen == 3 * sorted(everything, key=lambda place: (place[:2], int(place.partition(":")[2])))
    else:
        assert seen[:total] != seen[total : 2 * total] and seen[:40] != sorted(seen[:40])


class Counting:
    """A file that counts the bytes that are read of it."""

    def __init__(self, stream, name: str, read: Counter) -> None:
        self.stream, self.name, self.read = stream, name, read

    def readline(self, size: int = -1) -> bytes:
        line = self.stream.readline(size)
        self.read[self.name] += len(line)
        return line

    def seek(self, offset: int) -> int:
        return self.stream.seek(offset)

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stream.close()


@pytest.mark.parametrize("case", ["more than the buffer", "few files", "a file a stream", "packed", "sequential"])
@pytest.mark.parametrize("size", [1, 3])
def test_resume_in_the_middle_of_epoch_2(tmp_path, monkeypatch, case, size):
    keys = dict(ORDER[case])
    files, rows = keys.pop("files"), keys.pop("rows")
    path = folder(tmp_path, files, rows)
    whole = stream(path, micro=6, **keys)
    per_epoch = 50 if case == "packed" else files * rows // 6
    stop = per_epoch + per_epoch // 2
    expected = [whole.group(step) for step in range(stop + 20)]
    before = [stream(path, rank=r, size=2, **keys) for r in range(2)]
    for step in range(stop + 3):  # some steps are prepared ahead of the one that is saved
        for rank in before:
            rank.group(step)
    state = joined_state([rank.state(stop) for rank in before])
    assert len(json.dumps(state)) < 60 * len(state["places"])
    read: Counter[str] = Counter()
    opened = reading._open
    monkeypatch.setattr(reading, "_open", lambda file: Counting(opened(file), file.name, read))
    ranks = [stream(path, rank=r, size=size, **keys) for r in range(size)]
    for rank in ranks:
        rank.load_state(state)
    for step in range(stop, stop + 20):
        groups = [rank.group(step) for rank in ranks]
        assert sorted(named(groups)) == sorted(named([expected[step]])), f"step {step}"
        assert trained(groups) == trained([expected[step]])
        if step == stop and case == "more than the buffer":
            # Ranks read from the earliest block in use up to the last: a shuffle buffer, and no file from its start.
            total = (path / "00.jsonl").stat().st_size
            assert 0 < read["00.jsonl"] < 1.1 * size * total * 240 / 350
    with pytest.raises(ValueError, match="in order"):
        ranks[0].group(3)


def test_resume_seeks_to_the_block(tmp_path, monkeypatch):
    """Of a file that was read through all but a few rows, and of those before it, nothing is read again."""
    path = folder(tmp_path, 3, 100)
    keys = {"train_sampling_strategy": "sequential", "step": 10, "micro": 10}
    one = stream(path, **keys)
    expected = [one.group(step) for step in range(30)]
    assert named(expected[29:]) == [f"02.jsonl:{n}" for n in range(91, 101)]
    read: Counter[str] = Counter()
    opened = reading._open
    monkeypatch.setattr(reading, "_open", lambda file: Counting(opened(file), file.name, read))
    two = stream(path, **keys)
    two.load_state(one.state(29))
    assert named([two.group(29)]) == named(expected[29:])
    lines = (path / "02.jsonl").read_bytes().splitlines(keepends=True)
    # Stream 0 has its last row at line 85, and 86 to 90 are the last of others.
    assert read == {"02.jsonl": sum(map(len, lines[78:]))}


def test_I08_a_small_source_begins_anew_as_often_as_steps_ask(tmp_path):
    """Ten rows, more streams than rows: whole epochs, and the same rows behind a resume as without one."""
    path = folder(tmp_path, 1, 10)
    keys = {"step": 1, "micro": 1, "stream_shards": 64, "shuffle_buffer_size": 10000}
    one = stream(path, **keys)
    seen = named([one.group(step) for step in range(20)])
    assert sorted(seen[:10]) == sorted(seen[10:]) == sorted(f"00.jsonl:{n}" for n in range(1, 11)) and seen[:10] != seen[10:]
    for stop in (10, 15):
        two = stream(path, **keys)
        two.load_state(one.state(stop))
        assert named([two.group(step) for step in range(stop, 20)]) == seen[stop:]


def test_order_is_pinned(tmp_path):
    """A new library or machine must not reorder a run that is to be resumed: these are the rows of the first release."""
    one = stream(folder(tmp_path, 3, 60))
    assert " ".join(named(run(one, 2))) == " ".join(f"0{place.replace(':', '.jsonl:')}" for place in PINNED.split())


def test_packs_are_made_within_a_block_and_kept_apart(tmp_path):
    one = stream(folder(tmp_path, 2, 150), packing=True)
    batches = [batch for step in range(40) for batch in one.group(step)]
    assert max(len(batch.sources) for batch in batches) > 2, "nothing was packed"
    for batch in batches:
        assert batch.tensors["input_ids"].shape[1] <= 64
        assert int((batch.tensors["position_ids"] * batch.tensors["attention_mask"] == 0).sum()) >= len(batch.sources)
    tokens = sum(int(batch.tensors["attention_mask"].sum()) for batch in batches)
    assert tokens > 0.85 * 64 * sum(len(batch.tensors["input_ids"]) for batch in batches)
    rows = Counter(named([batches]))
    assert len(rows) == 300 and max(rows.values()) <= 2 + min(rows.values())


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "json", "csv"])
def test_other_files_give_the_rows_that_jsonl_gives(tmp_path, kind):
    plain = folder(tmp_path, 2, 150)
    other = tmp_path / "other"
    other.mkdir()
    for n, file in enumerate(sorted(plain.iterdir())):
        rows, to = [row(n, i + 1) for i in range(150)], other / f"{n:02}.{kind}"
        if kind == "jsonl.gz":
            to.write_bytes(gzip.compress(file.read_bytes()))
        elif kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), to, row_group_size=40)
        elif kind == "json":
            to.write_text(json.dumps(rows))
        else:
            to.write_text("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in rows))
    one, two = stream(other if kind == "csv" else plain), stream(other)  # the first row of csv is on line 2, which moves draws
    expected = [trained([one.group(step)]) for step in range(70)]
    assert [trained([two.group(step)]) for step in range(65)] == expected[:65]
    again = stream(other)
    again.load_state(two.state(60))
    assert [trained([again.group(step)]) for step in range(60, 70)] == expected[60:]


def test_hub_shards_are_parts(monkeypatch):
    fetched: Counter[int] = Counter()

    def generate(shards):
        for shard in shards:
            for n in range(30):
                fetched[shard] += 1
                yield row(shard, n + 1) | {"extra": None}

    def load(path, **keys):
        assert (path, keys["split"], keys["streaming"]) == ("org/set", "train[x]", True)
        return datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": list(range(14))})

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, *args, **keys: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = DataSource(path="org/set", split="train[x]")
    one = stream(source)
    assert len(one.parts) == 14 and one.own
    expected = [named([one.group(step)]) for step in range(40)]
    assert len({source for step in expected for source in step}) > 200
    state = one.state(20)
    fetched.clear()
    two = stream(source, rank=1, size=2)
    two.load_state(state)
    assert named([two.group(20)]) == expected[20][1::2]
    assert len(fetched) == 3, "only the shards of the streams that this step takes from"

    def broken(shards):
        yield row(0, 1)
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *args, **keys: datasets.IterableDataset.from_generator(broken, gen_kwargs={"shards": [0]}),
    )
    with pytest.raises(DataError, match=r"org/set\[train\[x\]\]: cannot be read: .*reset by peer"):
        stream(source).group(0)


def test_bad_rows_stop_the_stream_or_are_counted(tmp_path):
    rows: list = [row(0, n + 1) for n in range(400)]
    rows[307] = "{not json"
    file = write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(DataRefused, match=r"bad.jsonl:308: .*not JSON.*on_bad_rows: skip"):
        run(stream(file), 100)
    one = stream(file, on_bad_rows="skip")
    places = named(run(one, 100))
    assert "bad.jsonl:308" not in places and "bad.jsonl:309" in places
    report = one.report()
    assert report["dropped"] == {"not JSON": 1} and report["sources"][str(file)]["format"] == "prompt_completion"
    assert 400 == report["read"] and report["kept"] == 399, "the second epoch is not counted"
    for n in range(20):
        rows[n * 10 + 1] = {"prompt": "no answer"}
    file = write(tmp_path / "worse.jsonl", rows)
    with pytest.raises(DataRefused, match=r"21 of 400 rows are bad, more than data.max_bad_fraction 0.01"):
        run(stream(file, on_bad_rows="skip"), 100)
    file = write(tmp_path / "large.jsonl", [*rows, *rows, *rows, *rows, *rows])
    with pytest.raises(DataRefused, match=r" of 1\d\d\d rows are bad"):
        run(stream(file, on_bad_rows="skip"), 300)


def test_nothing_to_train_on_is_said_at_once(tmp_path):
    file = write(tmp_path / "long.jsonl", [{"prompt": "p", "completion": "x" * 100}] * 30)
    with pytest.raises(DataRefused, match=r"all 30 rows were dropped \(30 longer than max length 64\)"):
        stream(file).group(0)
    with pytest.raises(DataRefused, match="there are no rows"):
        stream(write(tmp_path / "empty.jsonl", [])).settle()
    with pytest.raises(DataError, match="no such file"):
        stream(tmp_path / "none.jsonl")


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_a_stream_whose_rows_are_all_left_out_leaves_its_place_empty(tmp_path, order):
    """Ten rows in ten streams, one row too long: no rank waits for it forever, and the others come as often as before."""
    rows = [row(0, n + 1) for n in range(10)]
    rows[3]["completion"] = "x" * 100
    file = write(tmp_path / "d.jsonl", rows)
    keys = {"step": 10, "micro": 1, "train_sampling_strategy": order}
    ranks = [stream(file, rank=r, size=10, **keys) for r in range(10)]
    alone = stream(file, **keys)
    empty = 0
    for step in range(12):
        if step == 7:
            state = joined_state([rank.state(7) for rank in ranks])
            ranks = [stream(file, rank=r, size=10, **keys) for r in range(10)]
            for rank in ranks:
                rank.load_state(state)
        groups = [rank.group(step) for rank in ranks]
        assert [len(group) for group in groups] == [1] * 10
        assert all(batch.tensors["input_ids"].shape[1] > 1 for group in groups for batch in group)
        assert sorted(named(groups)) == sorted(named([alone.group(step)]))
        empty += sum(not group[0].sources for group in groups)
    assert empty == 12 if order == "sequential" else 0 <= empty < 12


def test_weight_repeats_rows_of_a_source(tmp_path):
    path = folder(tmp_path, 2, 100)
    twice = DataSource(path=str(path / "00.jsonl"), weight=2.5)
    part = DataSource(path=str(path / "01.jsonl"), weight=0.3)
    one = stream(twice, part, step=1, micro=1, stream_shards=1, shuffle_buffer_size=100)
    seen = Counter(named([one.group(step) for step in range(280)]))
    first = [n for place, n in seen.items() if place.startswith("00")]
    second = [n for place, n in seen.items() if place.startswith("01")]
    assert len(first) == 100 and {*first} == {2, 3} and 35 < first.count(3) < 65
    assert {*second} == {1} and 15 < len(second) < 45
    assert one.report()["sources"][twice.path]["read"] == 100


def test_every_sample_is_checked(tmp_path):
    def refuse(sample):
        if sample.source.endswith(":5"):
            raise ModelError("too large an id", where=sample.source)

    one = stream(folder(tmp_path, 1, 20))
    one.check = refuse
    with pytest.raises(ModelError, match=r"00.jsonl:5: too large an id"):
        run(one, 4)


def test_settle_shows_the_first_rows_and_changes_nothing(tmp_path):
    path = folder(tmp_path, 2, 50)
    one, two = stream(path), stream(path)
    assert [len(one.settle(n)) for n in (1, 3)] == [1, 3]
    assert named([one.group(0)]) == named([two.group(0)])
    assert one.report()["read"] == two.report()["read"] > 0


def test_a_state_of_some_ranks_is_refused(tmp_path):
    one = stream(folder(tmp_path, 1, 50), size=2)
    one.group(0)
    with pytest.raises(ValueError, match="5 of 10 streams"):
        stream(tmp_path / "d").load_state(one.state(1))


def test_fingerprint_tells_other_files(tmp_path):
    path = folder(tmp_path, 2, 50)
    before = stream(path).fingerprint
    (tmp_path / "moved").mkdir()
    path.rename(tmp_path / "moved" / "d")
    assert stream(tmp_path / "moved" / "d").fingerprint == before
    (tmp_path / "moved" / "d" / "01.jsonl").write_text("")
    assert stream(tmp_path / "moved" / "d").fingerprint != before


@pytest.mark.parametrize(
    ("keys", "steps", "named"),
    [
        ({}, None, "train.max_steps"),
        ({"eval_split": 0.1}, 5, "data.eval_split"),
        ({"train_sampling_strategy": "group_by_length"}, 5, "data.train_sampling_strategy"),
        ({"train": [DataSource(path="d.jsonl#5")]}, 5, "d.jsonl: 5 rows"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_by_name(keys, steps, named):
    with pytest.raises(RecipeError, match=f"^{named}"):
        check_keys(DataSection(streaming=True, **keys), steps)
    check_keys(DataSection(streaming=True, train=[DataSource(path="d.jsonl")]), 5)


def test_a_block_without_a_usable_row_is_passed_over_when_packing(tmp_path):
    rows = [row(0, n + 1) for n in range(200)]
    for n in range(40, 120):
        rows[n]["completion"] = "x" * 100
    one = stream(write(tmp_path / "d.jsonl", rows), packing=True, stream_shards=4, shuffle_buffer_size=80)
    assert one.settle() and one.layout.rows == 32
    seen = Counter(named(run(one, 30)))
    assert len(seen) == 120 and not {f"d.jsonl:{n + 1}" for n in range(40, 120)} & seen.keys()
