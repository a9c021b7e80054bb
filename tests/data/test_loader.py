"""Order, steps, micro-batches and padding."""

import pytest
import torch

from swiftlite.data.collate import collate
from swiftlite.data.loader import Loader, MicroBatch
from swiftlite.data.order import chosen, draw, draws, shuffled
from swiftlite.data.render import IGNORE, Sample


def samples(count: int) -> list[Sample]:
    return [Sample(list(range(5, 7 + i % 4)), [IGNORE, *range(6, 7 + i % 4)], f"d.jsonl:{i + 1}") for i in range(count)]


def loader(count: int = 23, **keys) -> Loader:
    return Loader(samples(count), **{"seed": 3, "order": "random", "rows_per_step": 5, "micro_batch": 2, "pad_id": 0, **keys})


def sources(groups: list[list[MicroBatch]]) -> list[str]:
    return sorted(source for group in groups for batch in group for source in batch.sources)


def trained_ids(groups: list[list[MicroBatch]]) -> list[int]:
    return sorted(i for g in groups for b in g for i in b.tensors["labels"][b.tensors["labels"] != IGNORE].tolist())


def test_order_is_pinned():
    """A new library or machine must not reorder anyone's data: these are the numbers of the first release."""
    assert draw(1, 2, 3) == 1466929338816962128
    assert draws([3, 7], 1, 2).tolist() == [draw(1, 2, 3), draw(1, 2, 7)]
    assert shuffled(10, 42, 0) == [5, 1, 2, 6, 8, 0, 3, 4, 7, 9]
    assert chosen("abcdefgh", 3, 7) == ["f", "g", "h"]


def test_every_row_once_an_epoch_in_another_order_each():
    a = loader()
    assert a.steps_per_epoch == 5
    epochs = [[i for step in range(e * 5, e * 5 + 5) for i in a.rows_of(step)] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(23))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert len(a.rows_of(4)) == 3  # the tail is a short last step
    assert loader(order="sequential").rows_of(6) == [5, 6, 7, 8, 9]
    assert loader(seed=4).rows_of(0) != a.rows_of(0)


@pytest.mark.parametrize("data_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_the_same_rows_for_any_ranks_and_micro_batch(data_size: int, micro_batch: int):
    ranks = [loader(data_rank=r, data_size=data_size, micro_batch=micro_batch) for r in range(data_size)]
    whole = loader(micro_batch=5)
    for step in range(12):
        groups = [rank.group(step) for rank in ranks]
        assert len({len(group) for group in groups}) == 1
        assert sources(groups) == sorted(f"d.jsonl:{i + 1}" for i in whole.rows_of(step))
        assert trained_ids(groups) == trained_ids([whole.group(step)])
        assert all(len(b.sources) <= micro_batch for group in groups for b in group)


def test_a_rank_without_rows_gets_an_empty_micro_batch():
    group = loader(count=1, data_rank=1, data_size=2, pad_id=9).group(0)
    assert [b.sources for b in group] == [[]]
    tensors = group[0].tensors
    assert (tensors["input_ids"] == 9).all()
    assert (tensors["labels"] == IGNORE).all()
    assert (tensors["attention_mask"] == 1).all()  # attention over nothing would be NaN
    assert tensors["labels"][:, 1:].numel() > 0


def test_resume_is_random_access():
    straight = loader()
    before = [straight.group(step) for step in range(13)]
    resumed = loader()
    for step in (12, 3, 7):
        for a, b in zip(resumed.group(step), before[step], strict=True):
            assert a.sources == b.sources
            assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)


def test_an_empty_loader_is_a_mistake():
    with pytest.raises(ValueError, match="at least one"):
        loader(count=0)


def test_collate_pads_on_the_right_by_position():
    batch = collate([Sample([5, 0, 7], [IGNORE, 0, 7], "a"), Sample([0], [IGNORE], "b")], pad_id=0)
    assert {name: t.dtype for name, t in batch.items()} == dict.fromkeys(("input_ids", "labels", "attention_mask"), torch.int64)
    assert batch["input_ids"].tolist() == [[5, 0, 7], [0, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORE, 0, 7], [IGNORE] * 3]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_like_lengths_share_a_step_and_every_row_comes_once():
    rows = [Sample([5] * n, [IGNORE] + [5] * (n - 1), str(n)) for n in list(range(2, 42)) * 3]
    one = Loader(rows, seed=1, order="group_by_length", rows_per_step=7, micro_batch=7, pad_id=0)
    for epoch in (0, 1):
        steps = [one.rows_of(epoch * one.steps_per_epoch + s) for s in range(one.steps_per_epoch)]
        assert sorted(i for s in steps for i in s) == list(range(120)) and len(steps[-1]) == 1
        spreads = [max(len(rows[i].input_ids) for i in s) - min(len(rows[i].input_ids) for i in s) for s in steps]
        assert max(spreads) <= 3
    assert one.rows_of(0) != one.rows_of(one.steps_per_epoch)
