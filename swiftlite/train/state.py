"""What goes into a checkpoint, and which recipe keys a resumed run may change."""

import random
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swiftlite.data.streaming import Stream
from swiftlite.dist.checkpoint import Saved, State
from swiftlite.dist.tensors import local
from swiftlite.models.adapter_files import initial_state
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.schema import LoraSection, Recipe
from swiftlite.recipe.writing import public
from swiftlite.train.offload import OffloadedOptimizer
from swiftlite.train.optim import load_state_tensors, state_tensors
from swiftlite.train.trained import export_facts

# Keys that may differ on resume. Of the rest, each changes what is learned, and must be as it was.
FREE = (
    "log.*", "checkpoint.*", "export.*", "output", "eval.*", "data.eval", "data.eval.*",
    "data.num_workers", "data.num_proc", "data.cache_dir",
    "train.on_nonfinite", "train.num_train_epochs", "train.max_steps", "model.hub", "strategy.config",
)  # fmt: skip
# Layout: another way to compute the same steps.
LAYOUT = (
    "strategy.*",
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.device",
    "train.gradient_checkpointing",
    "train.activation_offload",
    "train.torch_compile",
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


def rng_state(rank: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All generators that a step may draw from: torch's as tensors that name their rank, Python's and NumPy's as JSON."""
    tensors = {f"cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors[f"cuda.{rank}"] = torch.cuda.get_rng_state()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return tensors, {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def set_rng_state(tensors: Mapping[str, Tensor], meta: dict[str, Any], rank: int = 0) -> None:
    """Puts back what `rng_state` gave; a rank that was not there goes on with the generators it has."""
    if f"cpu.{rank}" in tensors:
        torch.set_rng_state(tensors[f"cpu.{rank}"])
    if f"cuda.{rank}" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[f"cuda.{rank}"])
    version, internal, gauss = meta["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = meta["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def load_trainable(wanted: Mapping[str, Tensor], saved: Saved) -> None:
    """Reads trained weights (by parameter name) of a checkpoint into tensors of any sharding; each rank reads its own rows.

    Raises:
        ModelError: when names or shapes do not line up.
    """
    if odd := sorted(set(saved.names("trainable")) ^ wanted.keys()):
        raise ModelError(f"the checkpoint and the model do not train the same weights, such as {odd[0]}", where=saved.folder)
    for name, parameter in wanted.items():
        if (shape := saved.shape("trainable", name)) != list(parameter.shape):
            raise ModelError(f"{name} has shape {shape} instead of {list(parameter.shape)}", where=saved.folder)
        with torch.no_grad():
            local(parameter).copy_(saved.part("trainable", name, parameter))


def capture(run: Any) -> State:
    """The state of a run after `run.step` steps."""
    rng_tensors, rng_meta = rng_state(run.world.rank)
    tensors: dict[str, Mapping[str, Tensor]] = {"trainable": run.masters, "initial": initial_state(run.root)}
    if not run.recipe.checkpoint.save_only_model:
        tensors |= {"optimizer": state_tensors(run.masters, run.optimizer), "rng": rng_tensors}
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
    if isinstance(run.plan.loader, Stream):
        meta["stream"] = run.plan.loader.state(run.step)
        # Each rank knows its own streams, and any number of ranks may go on with all of them.
        tensors["stream"] = {name: torch.tensor(place) for name, place in meta["stream"].pop("places").items()}
    return State(tensors, meta, own=frozenset({"rng", "stream"}))


def restore(run: Any, saved: Saved) -> None:
    """Sets a fresh run to a saved state.

    Raises:
        ModelError: when optimizer state was left out, or weights do not line up.
        RecipeError: when the data is not what it was.
    """
    if not saved.names("rng"):  # plain SGD has no state of its own
        what = "this checkpoint holds weights only (checkpoint.save_only_model) and cannot be resumed"
        raise ModelError(what, where=saved.folder)
    if saved.meta["data"] != run.plan.data_hash:
        raise RecipeError(
            "the training rows are not those of the checkpoint",
            where="data.train",
            fix="Bring the data back, or start anew with another --output.",
        )
    load_trainable(run.masters, saved)
    load_state_tensors(run.masters, run.optimizer, saved)
    if isinstance(run.optimizer, OffloadedOptimizer):
        run.optimizer.upload()
    run.scaler.load_state_dict(saved.meta["scaler"])
    run.step, run.counters, run.best = saved.meta["step"], saved.meta["counters"], saved.meta["best"]
    if isinstance(run.plan.loader, Stream):
        places = {n: saved.rows("stream", n).tolist() for n in saved.names("stream")}
        run.plan.loader.load_state({**saved.meta["stream"], "places": places})
    set_rng_state({n: saved.rows("rng", n) for n in saved.names("rng")}, saved.meta["rng"], run.world.rank)
