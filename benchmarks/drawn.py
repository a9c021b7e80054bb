"""swiftlite with random weights drawn straight into the shards, for models that no disk here holds; all else is a real run.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/drawn.py train RECIPE key=value ...

`model` names a folder with config.json and tokenizer files, as `benchmarks/random_model.py SHAPE FOLDER --no-weights` writes it.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from swiftlite.cli.main import main
from swiftlite.dist.tensors import copy_into, local, part_of
from swiftlite.models import build, weights
from swiftlite.models.packed import stored_weights
from swiftlite.models.placing import materialise
from swiftlite.train import plan


def draw(root: Any, tensors: Any, mapping: Any, device: torch.device, where: object) -> list[str]:
    """In place of `weights.stream`: normal numbers for matrices, ones for vectors; by name alone, so on any sharding the same."""
    view = weights.BaseView(root, device)
    where_computed = "cuda" if torch.cuda.is_available() else "cpu"

    def normal(base: str, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256(base.encode()).digest()[:6], "big")
        generator = torch.Generator(where_computed).manual_seed(seed)
        return torch.empty(shape, dtype=dtype, device=where_computed).normal_(std=0.02, generator=generator)

    for base, inlet in view.inlets.items():
        model = inlet.placeholder(base.rpartition(".")[2])
        setattr(inlet, base.rpartition(".")[2], part_of(normal(base, model.shape, model.dtype), model))
    for _, stored in stored_weights(root):
        stored.finish()
    for base, name in view.names.items():
        path, _, leaf = name.rpartition(".")
        parameter = materialise(root.get_submodule(path), leaf, device)
        if parameter.ndim > 1:
            copy_into(parameter, normal(base, parameter.shape, parameter.dtype))
        elif parameter.is_floating_point():
            local(parameter.detach()).fill_(1.0)
    weights._tie(view, dict(getattr(root, "all_tied_weights_keys", None) or {}), set())
    return ["weights are drawn at random"]


def install() -> None:
    """From now on this process draws weights where it would read them."""
    weights.stream = draw
    build.open_weights = lambda files: {}  # type: ignore[assignment]
    resolve = plan.resolve_model
    plan.resolve_model = lambda section, **_: resolve(section, need_weights=False)  # type: ignore[assignment]


if __name__ == "__main__":
    install()
    main()
