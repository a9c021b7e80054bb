"""Files to rows."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from swiftlite.data.address import spelled_out
from swiftlite.data.read import BadRow, Row, find_files, parse, raw_file, read_rows
from swiftlite.recipe.errors import DataError
from swiftlite.recipe.schema import DataSource


def rows(path: Path | str, **keys) -> list[Row | BadRow]:
    return list(read_rows(DataSource(path=str(path), **keys)))


def test_jsonl_values_keep_type_and_spelling(tmp_path: Path):
    file = tmp_path / "d.jsonl"
    value = {"a": "007", "b": 12, "c": None, "d": "2025-08-01", "e": [1.5, "1.5"], "f": {"no": False}, "g": "\u2028 "}
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(value, ensure_ascii=False).encode() + b"\r\n\n  \n" + b'{"a": 7}')
    one, two = rows(file)
    assert (one.value, one.source) == (value, f"{file}:1")
    assert (two.value, two.source) == ({"a": 7}, f"{file}:4")


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"a": 1', "not JSON"),
        (b"[1]", "not an object"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": "\xc4"}', "not utf-8"),
        (b"[" * 9999, "not JSON"),
    ],
)
def test_a_bad_line_is_one_bad_row(tmp_path: Path, line: bytes, kind: str):
    file = tmp_path / "d.jsonl"
    file.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    one, bad, three = rows(file)
    assert isinstance(bad, BadRow)
    assert (bad.kind, bad.line, bad.source) == (kind, 2, f"{file}:2")
    assert 0 < len(bad.excerpt) <= 100
    assert (one.line, three.line) == (1, 3)


def test_json(tmp_path: Path):
    file = tmp_path / "d.json"
    listed = [{"a": "007"}, {"a": 7}]
    for text in (json.dumps(listed, indent=1), json.dumps({"data": listed, "version": 1})):
        file.write_text(text)
        assert [row.value for row in rows(file)] == listed
        assert rows(file)[1].source == f"{file}:row 2"
    file.write_text("\n".join(map(json.dumps, listed)))  # JSON lines under the wrong name
    assert [row.value for row in rows(file)] == listed
    file.write_text('{"a": "007"}')
    assert [row.value for row in rows(file)] == listed[:1]
    file.write_text('[\n{"a": 1},\n{"a": 2')
    with pytest.raises(DataError, match=r"d\.json:3: line 3 is not JSON.*\{\"a\": 2"):
        rows(file)
    file.write_bytes(b'[\n{"a": "\xc4"}]')
    with pytest.raises(DataError, match="line 2 holds byte 0xc4, which is not utf-8"):
        rows(file)
    file.write_text("")
    with pytest.raises(DataError, match="not JSON"):
        rows(file)


@pytest.mark.parametrize(("name", "comma"), [("d.csv", ","), ("d.tsv", "\t"), ("d.csv.gz", ",")])
def test_csv_is_all_text_and_lines_count_through_quoted_newlines(tmp_path: Path, name: str, comma: str):
    text = "\ufeff" + comma.join(["prompt", "completion"]) + f'\n"a{comma}\nb"{comma}007\n\nc{comma}\nd{comma}e{comma}f\n'
    file = tmp_path / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    one, two, bad = rows(file)
    assert one.value == {"prompt": f"a{comma}\nb", "completion": "007"}
    assert two.value == {"prompt": "c", "completion": ""}
    assert (one.line, two.line, bad.line) == (2, 5, 6)
    assert bad.reason == "3 fields where the header names 2"


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"a,a\n1,2\n", "line 1 must name every column once"),
        (b'a,b\n1,"2\n', "line 2"),
        (b"a,b\n1,2\n\xc4,1\n", "line 3: byte 0xc4"),
    ],
)
def test_a_broken_csv_is_named(tmp_path: Path, data: bytes, what: str):
    file = tmp_path / "d.csv"
    file.write_bytes(data)
    with pytest.raises(DataError, match=what):
        rows(file)


def test_parquet(tmp_path: Path):
    file = tmp_path / "d.parquet"
    values = [{"a": "007", "b": {"x": 1}}, {"a": None, "b": {"y": "z"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), file)
    one, two = rows(file)
    assert (one.value, two.value) == ({"a": "007", "b": {"x": 1}}, {"b": {"y": "z"}})
    assert two.source == f"{file}:row 2"
    file.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a parquet file"):
        rows(file)


def test_folders_and_globs_in_order_of_names(tmp_path: Path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl.gz", ".hidden.jsonl", "README.md"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        data = json.dumps({"a": name}).encode()
        file.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert [row.value["a"] for row in rows(tmp_path)] == ["a.jsonl", "b.jsonl", "deep/c.jsonl.gz"]
    assert [row.value["a"] for row in rows(tmp_path / "*.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert len(rows(f"{tmp_path}/**/*.jsonl*")) == 3
    with pytest.raises(DataError, match="holds no readable file"):
        rows(tmp_path / "*.csv")
    with pytest.raises(DataError, match=r"cannot read files of type '\.md'.*\.jsonl"):
        rows(tmp_path / "README.md")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 999)[:40])
    with pytest.raises(DataError, match="cannot be read"):
        rows(tmp_path / "cut.jsonl.gz")


@pytest.mark.parametrize(
    ("path", "hint"),
    [("data/chta.jsonl", "chat.jsonl"), ("dta/chat.jsonl", "data"), ("./data/chat", "chat.jsonl"), ("data/chat", "chat.jsonl")],
)
def test_a_mistyped_path_fails_at_once_with_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str
):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chat.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"{path}: no such file.*Did you mean '{hint}'"):
        rows(path)


def test_a_hub_id_without_the_hub_is_a_short_error_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert find_files("someone/some-data") == find_files("imdb") == []
    start = time.monotonic()
    with pytest.raises(DataError, match=r"someone/some-data: is not a path here, and the hub cannot be reached") as refused:
        rows("someone/some-data")
    assert time.monotonic() - start < 10
    assert len(str(refused.value)) < 250


@pytest.mark.network
def test_the_same_where_offline_mode_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    start = time.monotonic()
    with pytest.raises(DataError, match="the hub cannot be reached"):
        rows("someone/some-data")
    assert time.monotonic() - start < 15


def test_a_hub_dataset_gives_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import datasets
    import huggingface_hub

    asked = {}

    def load(path, **keys):
        asked.update(keys, path=path)
        return datasets.Dataset.from_list([{"a": "007", "b": None}, {"a": "x", "b": "y"}])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    one, two = rows("someone/some-data", subset="en", split="train[:2]")
    assert asked == {"path": "someone/some-data", "name": "en", "split": "train[:2]", "revision": None, "streaming": False}
    assert (one.value, two.source) == ({"a": "007"}, "someone/some-data[train[:2]]:row 2")

    (one,) = rows("someone/some-data:en[train[:2]]@v1#1")
    assert asked == {"path": "someone/some-data", "name": "en", "split": "train[:2]", "revision": "v1", "streaming": False}

    def fail(*_, **__):
        raise ValueError('Unknown split "trian". Should be one of train.')

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match='Unknown split "trian"'):
        rows("someone/some-data")


def test_sample_draws_by_seed_and_keeps_the_order(tmp_path: Path):
    file = tmp_path / "d.jsonl"
    file.write_text("".join(f'{{"a": {i}}}\n' for i in range(100)))

    def drawn(seed: int) -> list[int]:
        return [row.value["a"] for row in read_rows(DataSource(path=str(file), sample=10), seed)]

    assert drawn(0) == sorted(drawn(0))
    assert drawn(0) == drawn(0) != drawn(1)
    assert len(set(drawn(0))) == 10
    with pytest.raises(DataError, match="sample asks for 101 rows, there are 100"):
        rows(file, sample=101)


def test_what_a_path_may_say_besides_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    said = {
        "org/name": {},
        "org/name:sub": {"subset": "sub"},
        "org/name[test]": {"split": "test"},
        "org/name@abc": {"revision": "abc"},
        "org/name:sub[train[:5%]]@refs/pr/1#50": {
            "subset": "sub",
            "split": "train[:5%]",
            "revision": "refs/pr/1",
            "sample": 50,
        },
        "org/name#7": {"sample": 7},
        "d.jsonl#7": {"sample": 7},
    }
    for path, keys in said.items():
        whole = spelled_out(DataSource(path=path))
        assert whole == DataSource(path=path.split("#")[0] if path[0] == "d" else "org/name", **keys), path
    assert spelled_out(DataSource(path="org/name:a", subset="a")).subset == "a"
    for path, keys in (("org/name:a", {"subset": "b"}), ("d.jsonl#7", {"sample": 8}), ("org/name[a]", {"split": "train"})):
        with pytest.raises(DataError, match="Keep one"):
            spelled_out(DataSource(path=path, **keys))
    with pytest.raises(DataError, match="#0 asks for no rows"):
        spelled_out(DataSource(path="d.jsonl#0"))


def test_what_exists_is_a_path_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a#3.jsonl", "b#2", "f[1].jsonl", "f1.jsonl"):
        (tmp_path / name).write_text('{"a": 1}\n' * 5)
    for name in ("a#3.jsonl", "b#2", "f[1].jsonl", "f?.jsonl"):
        assert spelled_out(DataSource(path=name)).path == name
    assert len(rows("f1.jsonl#2")) == 2
    assert len(rows("f[1].jsonl#2")) == 2
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="holds no readable file"):
        rows("folder/name[test]")


def test_zst_files(tmp_path: Path):
    import pyarrow

    packed = pyarrow.compress(b'{"a": "007"}\n\xff\n{"a": 1}\n', codec="zstd", asbytes=True)
    (tmp_path / "d.jsonl.zst").write_bytes(packed)
    one, bad, two = rows(str(tmp_path))
    assert (one.value, bad.kind, two.line) == ({"a": "007"}, "not utf-8", 3)
    (tmp_path / "d.jsonl.zst").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match="cannot be read"):
        rows(str(tmp_path))
    (tmp_path / "d.jsonl.zst").write_bytes(b"no zstd")
    with pytest.raises(DataError, match="cannot be read"):
        rows(str(tmp_path))


def test_reading_goes_on_behind_any_line(tmp_path: Path):
    lines = ['{"a": 1}', "", "{bad", "x" * 60, '{"a": "é\u2028"}', "\ufeff", '{"a": 7}']
    plain = tmp_path / "d.jsonl"
    plain.write_bytes("\n".join(lines).encode())
    raws = list(raw_file(plain))
    assert [raw.line for raw in raws] == [1, 2, 3, 4, 5, 6, 7] and raws[-1].offset == plain.stat().st_size
    for raw in raws:
        assert list(raw_file(plain, raw.offset, raw.line)) == raws[raw.line :]
        assert list(raw_file(plain, 0, raw.line)) == raws[raw.line :]
    assert [row and row.line for row in map(parse, raws)] == [1, None, 3, 4, 5, 6, 7]
    packed = tmp_path / "d.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert [(raw.line, raw.content, raw.offset) for raw in raw_file(packed, 0, 4)] == [
        (r.line, r.content, None) for r in raws[4:]
    ]


def test_a_line_too_long_to_read_is_passed_over_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("swiftlite.data.read.MAX_LINE", 20)
    file = tmp_path / "d.jsonl"
    file.write_bytes(b'{"a": 1}\n' + b"x" * 50 + b'\n{"a": 2}\n')
    one, bad, two = raw_file(file)
    assert (one.offset, bad.offset, two.offset) == (9, 60, 69) and isinstance(parse(bad), BadRow)
    assert list(raw_file(file, 60, 2)) == [two]


def test_parquet_goes_on_at_a_row_and_reads_no_group_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": list(range(50))}), file, row_group_size=10)
    original, groups = pyarrow.parquet.ParquetFile.iter_batches, []

    def spied(self: Any, *args: Any, **keys: Any) -> Any:
        groups.extend(keys["row_groups"])
        return original(self, *args, **keys)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", spied)
    for line in (0, 9, 10, 37, 49, 50):
        groups.clear()
        assert [(raw.line, raw.content) for raw in raw_file(file, 0, line)] == [(n + 1, {"a": n}) for n in range(line, 50)]
        assert groups == list(range(line // 10, 5))
