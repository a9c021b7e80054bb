"""Every row is accounted for; the report, the preview and the dump say so."""

import json
from pathlib import Path

import pytest

from swiftlite.data.prepare import DataRefused, prepare
from swiftlite.data.render import IGNORE, Renderer, Sample
from swiftlite.data.report import LISTED_ROWS, dump, preview, table
from swiftlite.recipe.errors import DataError, RecipeError
from swiftlite.recipe.schema import DataSection, DataSource
from tests.data.preparing import C1, chat, prep, write
from tests.fixtures import tok


def many(count: int) -> list[dict]:
    return [{"messages": chat("q", f"answer {i}")} for i in range(count)]


def test_sources_keep_their_own_format_columns_and_counts(tmp_path: Path):
    write(tmp_path / "a.jsonl", many(3))
    write(tmp_path / "b.jsonl", [{"q": "hi", "a": "yo", "text": "x"}] * 2)
    sources = [
        DataSource(path=str(tmp_path / "a.jsonl"), name="chat", system="be brief"),
        DataSource(path=str(tmp_path / "b.jsonl"), format="prompt_completion", columns={"prompt": "q", "completion": "a"}),
        DataSource(path=str(tmp_path / "b.jsonl"), name="chat", sample=1),
    ]
    data = DataSection(train=sources, format="auto")
    t = tok()
    got = prepare(sources, data, Renderer(t), max_length=256, seed=0)
    counts = {name: (s["format"], s["read"], s["kept"]) for name, s in got.report["sources"].items()}
    assert counts == {
        "chat": ("messages", 3, 3),
        f"{tmp_path}/b.jsonl": ("prompt_completion", 2, 2),
        "chat #2": ("text", 1, 1),
    }
    assert "be brief" in t.decode(got.samples[0].input_ids)
    assert got.report["tokens"] == sum(len(s.input_ids) for s in got.samples)
    assert got.report["trained_tokens"] == sum(s.trained for s in got.samples)
    assert got.samples[0].source == f"{tmp_path}/a.jsonl:1"
    assert len(table(got.report).splitlines()) == 5


def test_no_rows_at_all(tmp_path: Path):
    with pytest.raises(DataRefused, match=r"d\.jsonl: there are no rows") as stopped:
        prep(write(tmp_path / "d.jsonl", ["", " "]))
    assert stopped.value.exit_code == 3


def test_rows_without_an_assistant_are_dropped_by_name(tmp_path: Path):
    file = write(tmp_path / "d.jsonl", [{"messages": chat("only a question")}, *many(1)])
    report = prep(file).report
    assert report["dropped"] == {"no trainable tokens": 1}
    assert report["rows"][0]["source"] == f"{file}:1"
    with pytest.raises(DataRefused, match="no trainable tokens: all 1 rows were dropped"):
        prep(write(tmp_path / "d.jsonl", [{"messages": chat("only a question")}]))


def test_a_cut_that_leaves_no_answer_drops_the_row(tmp_path: Path):
    rows = [{"prompt": "p" * 40, "completion": "c"}, {"prompt": "p", "completion": "c" * 40}]
    got = prep(write(tmp_path / "d.jsonl", rows), overlong="truncate", max_length=32)
    assert [len(s.input_ids) for s in got.samples] == [32]
    assert got.report["cut"] == 1
    assert got.report["dropped"] == {"no trainable tokens left within max length 32": 1}


def test_reading_stops_soon_after_bad_rows_and_shows_them_together(tmp_path: Path):
    file = write(tmp_path / "d.jsonl", many(2) + [{"messages": 7}] * 500)
    with pytest.raises(DataRefused, match="20 bad among the first 22 rows; the first, line 3") as stopped:
        prep(file)
    assert [f"{file}:{line}" in str(stopped.value) for line in (3, 4, 22, 23)] == [True, True, True, False]
    assert stopped.value.report["read"] == 22


def test_skipping_counts_all_and_lists_some(tmp_path: Path):
    file = write(tmp_path / "d.jsonl", many(1) + ["no json"] * (LISTED_ROWS + 5))
    report = prep(file, on_bad_rows="skip", max_bad_fraction=1.0).report
    assert report["dropped"] == {"not JSON": LISTED_ROWS + 5}
    assert (len(report["rows"]), report["rows_not_listed"]) == (LISTED_ROWS, 5)
    assert f"and {LISTED_ROWS - 5:,} more rows" in table(report)
    json.dumps(report)


def test_a_mixed_file_is_read_by_the_format_of_its_first_row(tmp_path: Path):
    with pytest.raises(DataRefused, match="line 2: missing column: no column 'messages'"):
        prep(write(tmp_path / "d.jsonl", [*many(1), {"prompt": "a", "completion": "b"}]))


def test_notes_of_the_renderer_are_in_the_report(tmp_path: Path):
    report = prep(write(tmp_path / "d.jsonl", many(1)), tok(None)).report
    assert "chatml-lite" in report["notes"][0]
    assert "note: the model has no chat template" in table(report)


def test_eval_split_is_drawn_by_row_and_never_overlaps(tmp_path: Path):
    file = write(tmp_path / "d.jsonl", many(50))
    got = prep(file, eval_split=0.2)
    held = {s.source for s in got.held_back}
    assert (len(held), len(got.samples), got.report["held_back"]) == (10, 40, 10)
    assert held.isdisjoint(s.source for s in got.samples)
    assert {s.source for s in prep(file, eval_split=10).held_back} == held
    assert {s.source for s in prep(file, eval_split=10, seed=1).held_back} != held
    # The same rows whatever else is dropped: a long row more moves none of the others.
    rows = many(50)
    rows[7] = {"messages": chat("q" * 300, "too long")}
    assert len({s.source for s in prep(write(file, rows), eval_split=10).held_back} - held) <= 1
    assert prep(file).held_back == []


@pytest.mark.parametrize(
    ("split", "what"), [(1.5, "neither a whole number"), (50, "hold back 50 of 50"), (0.999, "hold back 50")]
)
def test_eval_split_that_cannot_be(tmp_path: Path, split: float, what: str):
    with pytest.raises(RecipeError, match=what):
        prep(write(tmp_path / "d.jsonl", many(50)), eval_split=split)


def test_unclear_columns_stop_even_when_bad_rows_are_skipped(tmp_path: Path):
    file = write(tmp_path / "d.jsonl", [{"messages": C1, "text": "x"}])
    with pytest.raises(DataError, match=r"data\.format: messages \| text"):
        prep(file, on_bad_rows="skip", max_bad_fraction=1.0)
    assert len(prep(file, format="messages").samples) == 1


def test_dump_is_what_the_model_gets(tmp_path: Path):
    got = prep(write(tmp_path / "d.jsonl", many(2)))
    dump([[s] for s in got.samples], tmp_path / "dump.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "dump.jsonl").read_text("utf-8").splitlines()]
    for line, sample in zip(lines, got.samples, strict=True):
        assert list(line) == ["input_ids", "labels", "position_ids", "source"]
        assert (line["input_ids"], line["labels"]) == (sample.input_ids, sample.labels)
        assert line["position_ids"] == list(range(len(sample.input_ids)))
        assert line["source"] == [sample.source]


def test_preview_marks_what_is_trained(tmp_path: Path):
    t = tok()
    samples = prep(write(tmp_path / "d.jsonl", [{"messages": C1}] * 5), t).samples
    plain = preview(samples, t)
    assert plain.count("--- ") == 3
    assert plain.startswith(f"--- {tmp_path}/d.jsonl:1: 50 tokens, 6 trained\n<|im_start|>user\nhi<|im_end|>\n")
    assert "<|im_start|>assistant\n{+yo<|im_end|>+}\n" in plain
    assert "\x1b[32myo<|im_end|>\x1b[0m" in preview(samples, t, count=1, colour=True)
    assert "{+" not in preview(samples, t, colour=True)
    long = Sample([5] * 2000, [IGNORE] * 2000, "d:1")
    assert "[... 1,600 characters ...]" in preview([long], t)
