"""The quickstart's rows: well formed, right, held back where they should be, and what their generator writes."""

import json
import re
import runpy
from pathlib import Path

import pytest

from swiftlite.recipe.load import load_recipe

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples/quickstart"
ANSWER = re.compile(
    r'\{"action":"(?P<action>remind|book|order|start)","who":"(?P<who>[^"]+)","what":"(?P<what>[^"]+)",'
    r'"when":"(?P<day>Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?P<clock>\d{1,2}(?::\d\d)? [ap]m)"\}'
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def read(name: str) -> list[list[dict[str, str]]]:
    rows = [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]
    assert all(row.keys() == {"messages"} for row in rows)
    return [row["messages"] for row in rows]


def answers(name: str) -> list[dict[str, str]]:
    return [json.loads(messages[2]["content"]) for messages in read(name)]


@pytest.fixture(scope="module")
def make_data() -> dict:
    return runpy.run_path(str(FOLDER / "make_data.py"))


def test_generator_writes_the_files(make_data, tmp_path):
    make_data["main"](tmp_path)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == sorted(path.name for path in FOLDER.glob("*.jsonl")) == ["eval.jsonl", "prompts.jsonl", "train.jsonl"]
    for name in written:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name


@pytest.mark.parametrize(("name", "count"), [("train.jsonl", 300), ("eval.jsonl", 32)])
def test_answers_are_right(name, count):
    rows = read(name)
    assert len(rows) == count
    for messages in rows:
        assert [(m["role"], m.keys()) for m in messages] == [
            (role, {"role", "content"}) for role in ("system", "user", "assistant")
        ]
        request, answer = messages[1]["content"], messages[2]["content"]
        found = ANSWER.fullmatch(answer)
        assert found, answer
        assert list(json.loads(answer)) == ["action", "who", "what", "when"]
        day = next(day for day in DAYS if day.startswith(found["day"]))
        who = r"(I|me)" if found["who"] == "me" else re.escape(found["who"])
        for part in (who, re.escape(found["what"]), day, re.escape(found["clock"])):
            assert re.search(rf"(?<!\w){part}(?!\w)", request), (request, answer)
        assert request[0].isupper() and request[-1] in ".!?" and "{" not in request and "  " not in request


def test_actions_come_equally_often():
    for name, times in (("train.jsonl", 75), ("eval.jsonl", 8)):
        actions = [answer["action"] for answer in answers(name)]
        assert {action: actions.count(action) for action in actions} == dict.fromkeys(("remind", "book", "order", "start"), times)


def test_nothing_held_back_is_in_training():
    train, held_back = answers("train.jsonl"), answers("eval.jsonl")
    for key in ("who", "what", "when"):
        assert not {row[key] for row in train} & {row[key] for row in held_back}, key
    seen = " ".join(messages[1]["content"] for messages in read("train.jsonl"))
    assert not [row["who"] for row in held_back if row["who"] in seen]
    requests = [messages[1]["content"] for name in ("train.jsonl", "eval.jsonl", "prompts.jsonl") for messages in read(name)]
    assert len(set(requests)) == len(requests)


def test_prompts_have_no_answer_and_are_new(make_data):
    prompts = read("prompts.jsonl")
    assert [[m["role"] for m in messages] for messages in prompts] == [["system", "user"]] * 3
    people = {*make_data["TRAIN_PEOPLE"], *make_data["EVAL_PEOPLE"]} - {"me"}
    things = {row["what"] for name in ("train.jsonl", "eval.jsonl") for row in answers(name)}
    for messages in prompts:
        assert not [word for word in people | things if re.search(rf"\b{re.escape(word)}\b", messages[1]["content"])]


def test_every_row_has_the_same_system_prompt():
    names = ("train.jsonl", "eval.jsonl", "prompts.jsonl")
    assert {messages[0]["content"] for name in names for messages in read(name)} == {"Reply in JSON."}


def test_the_recipe_reads_these_files():
    data = load_recipe(str(ROOT / "recipes/quickstart.yaml")).recipe.data
    assert [ROOT / source.path for source in (*data.train, *data.eval)] == [FOLDER / "train.jsonl", FOLDER / "eval.jsonl"]
