"""swiftlite with random weights drawn straight into the shards, for models that no disk here holds; all else is a real run.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/drawn.py train RECIPE key=value ...

`model` names a folder with config.json and tokenizer files, as `benchmarks/random_model.py SHAPE FOLDER --no-weights` writes it.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from swiftlite.cli.main import main  # noqa: E402
from swiftlite.dist.launch import ranks  # noqa: E402
from swiftlite.dist.tensors import local  # noqa: E402
from swiftlite.models import build, weights  # noqa: E402
from swiftlite.models.placing import materialise  # noqa: E402
from swiftlite.train import plan  # noqa: E402


def draw(root: Any, tensors: Any, mapping: Any, device: torch.device, where: object) -> list[str]:
    """In place of `weights.stream`: normal numbers for matrices, ones for vectors."""
    torch.manual_seed(ranks().rank)
    view = weights.BaseView(root)
    for name in view.names.values():
        path, _, leaf = name.rpartition(".")
        module = root.get_submodule(path)
        parameter = local(materialise(module, leaf, device).detach())
        if parameter.is_floating_point():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    weights._tie(view, dict(getattr(root, "all_tied_weights_keys", None) or {}), set())
    return ["weights are drawn at random"]


if __name__ == "__main__":
    weights.stream = draw
    build.open_weights = lambda files: {}  # type: ignore[assignment]
    resolve = plan.resolve_model
    plan.resolve_model = lambda section, **_: resolve(section, need_weights=False)  # type: ignore[assignment]
    main()
