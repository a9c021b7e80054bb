"""What the report says about rows that can be trained and look wrong."""

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from swiftlite.cli.main import run
from swiftlite.data.findings import (
    DUPLICATE,
    ECHO,
    EMPTY,
    LISTED,
    MOJIBAKE,
    NO_END,
    TWO_BOS,
    Findings,
    lines,
    one_line,
    suspicious,
)
from swiftlite.data.formats import Conversation
from swiftlite.data.read import Row
from swiftlite.data.render import Renderer, Sample
from swiftlite.data.report import LISTED_ROWS
from tests.data.preparing import C1, chat, prep, write
from tests.fixtures import TOOLS, tok
from tests.training import CHAT, recipe

REPO = Path(__file__).resolve().parents[2]
UNCLOSED = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
UNCLOSED += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BOS_TWICE = "{{ bos_token }}{{ bos_token }}" + UNCLOSED
PLAIN = {"messages": chat("q", "a")}


def found(report: dict) -> dict[str, list[int]]:
    """Finding -> the lines where it was made."""
    return {kind: [int(row["source"].rpartition(":")[2]) for row in f["rows"]] for kind, f in report["findings"].items()}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"messages": chat("q", " ")}, EMPTY),
        ({"prompt": "q", "completion": "\n"}, EMPTY),
        ({"messages": chat("same thing", " same thing\n")}, ECHO),
        ({"prompt": "same", "completion": " same"}, ECHO),
        ({"messages": chat("q", "CafÃ© olÃ©")}, MOJIBAKE),
        ({"messages": chat("donâ€™t", "a")}, MOJIBAKE),
        ({"prompt": "q", "completion": "20 Â°C"}, MOJIBAKE),
        ({"text": "half\ufffd"}, MOJIBAKE),
        ({"text": "ðŸ˜€ smile"}, MOJIBAKE),
        ({"text": "Ð¿Ñ€Ð¸Ð²ÐµÑ‚"}, MOJIBAKE),
    ],
)
def test_each_finding_is_made_once_with_its_line_and_text(tmp_path: Path, row: dict, kind: str):
    first = {"text": "fine"} if "text" in row else {"prompt": "q", "completion": "a"} if "prompt" in row else PLAIN
    report = prep(write(tmp_path / "d.jsonl", [first, row])).report
    assert found(report) == {kind: [2]}
    (listed,) = report["findings"][kind]["rows"]
    assert 0 < len(listed["text"]) <= 100
    assert lines(report) == [f"suspicious: 1 x {kind}: {tmp_path}/d.jsonl:2"]


@pytest.mark.parametrize(
    "word", ["Café olé", "GRÜSSE", "SÃO PAULO", "MANHÃ – sim", "“IRMÔ", "ÂGÉ", "20 °C", "Ñandú", "привет", "你好 😀"]
)
def test_good_text_is_no_mojibake(tmp_path: Path, word: str):
    assert prep(write(tmp_path / "d.jsonl", [{"messages": chat(word, f"{word}!")}])).report["findings"] == {}
    if not word.isascii() and word not in ("“IRMÔ", "MANHÃ – sim"):
        broken = word.encode().decode("cp1252", "ignore")
        assert MOJIBAKE in prep(write(tmp_path / "d.jsonl", [{"messages": chat("q", broken)}])).report["findings"]


def test_no_end_of_turn(tmp_path: Path):
    file = write(tmp_path / "d.jsonl", [PLAIN, {"messages": C1}])
    report = prep(file, tok(UNCLOSED)).report
    assert found(report) == {NO_END: [1, 2]}
    assert prep(file).report["findings"] == {}
    assert prep(file, train_on="all").report["findings"] == {}
    assert prep(file, train_on="last").report["findings"] == {}
    # A cut answer is counted as cut; the row itself was fine.
    report = prep(write(file, [{"messages": chat("q", "a" * 300)}]), overlong="truncate", max_length=64).report
    assert (report["cut"], report["findings"]) == (1, {})


def test_more_than_one_bos(tmp_path: Path):
    t = tok(BOS_TWICE)
    report = prep(write(tmp_path / "d.jsonl", [PLAIN]), t).report
    assert found(report)[TWO_BOS] == [1]
    spelled, renderer = Conversation("d:1", "text", text=f"one {t.bos_token}two"), Renderer(t)
    bos = t.bos_token_id
    for conv, ids, count in [
        (spelled, [bos, 9, bos, 9, t.eos_token_id], 1),
        (spelled, [bos, 9, 9, 9, t.eos_token_id], 0),  # it was spelled and did not become one
        (Conversation("d:1", "text", text="one two"), [bos, 9, bos, 9, t.eos_token_id], 0),  # as templates that open every turn
    ]:
        seen = suspicious(Row("d", 1, {"text": conv.text}), conv, [Sample(ids, ids, "d:1")], renderer)
        assert [kind for kind, _ in seen].count(TWO_BOS) == count


def test_turns_that_call_tools_are_no_empty_answers_and_ids_end_as_they_like(tmp_path: Path):
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}]
    asked = {"role": "user", "content": "q"}
    row = {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": calls}]}
    assert prep(write(tmp_path / "d.jsonl", [row]), tok(TOOLS)).report["findings"] == {}
    assert prep(write(tmp_path / "d.jsonl", [{"input_ids": [5, 6, 7]}])).report["findings"] == {}


def test_duplicates_are_the_same_ids_and_labels_in_any_source(tmp_path: Path):
    rows = [PLAIN, {"messages": C1}, PLAIN, {"messages": chat("q", "b")}, {**PLAIN, "id": 7}]
    file = write(tmp_path / "d.jsonl", rows)
    report = prep(file).report
    assert report["findings"] == {
        DUPLICATE: {
            "count": 2,
            "rows": [{"source": f"{file}:3", "same_as": f"{file}:1"}, {"source": f"{file}:5", "same_as": f"{file}:1"}],
        }
    }
    assert lines(report) == [f"suspicious: 2 x duplicate: {file}:3 = {file}:1, {file}:5 = {file}:1"]
    assert prep(write(file, [{"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [-100, -100]}])).report["findings"] == {}


def test_pieces_of_one_row_are_no_duplicates(tmp_path: Path):
    file = write(tmp_path / "d.jsonl", [{"input_ids": [5] * 64}, {"input_ids": [5] * 32}, {"input_ids": [5] * 64}])
    got = prep(file, overlong="split", max_length=16)
    assert len(got.samples) == 10
    assert got.report["findings"][DUPLICATE] == {"count": 1, "rows": [{"source": f"{file}:3", "same_as": f"{file}:1"}]}


def test_findings_are_counted_in_full_and_listed_in_part(tmp_path: Path):
    rows = [{"messages": chat(f"q{i}", "")} for i in range(LISTED + 5)]
    report = prep(write(tmp_path / "d.jsonl", rows)).report
    assert (report["findings"][EMPTY]["count"], len(report["findings"][EMPTY]["rows"])) == (LISTED + 5, LISTED)
    assert lines(report)[0].endswith("d.jsonl:3, ...")
    assert one_line({"train": report, "eval": {"findings": {}}}) == [
        "suspicious rows in train: 25 x empty answer (data_report.json says which)"
    ]
    assert one_line({"train": {"findings": {}}}) == []


def test_histogram_and_share_add_up(tmp_path: Path):
    rows = [{"input_ids": [5] * n, "labels": [-100] * (n // 2) + [5] * (n - n // 2)} for n in (2, 3, 4, 5, 64, 65, 128)]
    got = prep(write(tmp_path / "d.jsonl", rows))
    wanted = {"2": 1, "4": 2, "8": 1, "64": 1, "128": 2}
    (source,) = got.report["sources"].values()
    assert got.report["token_histogram"] == source["token_histogram"] == wanted
    assert list(wanted) == list(got.report["token_histogram"])
    assert got.report["trained_share"] == source["trained_share"] == round(sum(s.trained for s in got.samples) / 271, 4)


def test_every_dropped_and_cut_row_is_listed_up_to_the_limit_of_its_reason(tmp_path: Path):
    rows = [{"prompt": "p", "completion": "c" * 40}] * (LISTED_ROWS + 3) + ["no json", {"prompt": "p" * 40, "completion": "c"}]
    file = write(tmp_path / "d.jsonl", [{"prompt": "a", "completion": "b"}, *rows])
    report = prep(file, overlong="truncate", max_length=32, on_bad_rows="skip").report
    kinds = Counter(row["reason"].partition(":")[0] for row in report["rows"])
    assert kinds == {"cut": LISTED_ROWS, "not JSON": 1, "no trainable tokens left within max length 32": 1}
    assert (report["cut"], report["rows_not_listed"]) == (LISTED_ROWS + 3, 3)
    last = report["rows"][-1]
    assert last["source"] == f"{file}:{len(rows) + 1}"
    assert last["text"].startswith('{"prompt": "ppp')


def test_a_million_rows_take_tens_of_bytes_each():
    findings, rows = Findings(), 200_000
    tracemalloc.start()
    for i in range(rows):
        findings.keep([Sample([i % (rows - 10)], [-100], "")])
    found = findings.as_dict(str)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found[DUPLICATE]["count"] == 10
    assert peak < 100 * rows


def test_nothing_is_said_about_the_rows_that_ship(tmp_path: Path):
    for name in ("train.jsonl", "eval.jsonl"):
        assert prep(REPO / "examples/quickstart" / name, max_length=4096).report["findings"] == {}
    assert prep(write(tmp_path / "d.jsonl", CHAT)).report["findings"] == {}


def test_check_prints_them_and_training_says_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe(tmp_path, rows=[*CHAT, CHAT[0]])
    file = tmp_path / "rows.jsonl"
    assert run(["check", str(tmp_path / "recipe.yaml")]) == 0
    assert capsys.readouterr().out.count("suspicious") == 1
    assert run(["train", str(tmp_path / "recipe.yaml")]) == 0
    said = capsys.readouterr().out
    assert said.count("suspicious rows in train: 1 x duplicate (data_report.json says which)") == said.count("suspicious") == 1
    report = json.loads((tmp_path / "out/data_report.json").read_text())["train"]
    assert report["findings"]["duplicate"]["rows"] == [{"source": f"{file}:5", "same_as": f"{file}:1"}]
