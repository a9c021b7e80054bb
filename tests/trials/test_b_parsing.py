"""Trials of kind B: dataset parsing, format, encoding, size."""

import os
import time
from pathlib import Path

import pytest

from swiftlite.data.prepare import DataRefused, Prepared
from swiftlite.recipe.errors import DataError
from swiftlite.train.plan import make_plan
from tests.data.preparing import chat, prep, trained, write
from tests.fixtures import CHATML, LLAMA3, TOOLS, tok
from tests.training import recipe


def call(**arguments: object) -> dict:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]}


def test_B01_fields_of_mixed_type_load_unchanged(tmp_path: Path):
    t = tok(TOOLS)
    text, number = prep(write(tmp_path / "d.jsonl", [call(t="2025-08-01"), call(t=169)]), t).samples
    assert '"t": "2025-08-01"' in t.decode(text.input_ids)
    assert '"t": 169}' in t.decode(number.input_ids)


def test_B02_every_row_keeps_its_own_keys(tmp_path: Path):
    t = tok(TOOLS)
    one, two = prep(write(tmp_path / "d.jsonl", [call(city="Oslo"), call(query="x", k=3)]), t).samples
    assert "query" not in t.decode(one.input_ids)
    assert "null" not in t.decode(one.input_ids)
    assert "city" not in t.decode(two.input_ids)


def test_B02_sibling_parquet_fills_no_nulls_in(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([call(city="Oslo"), call(query="x", k=3)])
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    t = tok(TOOLS)
    one, two = prep(tmp_path / "d.parquet", t).samples
    assert trained(one, t) == '{"name": "f", "arguments": {"city": "Oslo"}}<|im_end|>'
    assert trained(two, t) == '{"name": "f", "arguments": {"query": "x", "k": 3}}<|im_end|>'


def test_B04_a_legacy_encoding_is_named_with_its_place(tmp_path: Path):
    file = tmp_path / "d.jsonl"
    good = b'{"prompt": "a", "completion": "b"}\n'
    file.write_bytes(good + '{"prompt": "你好", "completion": "b"}\n'.encode("gbk"))
    start = time.monotonic()
    with pytest.raises(DataError) as stopped:
        prep(file)
    assert time.monotonic() - start < 10
    message = str(stopped.value)
    assert message.startswith(f"{file}:2: ")
    assert "line 2" in message
    assert "utf-8" in message.lower()
    assert "iconv" in message
    assert list(tmp_path.iterdir()) == [file]


def test_B06_numbers_written_as_text_stay_text(tmp_path: Path):
    t = tok()
    rows = [{"prompt": "code?", "completion": "007"}, {"prompt": "code?", "completion": 12}]
    text, number = prep(write(tmp_path / "d.jsonl", rows), t).samples
    assert trained(text, t) == "007</s>"
    assert trained(number, t) == "12</s>"


@pytest.mark.parametrize("value", ["1.50", "true", "1e5", "{}"])
def test_B06_sibling_values_without_one_spelling_are_refused_by_name(tmp_path: Path, value: str):
    rows = ['{"prompt": "a", "completion": "b"}', f'{{"prompt": "code?", "completion": {value}}}']
    with pytest.raises(DataRefused, match=r"line 2: not text: completion is"):
        prep(write(tmp_path / "d.jsonl", rows))


def ten_rows() -> list[dict]:
    good = [{"messages": chat("a", f"b{i}")} for i in range(6)]
    two_users = [{"messages": [{"role": "user", "content": "x"}, *chat("a", "b")]}] * 2
    bot = [{"messages": [{"role": "user", "content": "x"}, {"role": "bot", "content": "y"}]}] * 2
    return good[:3] + two_users + bot + good[3:]


def test_B07_every_row_is_accounted_for(tmp_path: Path):
    got = prep(write(tmp_path / "d.jsonl", ten_rows()), tok(CHATML), on_bad_rows="skip", max_bad_fraction=0.2)
    report = got.report
    assert (report["read"], report["kept"], report["dropped"]) == (10, 8, {"unknown role": 2})
    assert len(got.samples) == 8
    assert [row["source"] for row in report["rows"]] == [f"{tmp_path}/d.jsonl:6", f"{tmp_path}/d.jsonl:7"]
    assert all("'bot'" in row["reason"] for row in report["rows"])


def test_B07_too_many_bad_rows_stop_the_run(tmp_path: Path):
    file = write(tmp_path / "d.jsonl", ten_rows())
    with pytest.raises(DataRefused, match="2 of 10 rows are bad") as stopped:
        prep(file, on_bad_rows="skip", max_bad_fraction=0.1)
    assert (stopped.value.report["read"], stopped.value.report["kept"]) == (10, 8)
    with pytest.raises(DataRefused, match="line 6: unknown role: 'bot'") as stopped:
        prep(file)
    assert f"{file}:7" in str(stopped.value)  # all of them at once, not one a run


def kept_sets(folder: Path) -> list[str]:
    return [p.name for p in folder.glob("[!.]*")]


def test_B09_the_cache_knows_file_bytes_and_template(tmp_path: Path):
    cache, t = str(tmp_path / "cache"), tok()

    def run(template: str | None = None) -> tuple[Prepared, bool]:
        got = prep(tmp_path / "d.jsonl", t, cache_dir=cache, chat_template=template)
        return got, got.cached is not None

    file = write(tmp_path / "d.jsonl", [{"messages": chat("hi", "yo")}])
    before = file.stat()
    assert (trained(run()[0].samples[0], t), run()[1]) == ("yo<|im_end|>", True)
    write(file, [{"messages": chat("hi", "no")}])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second, hit = run()
    assert (trained(second.samples[0], t), hit) == ("no<|im_end|>", False)
    third, hit = run(LLAMA3)
    assert third.samples[0].input_ids != second.samples[0].input_ids and not hit
    fourth, hit = run(LLAMA3)
    assert fourth.samples[0] == third.samples[0] and hit
    assert len(kept_sets(tmp_path / "cache")) == 3


def test_B10_the_output_folder_is_no_part_of_the_data(tmp_path: Path):
    cache = tmp_path / "cache"
    said = []
    for name in ("r1", "r2"):
        keys = {"model": {"add_tokens": ["<|new|>"]}, "data": {"cache_dir": str(cache)}, "output": str(tmp_path / name)}
        said.append("\n".join(make_plan(recipe(tmp_path, **keys)).lines()))
    assert [f"from the cache {cache}" in lines for lines in said] == [False, True]
    assert len(kept_sets(cache)) == 1


def raw(length: int) -> dict:
    return {"input_ids": [10 + i % 200 for i in range(length)]}


def test_B11_one_policy_for_long_rows_with_a_count(tmp_path: Path):
    file = write(tmp_path / "d.jsonl", [raw(n) for n in (10, 20, 30, 200)])
    dropped = prep(file, max_length=32)
    assert [len(s.input_ids) for s in dropped.samples] == [10, 20, 30]
    assert dropped.report["dropped"] == {"longer than max length 32": 1}
    cut = prep(file, max_length=32, overlong="truncate")
    assert [len(s.input_ids) for s in cut.samples] == [10, 20, 30, 32]
    assert (cut.report["cut"], cut.report["dropped"]) == (1, {})
    assert cut.report["trained_tokens"] == 9 + 19 + 29 + 31
    with pytest.raises(DataRefused, match="line 4: too long: 200 tokens"):
        prep(file, max_length=32, overlong="error", on_bad_rows="skip", max_bad_fraction=1.0)


def test_B13_a_broken_line_is_named(tmp_path: Path):
    good = '{"prompt": "a", "completion": "b"}'
    file = write(tmp_path / "d.jsonl", [good, good, good[:-1]])
    with pytest.raises(DataRefused) as stopped:
        prep(file)
    message = str(stopped.value)
    assert stopped.value.exit_code == 3
    assert message.startswith(f"{file}:3: line 3: not JSON")
    assert good[:-1] in message
