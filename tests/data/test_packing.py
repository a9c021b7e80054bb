"""Packs: full, whole rows only, the same for any world size, and joined so that no target crosses a border."""

import random

import numpy as np
import pytest
import torch

from swiftlite.data.collate import collate_packs
from swiftlite.data.loader import Loader
from swiftlite.data.packing import pack
from swiftlite.data.render import IGNORE, Sample


def rows(lengths):
    return [Sample([100 + i] * n, [IGNORE] + [100 + i] * (n - 1), f"r:{i}") for i, n in enumerate(lengths)]


def loader(samples, **keys):
    return Loader(
        samples, **{"seed": 3, "order": "random", "rows_per_step": 2, "micro_batch": 1, "pad_id": 0, "capacity": 10, **keys}
    )


def test_ordinary_chat_lengths_fill_their_packs():
    draw = random.Random(0)
    lengths = [min(4096, max(16, int(draw.lognormvariate(5.6, 0.95)))) for _ in range(20_000)]
    packs = pack(lengths, 4096)
    assert sum(lengths) / (len(packs) * 4096) >= 0.99
    assert sorted(i for p in packs for i in p) == list(range(20_000))
    assert all(sum(lengths[i] for i in p) <= 4096 for p in packs)


@pytest.mark.parametrize("lengths", [[1], [10], [10, 10], [6, 5, 4, 3, 2], [1] * 25])
def test_few_rows(lengths):
    packs = pack(lengths, 10)
    assert sorted(i for p in packs for i in p) == list(range(len(lengths))) and all(
        sum(lengths[i] for i in p) <= 10 for p in packs
    )


def test_units_know_their_rows_and_sums():
    packs = pack([6, 5, 4, 3, 2], 10)
    assert list(packs) == [[0, 2], [1, 3, 4]] == packs[:] and packs[-1] == [1, 3, 4] and len(packs) == 2
    assert packs.sums(np.array([6, 5, 4, 3, 2])).tolist() == [10, 10]
    again = packs.taken(np.array([1, 0, 1]))
    assert list(again) == [[1, 3, 4], [0, 2], [1, 3, 4]] and list(pack([], 10)) == []
    with pytest.raises(IndexError):
        packs[2]


def test_a_row_that_does_not_fit_is_never_cut():
    with pytest.raises(ValueError, match="11 tokens"):
        pack([3, 11], 10)


def test_positions_restart_and_borders_are_no_targets():
    batch = collate_packs([rows([3, 4]), rows([2])], pad_id=9)
    assert batch["input_ids"].tolist() == [[100] * 3 + [101] * 4, [100] * 2 + [9] * 5]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 100, 100, -100, 101, 101, 101], [-100, 100] + [-100] * 5]
    assert batch["attention_mask"].tolist() == [[1] * 7, [1, 1] + [0] * 5]
    assert len({t.shape for t in batch.values()}) == 1 and {t.dtype for t in batch.values()} == {torch.int64}


@pytest.mark.parametrize("order", ["random", "sequential"])
@pytest.mark.parametrize("data_size", [1, 2, 3])
def test_every_row_once_an_epoch_for_any_world_size(order, data_size):
    samples = rows([random.Random(i).randint(1, 10) for i in range(57)])
    ranks = [loader(samples, order=order, data_rank=r, data_size=data_size) for r in range(data_size)]
    counts = []
    for epoch in (0, 1):
        seen = []
        for step in range(ranks[0].steps_per_epoch):
            groups = [rank.group(epoch * rank.steps_per_epoch + step) for rank in ranks]
            assert len({len(g) for g in groups}) == 1
            seen += [s for g in groups for micro in g for s in micro.sources]
        assert sorted(seen) == sorted(s.source for s in samples)
        counts.append(seen)
    assert (counts[0] == counts[1]) is (order == "sequential") and ranks[0].fill > 0.9


def test_padding_free_joins_a_micro_batch_into_one_row():
    samples = rows([3, 4, 2])
    one = loader(samples, capacity=None, padding_free=True, order="sequential", rows_per_step=3, micro_batch=3)
    (micro,) = one.group(0)
    assert micro.tensors["input_ids"].shape == (1, 9) and micro.tensors["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1]
    assert micro.sources == ["r:0", "r:1", "r:2"]


def test_one_shape_for_compiled_attention():
    one = loader(rows([10, 10, 10]), micro_batch=2, rows_per_step=2, multiple=16)
    assert [m.tensors["input_ids"].shape for s in (0, 1) for m in one.group(s)] == [(2, 16), (2, 16)]
    short = one.group(1)[0]
    assert len(short.sources) == 1 and int((short.tensors["labels"] != IGNORE).sum()) == 9
