"""Files that cannot be trained on: the exit code, the place and the reason that the command line gives."""

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swiftlite.cli.main import run
from swiftlite.data.read import MAX_LINE, BadRow, read_rows
from swiftlite.recipe.errors import DataError
from swiftlite.recipe.schema import DataSource
from tests.data.preparing import chat, write
from tests.training import model_folder, recipe

GOOD = {"messages": chat("hi", "yo")}
LATIN = json.dumps({"messages": chat("who", "Zoé")}, ensure_ascii=False).encode("latin-1")
TWICE = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "content": "no"}]}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def sparse(path: Path, size: int) -> Path:
    """A good row, and a line of `size` bytes that takes no room on the disk."""
    with path.open("wb") as f:
        f.write(json.dumps(GOOD).encode() + b'\n{"text": "')
        f.seek(size, 1)
        f.write(b'"}\n' + json.dumps(GOOD).encode() + b"\n")
    return path


def rows(*values: Any) -> Callable[[Path], Path]:
    return lambda path: write(path, values)


def raw(data: bytes) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        path.write_bytes(data)
        return path

    return make


# name -> (the file, what stands behind its name, the reason)
BROKEN: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "wrong roles": (rows(GOOD, {"messages": [{"role": "bot", "content": "x"}]}), ":2", "unknown role: 'bot' in message 1"),
    "null messages": (rows(GOOD, {"messages": None}), ":2", "column 'messages' is null, not a list"),
    "mixed columns": (rows(GOOD, {"prompt": "a", "completion": "b"}), ":2", "no column 'messages'"),
    "bad JSON on line 3": (rows(GOOD, GOOD, '{"messages": [', GOOD), ":3", "not JSON: Expecting value at character 16"),
    "Latin-1": (raw(json.dumps(GOOD).encode() + b"\n" + LATIN + b"\n"), ":2", "is not utf-8. Convert it to UTF-8"),
    "empty": (raw(b""), "", "there are no rows"),
    "all too long": (rows(*[{"messages": chat("q" * 300, "a")}] * 3), ":1", "longer than max length 256: 3"),
    "no assistant": (rows({"messages": chat("only asked")}), ":1", "no trainable tokens"),
    "200 MB line": (lambda path: sparse(path, 200_000_000), ":2", "line too long: over 32 MiB without a line end"),
    "duplicate keys": (rows(GOOD, TWICE), ":2", "duplicate key: the key 'content' comes 2 times in one object"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_broken_file_ends_with_3_its_line_and_the_reason(
    name: str, verb: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make, line, reason = BROKEN[name]
    file = make(tmp_path / "broken.jsonl")
    recipe(tmp_path, model={"name": str(model)}, data={"train": str(file)})
    assert run([verb, str(tmp_path / "recipe.yaml")]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert f"{file}{line}: " in said
    assert reason in said
    assert "Traceback" not in said
    assert len(said) < 1500


def test_null_answers_are_kept_as_empty_and_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    null = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    file = write(tmp_path / "broken.jsonl", [GOOD, {"messages": null}])
    recipe(tmp_path, model={"name": str(model)}, data={"train": str(file)})
    assert run(["check", str(tmp_path / "recipe.yaml")]) == 0
    assert f"suspicious: 1 x empty answer: {file}:2\n" in capsys.readouterr().out


def test_a_long_line_takes_bounded_memory_and_reading_goes_on_behind_it(tmp_path: Path):
    file = sparse(tmp_path / "d.jsonl", 200_000_000)
    tracemalloc.start()
    one, bad, three = read_rows(DataSource(path=str(file)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_LINE
    assert isinstance(bad, BadRow)
    assert (one.line, bad.line, three.line) == (1, 2, 3)
    assert bad.excerpt.startswith('{"text": "')
    assert len(bad.excerpt) <= 100


def test_a_line_may_have_exactly_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("swiftlite.data.read.MAX_LINE", 20)
    for text, kept in (
        ('{"a": "1234567890"}\n{"a": 1}', 2),
        ('{"a": "12345678901"}\n{"a": 1}\n', 1),
        ('{"a": "1234567890 1"}', 0),
    ):
        file = tmp_path / "d.jsonl.gz"
        file.write_bytes(gzip.compress(text.encode()))
        got = list(read_rows(DataSource(path=str(file))))
        assert sum(not isinstance(row, BadRow) for row in got) == kept
    (tmp_path / "d.csv").write_text("a,b\n1,2\n" + "x" * 20 + ",y\n")
    with pytest.raises(DataError, match=r"d\.csv:3: line 3: over"):
        list(read_rows(DataSource(path=str(tmp_path / "d.csv"))))


def test_duplicate_keys_anywhere_in_a_row(tmp_path: Path):
    lines = ['{"a": 1, "b": {"x": 1}, "a": 2}', '{"a": [{"x": {"k": 1, "k": 1}}]}', '{"a": {"x": 1}, "b": {"x": 1}}']
    one, two, good = read_rows(DataSource(path=str(write(tmp_path / "d.jsonl", lines))))
    assert [(row.kind, row.reason.split(" in ")[0]) for row in (one, two) if isinstance(row, BadRow)] == [
        ("duplicate key", "the key 'a' comes 2 times"),
        ("duplicate key", "the key 'k' comes 2 times"),
    ]
    assert good.source == f"{tmp_path}/d.jsonl:3"
    listed = tmp_path / "d.json"
    for text, places in ((f"[{lines[2]}, {lines[1]}, {lines[0]}]", ["row 2", "row 3"]), ("\n".join(lines), ["1", "2"])):
        listed.write_text(text)
        bad = [row for row in read_rows(DataSource(path=str(listed))) if isinstance(row, BadRow)]
        assert [row.source for row in bad] == [f"{listed}:{place}" for place in places]
        assert {row.kind for row in bad} == {"duplicate key"}
        assert all(row.excerpt for row in bad)
