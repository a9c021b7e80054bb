"""Scores: the loss is that of training, and exact match that of plain generation."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from swiftlite.data.render import IGNORE, Sample
from swiftlite.infer.evaluate import evaluate, last_answer
from swiftlite.infer.load import Target, load_target
from swiftlite.recipe.errors import DataError
from tests.fixtures import CHATML, LLAMA3, tok
from tests.infer.making import LESSONS, chat, save_adapter, save_base, save_taught, write

ROWS = [
    {"messages": chat(*texts)}
    for texts in (("hi", "yo"), ("a longer question", "a"), ("q", "an answer", "more", "b!"), ("", "z" * 40))
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_taught(tmp_path_factory.mktemp("taught"))))


@torch.no_grad()
def plain_loss(folder: Path, template: str = CHATML) -> float:
    """Plain transformers, one row at a time; a turn is trained from behind its header to its <|im_end|>."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tok(template)
    total, count = 0.0, 0
    for row in ROWS:
        messages = row["messages"]
        ids = tokenizer.apply_chat_template(messages)["input_ids"]
        labels = [IGNORE] * len(ids)
        for i in range(1, len(messages), 2):
            start = len(tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True)["input_ids"])
            end = start + len(tokenizer(messages[i]["content"])["input_ids"]) + 1
            labels[start:end] = ids[start:end]
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        total += float(F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum"))
        count += sum(label != IGNORE for label in labels)
    return total / count


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_loss_is_that_of_plain_transformers(tmp_path: Path, base: Path, batch_size: int):
    scores = evaluate(load_target(str(base)), write(tmp_path / "e.jsonl", ROWS), batch_size=batch_size, generate=False)
    assert scores["loss"] == pytest.approx(plain_loss(base), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    assert (scores["rows"], scores["trained_tokens"]) == (4, 3 + 2 + 10 + 3 + 41)
    assert "exact_match" not in scores
    json.dumps(scores)


@pytest.mark.parametrize("kind", ["QWEN3", "GEMMA3", "MIXTRAL", "LLAMA_TIED"])
def test_every_family_s_own_head(tmp_path: Path, kind: str):
    folder = save_base(tmp_path / "m", kind)
    scores = evaluate(load_target(str(folder)), write(tmp_path / "e.jsonl", ROWS), generate=False)
    assert scores["loss"] == pytest.approx(plain_loss(folder), rel=1e-5)


def test_an_adapter_counts_in_the_loss(tmp_path: Path, base: Path):
    peft = save_adapter(tmp_path / "a", base, target_modules=["q_proj", "lm_head"], modules_to_save=["norm"])
    peft.merge_and_unload().save_pretrained(tmp_path / "merged")
    scores = evaluate(load_target(str(tmp_path / "a")), write(tmp_path / "e.jsonl", ROWS), generate=False)
    assert scores["loss"] == pytest.approx(plain_loss(tmp_path / "merged"), rel=1e-4)


def test_exact_match(tmp_path: Path, taught: Target):
    rows = [{"messages": chat(*lesson)} for lesson in LESSONS]
    wrong = {"messages": chat("hi", "you")}
    scores = evaluate(taught, write(tmp_path / "e.jsonl", [*rows, wrong]), batch_size=2, examples=4)
    assert (scores["exact_match"], scores["matched"], scores["answered"]) == (0.75, 3, 4)
    assert [example["match"] for example in scores["examples"]] == [True, True, True, False]
    assert scores["examples"][3] == {
        "source": f"{tmp_path / 'e.jsonl'}:4",
        "prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "expected": "you",
        "answer": "yo",
        "match": False,
    }
    assert len(evaluate(taught, tmp_path / "e.jsonl", examples=1)["examples"]) == 1
    json.dumps(scores)


def test_the_last_turn_is_answered_with_the_true_ones_in_front(tmp_path: Path, taught: Target):
    row = {"messages": chat("bye", "see you", "hi", "yo")}
    (example,) = evaluate(taught, write(tmp_path / "e.jsonl", [row]))["examples"]
    assert example["prompt"].endswith(
        "<|im_start|>assistant\nsee you<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert example["expected"] == "yo"


def test_rows_of_prompt_and_completion_stay_raw(tmp_path: Path, taught: Target):
    scores = evaluate(taught, write(tmp_path / "e.jsonl", [{"prompt": "hi there", "completion": " yo"}]))
    assert scores["examples"][0]["prompt"] == "hi there"
    assert scores["examples"][0]["expected"] == "yo"


def test_rows_without_a_prompt_have_a_loss_only(tmp_path: Path, taught: Target):
    scores = evaluate(taught, write(tmp_path / "e.jsonl", [{"text": "just words"}]))
    assert scores["exact_match"] is None
    assert scores["loss"] > 0


def test_rows_are_read_as_the_run_read_them(tmp_path: Path):
    """Template, columns and trained turns come from the recipe; arguments beat them."""
    base = save_base(tmp_path / "b", template=LLAMA3)
    run = tmp_path / "run"
    save_adapter(run / "adapter", base)
    data = f"{{train: x.jsonl, chat_template: {json.dumps(CHATML)}, columns: {{messages: talk}}, train_on: last, max_length: 60}}"
    (run / "recipe.yaml").write_text(f"model: {base}\ndata: {data}\n")
    rows = [{"talk": chat("q", "an answer", "m", "b!")}, {"talk": chat("q" * 70, "b")}]
    target, file = load_target(str(run)), write(tmp_path / "e.jsonl", rows)
    scores = evaluate(target, file)
    assert scores["trained_tokens"] == 3
    assert scores["dropped"] == {"longer than max length 60": 1}
    assert scores["examples"][0]["prompt"].startswith("<|im_start|>user"), "the recipe's template has no bos"
    assert evaluate(target, file, train_on="assistant", max_length=200, generate=False)["trained_tokens"] == 10 + 3 + 2
    assert target.renderer.train_on == "last"


def test_a_bad_row_is_named(tmp_path: Path, taught: Target):
    with pytest.raises(DataError, match=r"e\.jsonl:2"):
        evaluate(taught, write(tmp_path / "e.jsonl", [ROWS[0], {"messages": "hi"}]))
    with pytest.raises(DataError, match="no such file"):
        evaluate(taught, tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("labels", "span"),
    [
        ([-100, -100, 5, 6, -100], (2, 4)),
        ([-100, -100, 5, -100, -100, 7, 8], (5, 7)),
        ([-100, 5, 6], None),
        ([-100, -100], None),
    ],
)
def test_where_the_last_answer_is(labels: list[int], span: tuple[int, int] | None):
    assert last_answer(Sample([1] * len(labels), labels, "x:1")) == span
