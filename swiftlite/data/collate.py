"""Samples to tensors. Padding is known by position; its id means nothing, it may be the eos that rows are trained on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from swiftlite.data.render import IGNORE, Sample


def collate(samples: Sequence[Sample], pad_id: int) -> dict[str, Tensor]:
    """Right-padded rows, B = len(samples), T = the longest of them.

    Returns:
        input_ids, labels, attention_mask, each [B, T] int64; labels are unshifted, IGNORE where untrained and on padding.
    """
    length = max(len(s.input_ids) for s in samples)
    input_ids = torch.full((len(samples), length), pad_id, dtype=torch.int64)
    labels = torch.full((len(samples), length), IGNORE, dtype=torch.int64)
    attention_mask = torch.zeros((len(samples), length), dtype=torch.int64)
    for row, s in enumerate(samples):
        n = len(s.input_ids)
        input_ids[row, :n] = torch.tensor(s.input_ids, dtype=torch.int64)
        labels[row, :n] = torch.tensor(s.labels, dtype=torch.int64)
        attention_mask[row, :n] = 1
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}
