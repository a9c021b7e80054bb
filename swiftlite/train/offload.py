"""`strategy.offload: optimizer`: fp32 master weights and optimizer state in host memory, the model's own weights on the device.

While the backward pass runs, each gradient shard goes down as soon as it is reduced, and is added to its master's; the optimizer
works on the CPU; new weights go up while the next ones are computed. On a CPU the same code runs, without streams.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from swiftlite.dist.tensors import local, with_local

# Elements that one inner optimizer steps before their weights go up: enough work to hide a transfer behind.
CHUNK = 2**26
# Elements that go up at a time: what is on the device in fp32 besides the weights.
PIECE = 2**24


class OffloadedOptimizer:
    """Looks like a torch optimizer over `masters`, which stand for the model's trainable weights in their order.

    Args:
        parameters: trainable weights on the device, sharded or not, in the type they are kept in.
        groups: of indices into `parameters`, each with its settings.
        make: an optimizer for groups of masters.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        groups: Sequence[tuple[list[int], dict[str, Any]]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    ) -> None:
        self.parameters = list(parameters)
        self._cuda = self.parameters[0].device.type == "cuda"
        self._stream = torch.cuda.Stream() if self._cuda else None
        self.masters = [nn.Parameter(_like(p, self._host(local(p), torch.float32))) for p in self.parameters]
        self._landed: list[Tensor | None] = [None] * len(self.parameters)  # gradients of one pass in their own type
        self._sums: list[Tensor | None] = [None] * len(self.parameters)
        self._adder = ThreadPoolExecutor(1, "gradients")  # one, so that sums have one order
        self._adding: dict[int, Future[None]] = {}
        self._chunks: list[tuple[list[int], torch.optim.Optimizer]] = []
        for indices, settings in groups:
            for part in _chunks(indices, self.masters):
                self._chunks.append((part, make([{"params": [self.masters[i] for i in part], **settings}])))
        for i, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda p, i=i: self._fetch(i))  # type: ignore[misc]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for _, optimizer in self._chunks for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {p: s for _, optimizer in self._chunks for p, s in optimizer.state.items()}

    def set_state(self, master: Tensor, state: dict[str, Tensor]) -> None:
        """Replaces the state of one master weight."""
        next(o for part, o in self._chunks if any(self.masters[i] is master for i in part)).state[master] = state

    def collect(self) -> None:
        """To be called after each backward pass: waits until its gradients are with those of the masters."""
        for adding in self._adding.values():
            adding.result()
        self._adding.clear()

    @torch.no_grad()
    def step(self) -> None:
        """One step of every master with a gradient; each chunk's weights go up while the next one is computed."""
        for part, optimizer in self._chunks:
            optimizer.step()
            self.upload(part)

    def upload(self, indices: Sequence[int] | None = None) -> None:
        """Rounds masters into the model's weights, on the device: torch would round on the CPU, into memory that is not pinned,
        and wait for the copy."""
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for i in range(len(self.masters)) if indices is None else indices:
                pieces = (local(t).view(-1).split(PIECE) for t in (self.parameters[i], self.masters[i]))
                for weight, master in zip(*pieces, strict=True):
                    weight.copy_(master.to(weight.device, non_blocking=True))
        if self._stream is not None:  # whatever reads the weights next, also after a resume
            torch.cuda.current_stream().wait_stream(self._stream)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for master in self.masters:
            master.grad = None

    def _fetch(self, i: int) -> None:
        """Starts a gradient's way down; FSDP2 calls this on the stream that reduced it."""
        parameter = self.parameters[i]
        assert parameter.grad is not None
        if (earlier := self._adding.pop(i, None)) is not None:  # of the same pass: it still needs the memory that this lands in
            earlier.result()
        gradient = local(parameter.grad)
        if self._landed[i] is None:
            self._landed[i] = self._host(gradient, gradient.dtype)
        landed = self._landed[i]
        assert landed is not None
        there = None
        if self._stream is None:
            landed.copy_(gradient)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                landed.copy_(gradient, non_blocking=True)
            gradient.record_stream(self._stream)
            there = self._stream.record_event()
        parameter.grad = None
        self._adding[i] = self._adder.submit(self._add, i, landed, there)

    @torch.no_grad()
    def _add(self, i: int, landed: Tensor, there: torch.cuda.Event | None) -> None:
        """Adds a gradient to its master's, in fp32, as soon as it is there: the CPU has little else to do in a backward pass."""
        if there is not None:
            there.synchronize()
        master = self.masters[i]
        if master.grad is not None:
            local(master.grad).add_(landed)
            return
        sums = self._sums[i]
        if sums is None:  # once: memory that the system has never given out before is slow to come by
            sums = self._sums[i] = torch.empty(landed.shape, dtype=torch.float32)
        master.grad = _like(self.parameters[i], sums.copy_(landed))

    def _host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        copy = torch.empty(tensor.shape, dtype=dtype, pin_memory=self._cuda)
        return copy.copy_(tensor.detach())


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    return with_local(part, parameter) if isinstance(parameter, DTensor) else part


def _chunks(indices: Sequence[int], masters: Sequence[Tensor]) -> list[list[int]]:
    chunks: list[list[int]] = []
    size = CHUNK
    for i in indices:
        if size >= CHUNK:
            chunks.append([])
            size = 0
        chunks[-1].append(i)
        size += local(masters[i]).numel()
    return chunks
