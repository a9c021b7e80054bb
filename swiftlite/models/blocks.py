"""How decoder blocks run: activations recomputed or kept in host memory, passes compiled. The hooks of sharding stay outside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from swiftlite.models import packed  # noqa: F401  its ops are named below

# Results that cost more to make again than to keep: attention, and every second matrix product of a block.
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
}
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_PACKED = {torch.ops.swiftlite.packed_mm.default, torch.ops.swiftlite.fp8_mm.default}


Pass = Callable[..., Any]


# Tokens of a block's pass that are worth a pass of their own: matrix products are as fast as with more of them.
SLICE = 4096

# Ways to run like blocks: kinds of attention, with and without a gradient behind it, training and evaluation, lengths of rows.
VARIANTS = 64


def wrap_blocks(
    root: nn.Module, blocks: Sequence[str], checkpointing: str, compiled: bool, offload: bool = False, sliced: bool = False
) -> None:
    """Sets how the blocks (module names) run, sharded or not: hooks of sharding stay outside.

    Args:
        checkpointing: full: while training only a block's input is kept for the backward pass, all else is computed again;
            selective: attention and half of the matrix products are kept too; none.
        compiled: compile the passes; like blocks share what is compiled. The first step of each shape of rows takes longer.
        offload: with full checkpointing, blocks' inputs wait for the backward pass in host memory.
        sliced: with full checkpointing, a block takes the rows of a batch a few at a time, SLICE tokens or one row: what it keeps
            while it is recomputed is less by as much. Gradients of its weights are then sums over slices.
    """
    run: Pass = {"none": _plain, "full": _full, "selective": _selective}[checkpointing]
    if compiled:
        torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
        run = torch.compile(run)
    elif checkpointing == "none":
        return
    keep = HostInputs() if offload else None
    for name in blocks:
        block: Any = root.get_submodule(name)
        # With the block as an argument one compiled function serves all; a closure over each would be compiled for each.
        one = partial(run, block) if keep is None else partial(keep, run, block)
        block.forward = partial(_sliced, block, one) if sliced and checkpointing == "full" else one


def unwrap_blocks(root: nn.Module, blocks: Sequence[str]) -> None:
    """Makes the blocks run as their class says: what comes after training has rows of many lengths, which would all compile."""
    for name in blocks:
        root.get_submodule(name).__dict__.pop("forward", None)


def _plain(block: Any, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs)


def _full(block: Any, *args: Any, **kwargs: Any) -> Any:
    return _recomputed(block, args, kwargs, {})


def _selective(block: Any, *args: Any, **kwargs: Any) -> Any:
    return _recomputed(block, args, kwargs, {"context_fn": _contexts})


def _sliced(block: Any, run: Pass, *args: Any, **kwargs: Any) -> Any:
    hidden = args[0] if args else kwargs.get("hidden_states")
    size = rows_of_slice(*hidden.shape[:2]) if isinstance(hidden, torch.Tensor) and hidden.ndim == 3 else 0
    if not (size and block.training and torch.is_grad_enabled() and _divisible((args, kwargs), *hidden.shape[:2])):
        return run(*args, **kwargs)
    rows = len(hidden)
    parts = (_cut((args, kwargs), rows, slice(at, at + size)) for at in range(0, rows, size))
    return _joined([run(*a, **k) for a, k in parts])


def rows_of_slice(rows: int, tokens: int) -> int:
    """How many of `rows` rows of `tokens` tokens a slice has; 0: there is one slice, or no telling rows from tokens."""
    size = max(1, SLICE // tokens)
    return size if rows > size and rows != tokens else 0


def _divisible(value: Any, rows: int, tokens: int) -> bool:
    """Whether all of a block's arguments are known to be for each row or for all. A bias of attention heads, as of BLOOM and MPT,
    is neither, though there may be as many heads as rows."""
    if isinstance(value, dict | tuple | list):
        return all(_divisible(v, rows, tokens) for v in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] != 1:
        each = value.shape[0] == rows and (value.ndim == 4 or value.shape[1] == tokens)
        return each or (value.ndim == 2 and value.shape[0] == tokens)
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)


def _cut(value: Any, rows: int, part: slice) -> Any:
    """Arguments for some rows: of tensors with one entry a row these entries, all else as it is."""
    if isinstance(value, dict):
        return {k: _cut(v, rows, part) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_cut(v, rows, part) for v in value)
    each = isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == rows
    return value[part] if each else value


def _joined(results: Sequence[Any]) -> Any:
    """What a block would have returned at once: hidden states, or a tuple of them and what is not kept while training."""
    if isinstance(results[0], torch.Tensor):
        return torch.cat(list(results))
    return tuple(map(_joined, zip(*results, strict=True))) if isinstance(results[0], tuple) else results[0]


def _recomputed(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], how: dict[str, Any]) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return _plain(block, *args, **kwargs)

    def forward(*inputs: Any) -> Any:
        return _plain(block, *inputs, **kwargs)

    return checkpoint(forward, *args, use_reentrant=False, **how)


def _large(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether an op is a product with a layer's weight, and not with the thin matrices of an adapter."""
    return op in _PACKED or (op in _PRODUCTS and 8 * min(args[-1].shape) > max(args[-1].shape))


def _contexts() -> Any:
    counts = {False: 0, True: 0}  # forward pass, recomputation: both must choose the same products

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if _large(op, args):
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        else:
            keep = op in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class HostInputs:
    """Keeps the first input of each block, which recomputation starts from, in host memory between forward and backward pass.

    Copies run on a stream of their own beside the computation; while a block is recomputed, the input of the one before it comes
    back. Without a GPU the same copies are made in order.
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def __call__(self, run: Pass, block: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not (block.training and torch.is_grad_enabled() and isinstance(hidden, torch.Tensor)):
            return run(block, *args, **kwargs)

        place, shape = hidden.data_ptr(), hidden.shape

        # What is saved holds on to this function until the backward pass: it must not hold on to the tensor.
        def pack(tensor: torch.Tensor) -> Any:
            return self._down(tensor) if tensor.data_ptr() == place and tensor.shape == shape else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, self._up):
            return run(block, *args, **kwargs)

    def _down(self, tensor: torch.Tensor) -> "_Kept":
        kept = _Kept(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda), tensor.device)
        if self._stream is None:
            kept.host.copy_(tensor)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                kept.host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
        self._kept.append(kept)
        return kept

    def _fetch(self, kept: "_Kept") -> None:
        if kept.back is None:
            with torch.cuda.stream(self._stream):  # behind its way down, on the same stream
                kept.back = kept.host.to(kept.device, non_blocking=True)

    def _up(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Kept):
            return saved  # type: ignore[no-any-return]
        self._fetch(saved)
        back = saved.back
        assert back is not None
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            back.record_stream(torch.cuda.current_stream())
        saved.back = None
        while self._kept and self._kept.pop() is not saved:
            pass  # passes that never went back, as of a step that failed
        if self._kept:
            self._fetch(self._kept[-1])
        return back


@dataclass(eq=False)
class _Kept:
    """A block's input in host memory, and on the device again once it is on its way back."""

    host: torch.Tensor
    device: torch.device
    back: torch.Tensor | None = None
