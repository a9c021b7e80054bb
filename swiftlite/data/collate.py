"""Samples to tensors. Padding is known by position; its id means nothing, it may be the eos that rows are trained on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from swiftlite.data.render import IGNORE, Sample


def collate(samples: Sequence[Sample], pad_id: int, length: int | None = None) -> dict[str, Tensor]:
    """Right-padded rows, B = len(samples), T = `length`, or the longest of them.

    Returns:
        input_ids, labels, attention_mask, each [B, T] int64; labels are unshifted, IGNORE where untrained and on padding.
    """
    length = length or max(len(s.input_ids) for s in samples)
    input_ids = torch.full((len(samples), length), pad_id, dtype=torch.int64)
    labels = torch.full((len(samples), length), IGNORE, dtype=torch.int64)
    attention_mask = torch.zeros((len(samples), length), dtype=torch.int64)
    for row, s in enumerate(samples):
        n = len(s.input_ids)
        input_ids[row, :n] = torch.tensor(s.input_ids, dtype=torch.int64)
        labels[row, :n] = torch.tensor(s.labels, dtype=torch.int64)
        attention_mask[row, :n] = 1
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}


def collate_packs(packs: Sequence[Sequence[Sample]], pad_id: int, multiple: int = 1) -> dict[str, Tensor]:
    """Packs of samples, each one row: B = len(packs), T = the longest of them, rounded up to `multiple`.

    Returns:
        what `collate` gives, and position_ids [B, T] int64, which start again at 0 with every sample: that is what keeps samples
        apart in the attention. The first token of a sample is never a target, so no label crosses a border. Padding is a row of
        samples of one token each (position 0).
    """
    joined = [Sample([i for s in p for i in s.input_ids], [t for s in p for t in (IGNORE, *s.labels[1:])], "") for p in packs]
    longest = max(len(s.input_ids) for s in joined)
    batch = collate(joined, pad_id, -(-longest // multiple) * multiple)
    positions = torch.zeros_like(batch["input_ids"])
    for row, samples in enumerate(packs):
        start = 0
        for s in samples:
            positions[row, start : start + len(s.input_ids)] = torch.arange(len(s.input_ids))
            start += len(s.input_ids)
    return batch | {"position_ids": positions}
