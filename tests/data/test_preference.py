"""Pairs from columns to batches: forms of rows, what is refused, masks, and that the two sides of a pair stay together."""

import pytest
import torch

from swiftlite.data import cache
from swiftlite.data.formats import RowError, conversation, pick_format
from swiftlite.data.loader import Loader
from swiftlite.data.preference import check_keys
from swiftlite.data.prepare import DataRefused, prepare
from swiftlite.data.read import Row
from swiftlite.data.render import IGNORE, Renderer
from swiftlite.data.report import table
from swiftlite.data.store import Subset
from swiftlite.data.streaming import Stream
from swiftlite.recipe.errors import DataError, RecipeError
from swiftlite.recipe.schema import DataSection, DataSource
from tests.data.preparing import chat, trained, write
from tests.fixtures import CHATML, THINK, tok

ASK, GOOD, BAD = chat("hi"), chat("yo", start="assistant"), chat("no", start="assistant")
WHOLE = {"chosen": chat("hi", "yo"), "rejected": chat("hi", "no")}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def sharegpt(*values: str, start: str = "human") -> list[dict[str, str]]:
    roles = ("human", "gpt") if start == "human" else ("gpt", "human")
    return [{"from": roles[i % 2], "value": value} for i, value in enumerate(values)]


def read(row: dict, name: str = "auto", columns: dict | None = None, system: str | None = None):
    fmt = pick_format(name, row, columns or {}, "d.jsonl", "pairs")
    return conversation(Row("d.jsonl", 7, row), fmt, columns or {}, system).sides


CHATS = {
    "prompt and answers as messages": {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
    "text answers to messages": {"prompt": ASK, "chosen": "yo", "rejected": "no"},
    "messages as answers to a text": {"prompt": "hi", "chosen": GOOD, "rejected": BAD},
    "whole conversations": WHOLE,
    "whole conversations and their prompt": {"prompt": "hi", **WHOLE, "score": 1},
    "and the better one once more": {"prompt": "hi", "messages": chat("hi", "yo"), **WHOLE},
    "LLaMA-Factory's ranking": {
        "conversations": sharegpt("hi"), "chosen": sharegpt("yo", start="gpt")[0], "rejected": sharegpt("no", start="gpt")[0],
    },
    "the same of one role": {"messages": ASK, "chosen": GOOD[0], "rejected": BAD[0]},
    "alpaca's ranking": {"instruction": "hi", "input": "", "chosen": "yo", "rejected": "no"},
    "ms-swift": {"messages": chat("hi", "yo"), "rejected_response": "no"},
}  # fmt: skip


@pytest.mark.parametrize("row", CHATS.values(), ids=CHATS)
def test_every_form_is_the_same_pair(row: dict):
    sides = read(row)
    assert [side.messages for side in sides] == [chat("hi", "yo"), chat("hi", "no")]
    assert [(side.kind, side.completion_from, side.rejected) for side in sides] == [("chat", 1, None)] * 2
    sides = read(row | {"system": "S", "tools": TOOLS})
    assert [(side.messages[0]["content"], side.completion_from, side.tools) for side in sides] == [("S", 2, TOOLS)] * 2
    assert [side.messages[0]["content"] for side in read(row, system="S")] == ["S", "S"]


def test_texts_go_without_a_template():
    for row, prompt in (({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2="), ({"chosen": "4", "rejected": "5"}, "")):
        sides = read(row)
        assert [(side.kind, side.prompt, side.completion) for side in sides] == [
            ("completion", prompt, "4"),
            ("completion", prompt, "5"),
        ]
    asked = {"question": "q", "chosen": "4", "rejected": "5"}
    assert read(asked, columns={"prompt": "question"})[0].prompt == "q"
    assert read(asked | {"prompt": ""})[1].prompt == ""


def test_turns_of_longer_answers_and_a_longer_prompt():
    chosen, rejected = chat("a", "b", "c", "d", "e", "f"), chat("a", "b", "c", "x", "y", "z")
    sides = read({"chosen": chosen, "rejected": rejected, "prompt": chosen[:3]})
    assert [side.messages for side in sides] == [chosen, rejected] and sides[0].completion_from == 3
    t = tok()
    samples = [Renderer(t, train_on=on).sample(side) for on in ("assistant", "last", "completion") for side in sides]
    both, last = ["d<|im_end|>f<|im_end|>", "x<|im_end|>z<|im_end|>"], ["f<|im_end|>", "z<|im_end|>"]
    assert [trained(s, t) for s in samples] == both + last + both


BAD_ROWS = [
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equal answers"),
    ({"chosen": chat("a", "b"), "rejected": chat("a", "b")}, "equal answers"),
    ({"prompt": "a", "chosen": " ", "rejected": "b"}, "empty answer: chosen"),
    ({"prompt": "a", "chosen": "b", "rejected": None}, "empty answer: rejected"),
    ({"messages": chat("a", "b"), "rejected_response": ""}, "empty answer: rejected"),
    ({"messages": chat("a"), "rejected_response": "x"}, "no answer: chosen"),
    ({"chosen": [*chat("a", "b"), *GOOD], "rejected": chat("a", "b")}, "no answer: rejected"),
    ({"chosen": chat("a", "b", "c", "d"), "rejected": chat("a", "b")}, "prompts differ: message 3 of chosen"),
    ({"prompt": "a", "chosen": chat("a", "b", "c"), "rejected": chat("a", "c")}, "no answer: chosen"),
    ({"chosen": chat("a", "b"), "rejected": chat("x", "c")}, "prompts differ: message 1 of chosen is of role user"),
    ({"chosen": chat("a", "b", "c", "d"), "rejected": chat("a", "b", "x", "y")}, "prompts differ: message 3"),
    ({"prompt": "x", "chosen": chat("a", "b"), "rejected": chat("a", "c")}, "prompts differ: column 'prompt'"),
    ({"prompt": "a", "chosen": "b", "rejected": GOOD}, "mixed answers: chosen is text, rejected is a list"),
    ({"chosen": chat("a", "b"), "rejected": GOOD}, "mixed answers"),
    ({"chosen": GOOD, "rejected": BAD}, "no prompt"),
    ({"question": "q", "chosen": "a", "rejected": "b"}, "no prompt"),
    ({"prompt": "p", "instruction": "q", "chosen": "a", "rejected": "b"}, "two prompts: columns prompt and instruction"),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "system": "s"}, "mixed prompt: column 'system'"),
    ({"prompt": "p", "chosen": 1.5, "rejected": "b"}, "not text: chosen"),
    ({"chosen": [], "rejected": BAD}, "no messages: column 'chosen'"),
]


@pytest.mark.parametrize(("row", "what"), BAD_ROWS, ids=[what for _, what in BAD_ROWS])
def test_rows_that_are_no_pairs_are_bad_rows_with_a_reason(tmp_path, row, what):
    with pytest.raises(RowError, match=what):
        read(row)
    with pytest.raises(DataRefused, match=f"line 1: {what}"):
        pairs(write(tmp_path / "d.jsonl", [row]))


def test_what_is_eaten_settles_the_format_and_the_other_kind_is_refused():
    ranking = CHATS["LLaMA-Factory's ranking"]
    names = [pick_format("auto", ranking, {}, "d.jsonl", eats).name for eats in ("rows", "pairs")]
    assert names == ["sharegpt", "preference"]
    with pytest.raises(DataError, match=r"d.jsonl: the columns chosen, rejected are those of format preference.*objective: dpo"):
        pick_format("auto", {"chosen", "rejected"}, {}, "d.jsonl")
    with pytest.raises(DataError, match=r"are those of format messages, and pairs are wanted.*objective: sft"):
        pick_format("auto", {"messages"}, {}, "d.jsonl", "pairs")
    with pytest.raises(RecipeError, match=r"format preference gives pairs, and rows are wanted"):
        pick_format("preference", {"chosen", "rejected"}, {}, "d.jsonl")
    both = {"chosen", "rejected", "messages", "rejected_response"}
    with pytest.raises(DataError, match=r"can be read as preference \(chosen, rejected\) or as rejected_response"):
        pick_format("auto", both, {}, "d.jsonl", "pairs")
    with pytest.raises(DataError, match="no format fits the columns chosen"):
        pick_format("auto", {"chosen"}, {}, "d.jsonl", "pairs")


@pytest.mark.parametrize(
    "keys", [{"packing": True}, {"padding_free": True}, {"overlong": "split"}, {"train_on": "all"}], ids=lambda k: next(iter(k))
)
def test_keys_that_pairs_cannot_honour_are_refused(keys):
    check_keys(DataSection())
    with pytest.raises(RecipeError, match=f"data.{next(iter(keys))}: "):
        check_keys(DataSection(**keys))


def pairs(path, tokenizer=None, *, eval_split: float = 0, weight: float = 1, **keys):
    data = DataSection(train=[DataSource(path=str(path), weight=weight)], **{"max_length": 256, **keys})
    renderer = Renderer(tokenizer or tok(), train_on=data.train_on, history_mismatch=data.history_mismatch)
    return prepare(data.train, data, renderer, max_length=data.max_length, seed=0, eval_split=eval_split, eats="pairs")


def test_a_pair_is_two_neighbours_and_both_are_counted(tmp_path):
    t = tok()
    got = pairs(
        write(tmp_path / "d.jsonl", [CHATS["whole conversations"], CHATS["ms-swift"] | CHATS["text answers to messages"]]),
        t,
        format="preference",
        on_bad_rows="skip",
        max_bad_fraction=0.5,
    )
    assert len(got.samples) == 2 and got.report["dropped"] == {"two prompts": 1}
    assert [trained(s, t) for s in got.samples] == ["yo<|im_end|>", "no<|im_end|>"]
    wanted = {"read": 2, "kept": 1, "pairs": 1, "split": 0, "samples": 2, "tokens": sum(len(s.input_ids) for s in got.samples)}
    assert {name: got.report[name] for name in wanted} == wanted and "pairs 1: " in table(got.report)


def test_findings_of_either_side_count_once_a_row(tmp_path):
    rows = [{"prompt": ASK, "chosen": "Ã¼ber", "rejected": "schÃ¶n"}, {"prompt": ASK, "chosen": "hi", "rejected": "fine"}]
    found = pairs(write(tmp_path / "d.jsonl", rows)).report["findings"]
    assert {kind: about["count"] for kind, about in found.items()} == {"mojibake": 1, "answer equal to prompt": 1}


def test_over_long_pairs_fall_together(tmp_path):
    rows = [{"prompt": "p" * 10, "chosen": "c" * 5, "rejected": "d" * 30}, {"prompt": "p", "chosen": "c", "rejected": "d"}]
    file = write(tmp_path / "d.jsonl", rows)
    got = pairs(file, max_length=20)
    assert [len(s.input_ids) for s in got.samples] == [3, 3] and got.report["dropped"] == {"longer than max length 20": 1}
    cut = pairs(file, max_length=20, overlong="truncate")
    assert [len(s.input_ids) for s in cut.samples] == [16, 20, 3, 3] and cut.report["cut"] == 1
    assert [s.labels.count(IGNORE) for s in cut.samples[:2]] == [10, 10]
    with pytest.raises(DataRefused, match=r"too long: 41 tokens, data.max_length is 20"):
        pairs(file, max_length=20, overlong="error")
    alike = [{"prompt": "p", "chosen": "same start, then a", "rejected": "same start, then b"}, rows[1]]
    got = pairs(write(tmp_path / "e.jsonl", alike), max_length=10, overlong="truncate")
    assert got.report["dropped"] == {"no difference left within max length 10": 1}


def test_answers_that_the_template_makes_equal_or_alters_are_bad_rows(tmp_path):
    trims = CHATML.replace("m.content", "m.content | trim")
    with pytest.raises(DataRefused, match="equal answers: chosen and rejected are the same tokens"):
        pairs(write(tmp_path / "d.jsonl", [{"prompt": ASK, "chosen": "yo", "rejected": "yo "}]), tok(trims))
    answers = [chat(f"<think>{a}</think>{a}", "more", f"<think>{b}</think>{b}", start="assistant") for a, b in ("bc", "de")]
    with pytest.raises(DataRefused, match="altered by the chat template"):
        pairs(write(tmp_path / "e.jsonl", [{"prompt": ASK, "chosen": answers[0], "rejected": answers[1]}]), tok(THINK))


def many(path, count=23):
    return write(
        path / "many.jsonl",
        [{"prompt": f"{i}?", "chosen": "c" * (i % 7 + 1), "rejected": "r" * (i % 5 + 1)} for i in range(count)],
    )


def assert_whole(samples) -> None:
    sources = [sample.source for sample in samples]
    assert sources[0::2] == sources[1::2]


def test_held_back_and_weighted_pairs_stay_whole(tmp_path):
    got = pairs(many(tmp_path), eval_split=5, weight=1.5)
    assert len(got.held_back) == 10 and isinstance(got.samples, Subset) and len(got.samples) > 36
    assert_whole(got.held_back)
    assert_whole(got.samples)


@pytest.mark.parametrize("order", ["random", "sequential", "group_by_length"])
def test_a_step_is_dealt_in_pairs_for_any_ranks(tmp_path, order):
    samples = pairs(many(tmp_path)).samples
    keys = {"seed": 3, "order": order, "rows_per_step": 5, "pad_id": 0, "eats": "pairs"}
    one = Loader(samples, micro_batch=5, **keys)
    assert (one.units_per_epoch, one.steps_per_epoch, one.longest) == (23, 5, 2 * samples.lengths.max())
    epoch = [unit for step in range(5) for unit in one.units_of(step)]
    assert sorted(epoch) == [[2 * i, 2 * i + 1] for i in range(23)]
    one.beside["number"] = torch.arange(46) + 1.0
    two = [Loader(samples, micro_batch=2, data_rank=rank, data_size=2, **keys) for rank in range(2)]
    for step in range(5):
        (whole,), groups = one.group(step), [loader.group(step) for loader in two]
        assert len(groups[0]) == len(groups[1])
        assert_whole(samples[i] for i in one.rows_of(step))
        assert sorted(s for group in groups for micro in group for s in micro.sources) == sorted(whole.sources)
        assert whole.tensors["number"].tolist() == [i + 1 for i in one.rows_of(step)]
    short = two[1].group(4)[-1]  # of three pairs this rank has one
    assert len(short.tensors["input_ids"]) == 2 and len(short.sources) == 2
    padding = one._micro_batch([])
    assert padding.tensors["input_ids"].shape == (2, 2) and padding.tensors["number"].tolist() == [0, 0] and padding.sources == []


def test_streamed_pairs_come_whole(tmp_path):
    data = DataSection(train=[DataSource(path=str(many(tmp_path)))], streaming=True, stream_shards=4, shuffle_buffer_size=8)
    keys = {"seed": 0, "order": "random", "max_length": 64, "rows_per_step": 6, "micro_batch": 2, "pad_id": 0, "eats": "pairs"}
    one = Stream(data.train, data, Renderer(tok()), **keys)
    two = [Stream(data.train, data, Renderer(tok()), data_rank=rank, data_size=2, **keys) for rank in range(2)]
    seen = []
    for step in range(8):
        sources = [s for micro in one.group(step) for s in micro.sources]
        assert sources[0::2] == sources[1::2] and len(sources) == 12
        assert sorted(sources) == sorted(s for stream in two for micro in stream.group(step) for s in micro.sources)
        seen += sources[0::2]
    assert len(set(seen)) == 23 and one.longest == 128


def test_the_cache_keeps_rows_and_pairs_of_one_file_apart(tmp_path, monkeypatch):
    row = {"messages": chat("hi", "yo"), "rejected_response": "no"}
    keys, made = [], cache.key
    monkeypatch.setattr(cache, "key", lambda job: keys.append(made(job)) or keys[-1])
    file, data = write(tmp_path / "d.jsonl", [row]), DataSection(cache_dir=str(tmp_path / "cache"))
    counts = [
        len(prepare([DataSource(path=str(file))], data, Renderer(tok()), max_length=256, seed=0, eats=eats).samples)
        for eats in ("rows", "pairs", "rows", "pairs")
    ]
    assert counts == [1, 2, 1, 2] and len(set(keys)) == 2
