"""Exports of a model that is spread over ranks: the first rank writes and compares, the others lend it their parts.

Reading a sharded tensor is a collective: every rank must take part in each read, in the same order. So the first rank says before
each read which one it is; the others follow until it says that it is done. Writers and checks know nothing of this.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from swiftlite.export.tensors import Piece, pieces
from swiftlite.export.trained import Trained
from swiftlite.models.adapter_files import ADAPTER_READ, adapter_state

# Between two reads the first rank may write files and load a second model.
_PATIENCE = timedelta(hours=6)
_DONE = -1


def on_first_rank(trained: Trained, work: Callable[[], Any]) -> Any:
    """Runs `work()` on the first rank with every read of `trained` backed by all; None on the others. All ranks must call.

    Raises:
        whatever `work` raises, on the first rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def said(number: int = 0) -> int:
        word = torch.tensor(number)
        dist.broadcast(word, 0, group=group)
        return int(word)

    if dist.get_rank() == 0:
        trained.model.swiftlite_announce = said
        try:
            return work()
        finally:
            del trained.model.swiftlite_announce
            said(_DONE)
    parts: Sequence[Piece] = pieces(trained.model)
    while (number := said()) != _DONE:
        if number == ADAPTER_READ:
            assert trained.peft is not None
            adapter_state(trained.peft)
        else:
            parts[number].read()
    return None
