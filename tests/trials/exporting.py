"""Runs of trials that export: what was trained is kept, to compare the folders with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from swiftlite.export.trained import Trained
from swiftlite.train import session
from swiftlite.train.console import Console
from tests.training import recipe

IDS = torch.arange(10, 20)[None]
BOTH = ["adapter", "merged"]


@dataclass
class Outcome:
    """A finished run: its folder, the model in memory at its end, and what was printed."""

    output: Path
    trained: Trained
    printed: str

    def logits(self) -> Tensor:
        return logits(self.trained.model)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def reload(folder: Path) -> Any:
    """By plain transformers, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def run(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **given: Any) -> Outcome:
    """Trains by the trials' default recipe with `given` over it, and exports."""
    kept: list[Trained] = []
    real = session.export_all

    def export_all(trained: Trained, *args: Any) -> Any:
        kept.append(trained)
        return real(trained, *args)

    monkeypatch.setattr(session, "export_all", export_all)
    output = session.train(recipe(path, **given), Console())
    captured = capsys.readouterr()
    return Outcome(output, kept[0], captured.out + captured.err)
