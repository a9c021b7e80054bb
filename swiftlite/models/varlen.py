"""Attention backend `varlen`: the samples of joined rows through torch's variable-length flash attention, without any mask.

Names: B rows, T tokens of each, H heads, K key/value heads, D head size; N segments, the samples of all B rows one after another.
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "varlen"
# torch 2.11 has no such argument, and takes fewer key/value heads as they are.
GROUPED_HEADS = "enable_gqa" in signature(varlen_attn).parameters
BOUNDS = 128
# What some classes hand to their attention, and this one would leave out.
REFUSED = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class Segments:
    """Where the samples of a batch lie, its rows put one behind another: B * T tokens.

    Attributes:
        ends: end of each segment, on the host.
        bounds: [N + 1] int32 on the batch's device: 0 and the ends; on a GPU the last one again up to a multiple of BOUNDS, and
            longest up to a power of two, so that compiled blocks meet few shapes.
        longest: tokens of the longest segment.
        total: B * T.
    """

    ends: tuple[int, ...]
    bounds: Tensor
    longest: int
    total: int

    @classmethod
    def of(cls, ends: list[int], device: torch.device) -> "Segments":
        longest = max(end - start for start, end in zip([0, *ends], ends, strict=False))
        bounds = [0, *ends]
        if device.type == "cuda":
            bounds += bounds[-1:] * (-len(bounds) % BOUNDS)
            longest = max(BOUNDS, 1 << (longest - 1).bit_length())
        return cls(tuple(ends), torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True), longest, ends[-1])


def segments_of(position_ids: Tensor) -> Segments:
    """Segments of joined rows: one begins wherever positions do not go on. Waits for the device once.

    The zeros at the end of a row are one segment, not one for each: that is padding, of which there may be thousands of tokens.
    (One-token samples at the end of a row are zeros too; they train nothing, and no other sample comes behind them.)

    Args:
        position_ids: [B, T] int64.
    """
    positions = position_ids.cpu()
    starts = torch.ones_like(positions, dtype=torch.bool)
    padding = positions.flip(1).cumsum(1).flip(1) == 0
    starts[:, 1:] = (positions.diff(dim=1) != 1) & ~(padding[:, 1:] & padding[:, :-1])
    first: list[int] = starts.flatten().nonzero().flatten().tolist()
    return Segments.of([*first[1:], positions.numel()], position_ids.device)


def attach(root: Any) -> None:
    """Where `root` uses this backend: hands the segments of every batch to all its layers, made once for each forward pass.

    They travel as an argument from layer to layer, so that what is computed again in the backward pass gets its own batch's.
    Every inner model adds them, unless one around it has: some classes go past their outer body (OPT). Classes that drop unknown
    arguments would attend over whole rows; `models.isolation` refuses to join rows for them.
    """
    if root.config._attn_implementation != NAME:
        return
    for module in root.modules():
        if isinstance(module, PreTrainedModel) and "position_ids" in signature(module.forward).parameters:
            module.register_forward_pre_hook(_add_segments, with_kwargs=True)


def _add_segments(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    positions = kwargs.get("position_ids")
    if positions is None or positions.ndim != 2 or "segments" in kwargs:
        return None
    return args, {**kwargs, "segments": segments_of(positions)}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment, by the rules of transformers' attention functions.

    On a GPU in 16 bits this is one kernel; elsewhere plain attention, one segment at a time. What needs a mask (padded prompts,
    steps of generation) or looks both ways (towers) is handed to sdpa.

    Args:
        query: [B, H, T, D]; key, value: [B, K, T, D], the values possibly of another size.
        scaling: of the scores; None: 1 / sqrt(D).
        sliding_window: positions that a token sees, its own among them; None: all before it.
        segments: of this batch; None: every row is one.

    Returns:
        [B, T, H, D] and None for the weights, which no kernel keeps.

    Raises:
        ValueError: the class asks for what this backend leaves out, or the segments are of another batch.
    """
    if found := [name for name in REFUSED if kwargs.get(name) is not None]:
        raise ValueError(f"{NAME} attention has no {found[0]}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    rows, _, length, size = query.shape
    if attention_mask is not None or not causal or key.shape[2] != length:
        done: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal)[0]
        return done, None
    segments = segments or Segments.of([length * (i + 1) for i in range(rows)], query.device)
    if segments.total != rows * length:
        raise ValueError(f"segments of {segments.total} tokens for a batch of {rows * length}")
    scale = size**-0.5 if scaling is None else scaling
    if dropout == 0 and _has_kernel(query, value):
        return _kernel(query, key, value, segments, scale, sliding_window), None
    return _one_by_one(query, key, value, segments, scale, sliding_window, dropout), None


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    fits = half and query.is_cuda and max(query.shape[-1], value.shape[-1]) <= 256
    return fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _kernel(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int | None) -> Tensor:
    """All segments in one call; see `attention`."""
    rows, heads, length, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    more: dict[str, Any] = {}
    if heads != key.shape[1] and GROUPED_HEADS:
        more = {"enable_gqa": True}
    # The kernel takes one head size for all three, in whole eights; zeros add nothing to a score.
    width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    # (left, right): -1 is no limit, and the token itself is not counted.
    sides = (-1 if window is None else window - 1, 0)
    n, bounds = segments.longest, segments.bounds
    out: Any = varlen_attn(q, k, v, bounds, bounds, n, n, scale=scale, window_size=sides, **more)
    wide: Tensor = out.reshape(rows, length, heads, width)
    return wide[..., : value.shape[-1]]


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int | None, dropout: float
) -> Tensor:
    """Plain attention for each segment alone; see `attention`."""
    rows, heads, length, _ = query.shape
    q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (query, key, value))
    k, v = (x.repeat_interleave(heads // x.shape[0], 0) for x in (k, v))
    outs = []
    for start, end in zip([0, *segments.ends], segments.ends, strict=False):
        mask = None
        if window is not None and end - start > window:
            at = torch.arange(end - start, device=query.device)
            back = at[:, None] - at
            mask = (back >= 0) & (back < window)
        one, at_keys, at_values = (x[None, :, start:end] for x in (q, k, v))
        out = F.scaled_dot_product_attention(one, at_keys, at_values, mask, dropout, is_causal=mask is None, scale=scale)
        outs.append(out[0])
    return torch.cat(outs, 1).reshape(heads, rows, length, -1).permute(1, 2, 0, 3).contiguous()


def mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """None where `attention` does without: causal rows, whole and without padding. Else sdpa's mask; arguments as transformers
    gives them, use_vmap with a mask of the class's own, allow_is_bidirectional_skip with those that look both ways.
    """
    own = use_vmap or "allow_is_bidirectional_skip" in kwargs
    if attention_mask is None and q_length == kv_length and not own:
        return None
    made: Tensor | None = sdpa_mask(batch_size, q_length, kv_length, attention_mask=attention_mask, use_vmap=use_vmap, **kwargs)
    return made


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
