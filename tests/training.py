"""Small complete runs for tests: a tiny model folder, rows, a recipe, and plain PyTorch to compare with."""

import json
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML

from swiftlite.recipe.load import Loaded, load_recipe
from swiftlite.train import session
from swiftlite.train.console import Console
from tests.fixtures import model, tok

CHAT = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b! and more"}]},
    {"messages": [{"role": "user", "content": "what now"}, {"role": "assistant", "content": "nothing"}]},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes indeed, quite"}]},
]
LORA = {"rank": 4, "alpha": 16}


def model_folder(path: Path, kind: str = "LLAMA", tokenizer: Any = None, **config: Any) -> Path:
    """A tiny random model with its tokenizer, as it would lie on a disk."""
    folder = path / kind.lower()
    if not folder.exists():
        model(kind, **config).save_pretrained(folder)
        (tokenizer or tok()).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def token_rows(lengths: list[int], vocab: int = 250, seed: int = 1) -> list[dict[str, Any]]:
    """Rows of ids, every token trained."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(5, vocab, (n,), generator=generator).tolist()} for n in lengths]


def recipe(path: Path, *, rows: list[dict[str, Any]] | None = None, kind: str = "LLAMA", **sections: Any) -> Loaded:
    """The trials' default recipe (fp32, CPU, batch 1, constant rate, no clipping, no shuffle, seed 0) under `sections`."""
    file = write_rows(path / "rows.jsonl", CHAT if rows is None else rows)
    base: dict[str, Any] = {
        "model": {"name": str(model_folder(path, kind))},
        "data": {"train": str(file), "max_length": 256, "train_sampling_strategy": "sequential"},
        "train": {
            "device": "cpu", "precision": "fp32", "global_batch_size": 1, "learning_rate": 0.01, "lr_scheduler_type": "constant",
            "warmup_steps": 0, "max_grad_norm": 0,
        },
        "log": {"logging_steps": 1},
        "checkpoint": {"save_strategy": "no"},
        "export": [],
        "output": str(path / "out"),
        "seed": 0,
    }  # fmt: skip
    for name, value in sections.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) and isinstance(base.get(name), dict) else value
    with (path / "recipe.yaml").open("w") as f:
        YAML().dump(base, f)
    return load_recipe(str(path / "recipe.yaml"))


def train(loaded: Loaded) -> Path:
    return session.train(loaded, Console(quiet=True))


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[float]:
    return [row["loss"] for row in metrics(output) if "loss" in row]
