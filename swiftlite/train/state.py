"""What goes into a checkpoint, and which recipe keys a resumed run may change."""

import random
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swiftlite.dist.checkpoint import State
from swiftlite.dist.tensors import copy_into, whole
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.schema import LoraSection, Recipe
from swiftlite.recipe.writing import public
from swiftlite.train.optim import load_state_tensors, state_tensors
from swiftlite.train.trained import export_facts

# Keys that may differ on resume. Of the rest, each changes what is learned, and must be as it was.
FREE = (
    "log.*", "checkpoint.*", "export.*", "output", "eval.*", "data.eval", "data.eval.*",
    "train.on_nonfinite", "train.num_train_epochs", "train.max_steps", "model.hub",
)  # fmt: skip
# Layout: another way to compute the same steps.
LAYOUT = (
    "strategy.*",
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.device",
    "train.gradient_checkpointing",
)


def flat(recipe: Recipe, hashes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Every leaf key of a recipe as `section.key`; texts from the environment as `${NAME}`, plugins with their `hashes`."""

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        for key, item in value.items():
            path = f"{prefix}{key}"
            if isinstance(item, dict) and path in Recipe.model_fields:
                yield from walk(f"{path}.", item)
            else:
                yield path, item

    return dict(walk("", public(recipe))) | ({"plugins": dict(hashes)} if hashes else {})


def default_of(section: str, name: str) -> Any:
    """The default of a key inside a section, as `flat` shows it."""
    kind: Any = {**{n: f.annotation for n, f in Recipe.model_fields.items()}, "lora": LoraSection}[section]
    return kind.model_fields[name].get_default(call_default_factory=True) if name in kind.model_fields else None


def check_resumable(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compares the flat recipe of a checkpoint with the one at hand. Returns a note for each layout key that changed.

    Raises:
        RecipeError: when a key differs that changes what is learned; names both values.
    """
    notes = []
    for key in sorted(old.keys() | new.keys()):
        # A key that is younger than the checkpoint had its default then.
        section, _, name = key.partition(".")
        young = key not in old and name and any(k.startswith(f"{section}.") for k in old)
        before, now = default_of(section, name) if young else old.get(key), new.get(key)
        if before == now or any(fnmatch(key, p) for p in FREE):
            continue
        if any(fnmatch(key, p) for p in LAYOUT):
            notes.append(f"{key} was {before} and is {now}: same learning in another layout")
        else:
            raise RecipeError(
                f"the checkpoint was made with {before!r}, and the recipe says {now!r}",
                where=key,
                fix=f"Set {key} back, or start anew with another --output.",
            )
    return notes


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All generators that a step may draw from: torch's as tensors, Python's and NumPy's as JSON."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return tensors, {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def set_rng_state(tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    version, internal, gauss = meta["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = meta["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def trainable_tensors(root: Any) -> dict[str, Tensor]:
    """Whole trained tensors by parameter name, on the CPU."""
    return {n: whole(p).cpu() for n, p in root.named_parameters() if p.requires_grad}


def load_trainable(root: Any, tensors: dict[str, Tensor], where: object) -> None:
    """Puts back what `trainable_tensors` gave, on any sharding.

    Raises:
        ModelError: when names or shapes do not line up.
    """
    wanted = {n: p for n, p in root.named_parameters() if p.requires_grad}
    if tensors.keys() != wanted.keys():
        odd = sorted(tensors.keys() ^ wanted.keys())[0]
        raise ModelError(f"the checkpoint and the model do not train the same weights, such as {odd}", where=where)
    for name, parameter in wanted.items():
        if tensors[name].shape != parameter.shape:
            raise ModelError(f"{name} has shape {list(tensors[name].shape)} instead of {list(parameter.shape)}", where=where)
        copy_into(parameter, tensors[name])


def capture(run: Any) -> State:
    """The state of a run after `run.step` steps."""
    rng_tensors, rng_meta = rng_state()
    tensors: dict[str, dict[str, Tensor]] = {"trainable": trainable_tensors(run.root)}
    if not run.recipe.checkpoint.save_only_model:
        tensors |= {"optimizer": state_tensors(run.root, run.optimizer), "rng": rng_tensors}
    meta = {
        "step": run.step,
        "recipe": flat(run.recipe, run.plan.loaded.hashes),
        "counters": run.counters,
        "best": run.best,
        "scaler": run.scaler.state_dict(),
        "rng": rng_meta,
        "data": run.plan.data_hash,
        "export": export_facts(run.plan),
    }
    return State(tensors, meta)


def restore(run: Any, state: State, where: object) -> None:
    """Sets a fresh run to a saved state.

    Raises:
        ModelError: when optimizer state was left out, or weights do not line up.
        RecipeError: when the data is not what it was.
    """
    if "optimizer" not in state.tensors:
        raise ModelError("this checkpoint holds weights only (checkpoint.save_only_model) and cannot be resumed", where=where)
    if state.meta["data"] != run.plan.data_hash:
        raise RecipeError(
            "the training rows are not those of the checkpoint",
            where="data.train",
            fix="Bring the data back, or start anew with another --output.",
        )
    load_trainable(run.root, dict(state.tensors["trainable"]), where)
    load_state_tensors(run.root, run.optimizer, state.tensors["optimizer"])
    run.scaler.load_state_dict(state.meta["scaler"])
    run.step, run.counters, run.best = state.meta["step"], state.meta["counters"], state.meta["best"]
    set_rng_state(dict(state.tensors["rng"]), state.meta["rng"])
