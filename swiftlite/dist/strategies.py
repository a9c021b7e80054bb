"""The strategies as data: how parameters, gradients and optimizer state are spread over ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Strategy:
    """One way to spread a model.

    Attributes:
        sharded: modules are wrapped by FSDP2 even where one process could do without.
        reshard_after_forward: blocks free their full weights after the forward pass.
    """

    name: str
    sharded: bool
    reshard_after_forward: bool


NONE = Strategy("none", sharded=False, reshard_after_forward=True)
FSDP = Strategy("fsdp", sharded=True, reshard_after_forward=True)
