"""Trials of kind C: tokenizer and special tokens."""

from pathlib import Path

import pytest

from swiftlite.data.collate import collate
from swiftlite.data.render import IGNORE
from tests.data.preparing import chat, prep, write
from tests.fixtures import CHATML, CHATML_GEN, IM_END, tok


@pytest.mark.parametrize("template", [CHATML, CHATML_GEN])
def test_C01_padding_is_masked_by_position_never_by_id(tmp_path: Path, template: str):
    t = tok(template, eos="<|im_end|>", pad="<|im_end|>")
    assert t.pad_token_id == t.eos_token_id == IM_END
    rows = [{"messages": chat("hi", "a longer answer")}, {"messages": chat("hi", "b")}]
    samples = prep(write(tmp_path / "d.jsonl", rows), t).samples
    batch = collate(samples, t.pad_token_id)
    for row, sample in enumerate(samples):
        real = batch["attention_mask"][row].bool()
        last_end = (batch["input_ids"][row] == IM_END).logical_and(real).nonzero().max()
        assert batch["labels"][row, last_end] == IM_END
        assert (batch["labels"][row][~real] == IGNORE).all()
        assert (batch["labels"][row] != IGNORE).sum() == sample.trained > 0
    assert not batch["attention_mask"].bool().all()
