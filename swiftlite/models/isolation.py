"""Whether a model keeps the samples of a packed row apart. That is tried on the model itself, not looked up by its name: some
classes ignore position ids without a word, state layers carry what they have read over every border, and versions differ.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from swiftlite.models.families.family import Family
from swiftlite.models.head import body
from swiftlite.recipe.errors import RecipeError

METHODS = ("pack_gap",)
# Tokens of each of the two samples that are joined: fewer go another way in flex_attention, which many query heads a key/value
# head overflow.
LENGTH = 128


def attach(root: Any) -> None:
    """Gives `root` the method that runs the trial: a sharded root gathers weights for its registered methods only."""
    root.pack_gap = MethodType(pack_gap, root)


def pack_gap(root: Any, joined: dict[str, Tensor], changed: dict[str, Tensor], alone: dict[str, Tensor]) -> Tensor:
    """How far the second sample's hidden states move, relative to the largest of them: [when the first sample's tokens change,
    when the second sample stands alone].
    """
    one, other = (body(root, x).last_hidden_state[:, LENGTH:].float() for x in (joined, changed))
    single = body(root, alone).last_hidden_state.float()
    return torch.stack([(one - x).abs().max() for x in (other, single)]) / one.abs().max().clamp_min(1e-30)


def masks(root: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs with the attention masks that keep joined rows apart, made by transformers from position_ids [B, T] for each kind
    of layer. For classes whose forward makes masks without looking at positions (gpt-oss) but takes masks that are made already.
    """
    ids = inputs["input_ids"]
    like = torch.empty(*ids.shape, 1, dtype=root.dtype, device=ids.device)  # read for shape and type only
    made = create_masks_for_generate(root.config, like, None, None, position_ids=inputs["position_ids"])
    return {**inputs, "attention_mask": made}


def require(root: Any, family: Family, key: str, device: torch.device) -> None:
    """Makes sure that the samples of joined rows do not see each other: by positions alone, or by masks made here.

    Args:
        root: the built model in eval mode.
        key: the recipe's key that asks for joined rows.

    Raises:
        RecipeError: names the class, the attention backend and by how much one sample moved another.
    """
    vocabulary = root.config.get_text_config().vocab_size
    ids = (torch.arange(2 * LENGTH, device=device)[None] * 7 + 3) % vocabulary
    changed = torch.cat([(ids[:, :LENGTH] + 11) % vocabulary, ids[:, LENGTH:]], 1)
    positions = torch.arange(LENGTH, device=device).repeat(2)[None]
    joined, other = (family.inputs({"input_ids": x, "position_ids": positions}) for x in (ids, changed))
    alone = family.inputs({"input_ids": ids[:, LENGTH:], "position_ids": positions[:, LENGTH:]})
    # A kernel may sum in another order when other rows change or are not there: in bf16 a random 8B model moved by 5%. What sees
    # another sample, or counts its positions on from it, moves by far more.
    limits = (1e-5, 1e-4) if next(root.parameters()).dtype == torch.float32 else (5e-3, 0.25)
    faults = []
    for way in (None, masks):
        root.swiftlite_masks = way
        try:
            with torch.no_grad():
                gaps = root.pack_gap(joined, other, alone).tolist()
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError) as error:
            faults.append(f"it fails ({str(error).splitlines()[0]})")
            continue
        if all(gap <= limit for gap, limit in zip(gaps, limits, strict=True)):
            return
        faults.append(f"changing one sample moved another by {gaps[0]:.1%}, taking it away by {gaps[1]:.1%}")
    root.swiftlite_masks = None
    name, backend = type(root).__name__.removeprefix("FSDP"), root.config._attn_implementation
    what = f"{name} with {backend} attention does not keep joined rows apart: {faults[0]}"
    raise RecipeError(what, where=key, fix=f"Set {key}: false.")
