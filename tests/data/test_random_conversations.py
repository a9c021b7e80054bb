"""Random conversations over all templates: ids are the template's, trained is what inference would have to write, no more."""

import random
from itertools import groupby
from typing import Any

import pytest

from swiftlite.data.formats import MESSAGES, RowError, conversation
from swiftlite.data.read import Row
from swiftlite.data.render import IGNORE, Renderer, Sample
from tests.templates import FAMILIES, TOOLS_LIST, Family, Messages, say

ROWS = 60
# Letters of each side occur on no other, nor in any template: one look at a label tells whose text it is.
OTHERS = ["Ж", "Ю", "Д ", "\n", " ", "щ\n", "🛑", "<thinc>", "|>", "{{ Щ }}", '"', "\\"]
ANSWERS = ["ω", "Ω ", "\n", " ", "φ\n\n", "👍", "<thinc>", "<|", "{% Ψ %}", '"', "\\", "ψ:"]
FORBIDDEN = set("ЖЮДщЩ🛑")
ALTERNATING = {"gemma2", "gemma3", "mistral3", "mistral7"}
# After a first answer qwen3 shows inference the answer's reasoning, and takes it out once there is a second: no row fits.
ONE_ANSWER = {*ALTERNATING, "qwen3", "qwen3 without thinking"}
NO_SYSTEM = {"gemma2", "mistral3"}
NO_TOOLS = {"gemma2", "gemma3", "phi3"}
TRAINABLE = [name for name in FAMILIES if name != "deepseek r1"]


def text(chance: random.Random, pieces: list[str]) -> str:
    return "".join(chance.choices(pieces, k=chance.randint(0, 6)))


def answer(chance: random.Random, name: str) -> dict[str, Any]:
    content = text(chance, ANSWERS)
    if name == "qwen3" and chance.random() < 0.4:
        content = f"<think>\n{text(chance, ANSWERS).strip()}\n</think>\n\n{content.strip()}"
    return {"role": "assistant", "content": content}


def tool_use(chance: random.Random, name: str) -> Messages:
    """A call, its results, and the answer."""
    count = 1 if name in ("llama3", "glm4") else chance.randint(1, 2)
    calls: list[dict[str, Any]] = []
    for n in range(count):
        arguments = {"place": text(chance, ANSWERS), "days": chance.randint(0, 9)}
        calls.append({"id": f"call0000{n}", "type": "function", "function": {"name": "weather", "arguments": arguments}})
    results = [{"role": "tool", "content": text(chance, OTHERS), "tool_call_id": call["id"]} for call in calls]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results, answer(chance, name)]


def talk(chance: random.Random, name: str) -> tuple[Messages, list[dict[str, Any]] | None]:
    """A conversation that the family's template takes."""
    tools = TOOLS_LIST if name not in NO_TOOLS and chance.random() < 0.4 else None
    messages: Messages = []
    if name not in NO_SYSTEM and chance.random() < 0.4:
        messages.append({"role": "system", "content": text(chance, OTHERS)})
    for n in range(chance.randint(1, 4)):
        users = 1 if name in ALTERNATING else chance.randint(1, 2)
        messages += [{"role": "user", "content": text(chance, OTHERS)} for _ in range(users)]
        if tools and (n == 0 or chance.random() < 0.4):
            messages += tool_use(chance, name)
        else:
            messages.append(answer(chance, name))
        if name not in ONE_ANSWER and chance.random() < 0.2:
            messages.append(answer(chance, name))
    if chance.random() < 0.1:
        messages.append({"role": "user", "content": text(chance, OTHERS)})
    return messages, tools


def rows(renderer: Renderer, messages: Messages, tools: list[dict[str, Any]] | None) -> list[Sample]:
    value = {"messages": messages, **({"tools": tools} if tools else {})}
    return renderer.samples(conversation(Row("d.jsonl", 1, value), MESSAGES, {}))


def check(family: Family, samples: list[Sample], messages: Messages, tools: list[dict[str, Any]] | None) -> bool:
    """Whether the row was split; it must be where an answer is not what inference would write in its place."""
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    whole = family.labels(messages, tools, turns)
    if whole is not None:
        assert [(s.input_ids, s.labels) for s in samples] == [(family.ids(messages, tools), whole)]
        return False
    parts = []
    for _, group in groupby(turns, key=lambda i: sum(m["role"] == "user" for m in messages[:i])):
        behind = list(group)  # one question; together where no answer alters another
        together = family.labels(messages[: behind[-1] + 1], tools, behind) is not None
        for part in [behind] if together else [[i] for i in behind]:
            until = messages[: part[-1] + 1]
            parts.append((family.ids(until, tools), family.labels(until, tools, part)))
    assert [(s.input_ids, s.labels) for s in samples] == parts
    return True


@pytest.mark.parametrize("markers", [False, True], ids=["", "markers"])
@pytest.mark.parametrize("name", TRAINABLE)
def test_random_conversations(name: str, markers: bool):
    family, chance = FAMILIES[name], random.Random(name)
    tokenizer = family.tokenizer(markers)
    renderer = Renderer(tokenizer, template_kwargs=family.variables)
    split = 0
    for _ in range(ROWS):
        messages, tools = talk(chance, name)
        samples = rows(renderer, messages, tools)
        split += check(family, samples, messages, tools)
        for sample in samples:
            assert not FORBIDDEN & set(tokenizer.decode([label for label in sample.labels if label != IGNORE]))
    # These alter earlier turns: a block of reasoning, tools that move to the last question.
    assert (split > 0) == (name.startswith(("qwen3", "mistral")))


@pytest.mark.parametrize("name", ["qwen3", "qwen3 without thinking"])
def test_a_second_answer_that_no_split_mends_is_refused(name: str):
    renderer = Renderer(FAMILIES[name].tokenizer(), template_kwargs=FAMILIES[name].variables)
    with pytest.raises(RowError, match="the generation prompt of message 3 reads '<think>"):
        rows(renderer, say("u: q", "a: one", "a: two"), None)


@pytest.mark.parametrize("name", FAMILIES)
def test_random_disorder_is_proven_or_refused(name: str):
    """Any roles in any order: what is not refused has the template's ids and trains no other side's text."""
    family, chance = FAMILIES[name], random.Random(f"{name}, disorder")
    tokenizer = family.tokenizer()
    renderer = Renderer(tokenizer, template_kwargs=family.variables)
    kept = 0
    for _ in range(ROWS):
        roles = chance.choices(["user", "assistant", "system", "tool"], weights=[4, 4, 1, 1], k=chance.randint(1, 6))
        messages = [{"role": r, "content": text(chance, ANSWERS if r == "assistant" else OTHERS)} for r in roles]
        messages = [{**m, "tool_call_id": "call00000"} if m["role"] == "tool" else m for m in messages]
        try:
            samples = rows(renderer, messages, None)
        except RowError:
            continue
        kept += 1
        for sample in samples:
            assert not FORBIDDEN & set(tokenizer.decode([label for label in sample.labels if label != IGNORE]))
        answered = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        whole, parts = [family.ids(messages)], [family.ids(messages[: i + 1]) for i in answered]
        got = [s.input_ids for s in samples]
        assert got == whole or (got == [ids for ids in parts if ids in got] and got[-1:] == parts[-1:])
    assert kept > 3
