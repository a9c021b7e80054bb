"""What only a GPU shows: bf16 by default, adapters beside their layers, a model spread over several."""

from pathlib import Path

import pytest
import torch

from swiftlite.infer import model as opening
from swiftlite.infer.evaluate import evaluate
from swiftlite.infer.generate import generate
from swiftlite.infer.load import load_target
from swiftlite.infer.prompts import RawText
from swiftlite.infer.stream import stream
from tests.infer.making import LESSONS, chat, save_adapter, save_base, save_taught, write

pytestmark = pytest.mark.gpu


def test_bf16_models_stay_bf16_and_answer_alike(tmp_path: Path):
    base = save_base(tmp_path / "b", dtype=torch.bfloat16)
    save_adapter(tmp_path / "a", base, modules_to_save=["norm"])
    target = load_target(str(tmp_path / "a"))
    assert {(p.dtype, p.device.type) for p in target.model.parameters()} == {(torch.bfloat16, "cuda")}
    (answer,) = generate(target, [RawText("abc")], max_new_tokens=8)
    assert "".join(stream(target, RawText("abc"), max_new_tokens=8)) == answer.text
    seeded = [generate(target, [RawText("abc")], max_new_tokens=8, temperature=1.0, seed=3) for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_scores_are_those_of_the_cpu(tmp_path: Path):
    folder = save_taught(tmp_path / "m")
    file = write(tmp_path / "e.jsonl", [{"messages": chat(*lesson)} for lesson in LESSONS])
    here, there = (evaluate(load_target(str(folder), device=device, dtype="fp32"), file) for device in ("cuda", "cpu"))
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-2)
    assert here["exact_match"] == there["exact_match"] == 1.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_too_large_for_one_gpu_is_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = save_base(tmp_path / "b", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    save_adapter(tmp_path / "a", base)
    file = write(tmp_path / "e.jsonl", [{"messages": chat(*lesson)} for lesson in LESSONS])
    whole = load_target(str(tmp_path / "a"))
    monkeypatch.setattr(opening, "_fits", lambda *args: False)
    spread = load_target(str(tmp_path / "a"))
    assert len({p.device for p in spread.model.parameters()}) > 1
    prompts = [RawText("abc"), RawText("defghij")]
    assert generate(spread, prompts, max_new_tokens=4) == generate(whole, prompts, max_new_tokens=4)
    assert evaluate(spread, file, generate=False)["loss"] == pytest.approx(
        evaluate(whole, file, generate=False)["loss"], rel=1e-4
    )
