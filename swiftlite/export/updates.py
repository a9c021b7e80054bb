"""What is left of the trained updates once merged weights are rounded to the type in which they are written."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Elements compared at a time: their differences are held in double precision.
_CHUNK = 2**22
# Above this share of the updates' size the reader is told that rounding may undo what was learned.
MUCH = 0.5


@dataclass
class _Sums:
    """Of one tensor or of all: U is the update in fp32, V what it changed in the written tensor."""

    update: float = 0.0  # U.U
    along: float = 0.0  # V.U
    error: float = 0.0  # (V-U).(V-U)
    changed: int = 0  # elements with U != 0
    vanished: int = 0  # those of them with V == 0

    def add(self, other: "_Sums") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def shares(self) -> dict[str, float]:
        kept, error = self.along / self.update, (self.error / self.update) ** 0.5
        return {"error": error, "kept": kept, "vanished": self.vanished / self.changed}


class Updates:
    """Measures, tensor by tensor while they are written, how much of the updates the written type took.

    With W the weight before training, U the update (what merging in fp32 adds to it), and R rounding to the written type, the
    update that a reader of the files gets is V = R(W+U) - R(W). Three numbers tell how it differs from U:
        error: ||V-U|| / ||U||, all that rounding did to the update; 1 is as much as leaving it out.
        kept: V.U / U.U, what is left of it along its own direction; about 1 where rounding only adds noise across.
        vanished: the share of the changed elements that are written as if they had not been changed.
    """

    def __init__(self) -> None:
        self._all, self._tensors = _Sums(), 0
        self._worst: tuple[str, _Sums] | None = None
        self.unknown = 0  # tensors whose values before training are not known

    def add(self, name: str, before: Tensor, after: Tensor, dtype: torch.dtype) -> None:
        """Counts one tensor: its values before training and merged, both of one shape, and the type it is written in."""
        sums = _Sums()
        before = before.to(after.device)
        for old, new in zip(before.reshape(-1).split(_CHUNK), after.reshape(-1).split(_CHUNK), strict=True):
            update = new.float() - old.float()
            left = (new.to(dtype).float() - old.to(dtype).float()).double()
            changed = update != 0
            update = update.double()
            sums.update += float(update.square().sum())
            sums.along += float((update * left).sum())
            sums.error += float((left - update).square().sum())
            sums.changed += int(changed.sum())
            sums.vanished += int((changed & (left == 0)).sum())
        if sums.changed == 0:
            return
        self._tensors += 1
        self._all.add(sums)
        if self._worst is None or sums.shares()["error"] > self._worst[1].shares()["error"]:
            self._worst = (name, sums)

    def as_dict(self) -> dict[str, object] | None:
        """tensors (how many were changed), unknown, norm of the updates, error, kept, vanished, and the same of the worst tensor.

        None where nothing was changed, or nothing is known of what was.
        """
        if self._worst is None:
            return None
        name, sums = self._worst
        whole = {"tensors": self._tensors, "unknown": self.unknown, "norm": self._all.update**0.5, **self._all.shares()}
        return {**whole, "worst": {"name": name, **sums.shares()}}
