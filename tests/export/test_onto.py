"""Merges of adapters that were trained on packed weights: onto what was trained on, or onto the weights of the model's files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftlite import api
from swiftlite.export import merged, onto
from swiftlite.export.report import lines
from swiftlite.export.trained import Exporter
from swiftlite.infer.load import load_target
from swiftlite.models import fp8
from swiftlite.models.packed import packed_weights
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.train import session
from tests.fixtures import tok
from tests.ranks import run_ranks
from tests.training import model_folder, recipe, train
from tests.trials.exporting import logits, reload, run

LORA = {"rank": 4, "alpha": 16}
STEPS = {"max_steps": 2, "learning_rate": 0.01}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}  # rows of 64 weights are what nf4 packs
CHOICES = ["dequantised", "original"]


def base(path: Path, kind: str = "LLAMA", dtype: torch.dtype = torch.float32) -> Path:
    sizes = SIZES if kind == "QWEN3_MOE" else {k: v for k, v in SIZES.items() if not k.startswith("moe")}
    return model_folder(path, kind, dtype=dtype, **sizes)


def made(path, monkeypatch, capsys, *, kind="LLAMA", dtype=torch.float32, quantize="nf4", choice="auto", **keys):
    """A run on packed weights, exported both ways; its folder, model, what was printed, and its report."""
    base(path, kind, dtype)
    keys["train"] = {**STEPS, **keys.get("train", {})}
    export = {"formats": ["adapter", "merged"], "onto": choice, **keys.pop("export", {})}
    done = run(path, monkeypatch, capsys, kind=kind, lora=LORA, quantize=quantize, export=export, **keys)
    return done, json.loads((done.output / "export_report.json").read_text())


def updates(trained) -> dict[str, torch.Tensor]:
    """s B A by Hugging Face name."""
    layers = {n: m for n, m in trained.model.named_modules() if hasattr(m, "lora_A")}
    return {
        f"{n}.weight": m.scaling["default"] * m.lora_B["default"].weight.detach() @ m.lora_A["default"].weight.detach()
        for n, m in layers.items()
    }


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    ("kind", "quantize", "changes"),
    [
        ("LLAMA", "nf4", {}),
        ("LLAMA", {"method": "nf4", "double_quant": True, "skip": ["lm_head", "o_proj"]}, {"train": {"precision": "bf16"}}),
        ("LLAMA_TIED", "fp8", {}),
        ("QWEN3_MOE", "nf4", {}),
        pytest.param("MIXTRAL", "fp8", {"train": {"precision": "bf16"}}, marks=pytest.mark.slow),
    ],
)
def test_both_bases_give_what_they_say(kind, quantize, changes, choice, tmp_path, monkeypatch, capsys):
    done, report = made(tmp_path, monkeypatch, capsys, kind=kind, quantize=quantize, choice=choice, **changes)
    packed = {n: w.unpacked(done.trained.compute_dtype).float() for n, w in packed_weights(done.trained.model).items()}
    assert packed
    plain = AutoModelForCausalLM.from_pretrained(base(tmp_path, kind)).state_dict()
    written = AutoModelForCausalLM.from_pretrained(done.output / "merged").state_dict()
    change = updates(done.trained)
    for name, weight in packed.items():
        start = weight if choice == "dequantised" else plain[name]
        assert not torch.allclose(weight, plain[name], atol=1e-5)
        torch.testing.assert_close(written[name] - start, change.get(name, torch.zeros_like(start)), atol=1e-6, rtol=0)
    assert report["merged"]["onto"]["base"] == report["merged"]["onto"]["asked"] == choice
    assert {p["verdict"] for p in report.values()} == {"verified"}


def test_the_report_has_both_gaps_and_they_are_those_of_plain_models(tmp_path, monkeypatch, capsys):
    done, report = made(tmp_path, monkeypatch, capsys)
    gaps = report["merged"]["gaps"]
    assert gaps == report["adapter"]["gaps"]
    assert gaps["packed"] == "nf4"
    assert gaps["dequantised"]["relative"] < 1e-5 < 1e-2 < gaps["original"]["relative"]
    assert report["merged"]["onto"]["base"] == "dequantised"  # auto
    assert report["merged"]["onto"]["asked"] == "auto"
    assert "merged onto the nf4 weights, dequantised, the closer ones (export.onto: auto)" in done.printed
    assert done.printed.count("adapter on the weights of the model's files: logits 0.") == 2
    torch.testing.assert_close(logits(reload(done.output / "merged")), done.logits(), atol=1e-5, rtol=0)
    from peft import PeftModel

    from swiftlite.export.verify import compare

    plain = PeftModel.from_pretrained(reload(base(tmp_path)), done.output / "adapter").eval()
    rows = [torch.tensor(row)[None, :64] for row in done.trained.prompts]
    with torch.no_grad():
        ours, theirs = ([m(input_ids=row, use_cache=False).logits[0] for row in rows] for m in (done.trained.model, plain))
    assert compare(ours, iter(theirs)).as_dict() == pytest.approx(gaps["original"], rel=1e-4)


def test_onto_the_original_is_compared_with_base_and_adapter(tmp_path, monkeypatch, capsys):
    _, report = made(tmp_path, monkeypatch, capsys, choice="original")
    part = report["merged"]
    assert part["differences"]["relative"] < 1e-5
    off = part["onto"]["differences_to_trained"]
    assert off["relative"] == pytest.approx(part["gaps"]["original"]["relative"], rel=1e-3)
    assert any(line.endswith("compared with the adapter on them") for line in lines(part))


def test_auto_takes_the_closer_base_by_measure(tmp_path, monkeypatch, capsys):
    """Were the values that were trained on read wrongly, the files' own would be closer."""
    real = onto.unpack_into

    def worse(model, trained):
        real(model, trained)
        for name, parameter in model.named_parameters():
            if "base_layer" in name:
                parameter.data.mul_(3)

    monkeypatch.setattr(onto, "unpack_into", worse)
    _, report = made(tmp_path, monkeypatch, capsys, export={"formats": ["merged"]})
    assert report["merged"]["onto"]["base"] == "original"


def test_nothing_of_the_packing_is_left_in_the_folder(tmp_path, monkeypatch, capsys):
    done, _ = made(tmp_path, monkeypatch, capsys, dtype=torch.bfloat16)
    before, after = (load_file(f / "model.safetensors") for f in (base(tmp_path), done.output / "merged"))
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {n: (t.shape, t.dtype) for n, t in after.items()}
    assert "quantization_config" not in (done.output / "merged" / "config.json").read_text()


def test_float8_products_are_a_gap_and_no_fault(tmp_path, monkeypatch, capsys):
    """They round activations too; the exported weights are proven without that, and the gap is told with it."""
    monkeypatch.setattr(fp8, "native", lambda device: True)
    _, report = made(tmp_path, monkeypatch, capsys, quantize="fp8")
    assert {p["verdict"] for p in report.values()} == {"verified"}
    for part in report.values():
        assert part["differences"]["relative"] < 1e-5
        assert 1e-3 < part["gaps"]["dequantised"]["relative"] < part["gaps"]["original"]["relative"]


def test_wrong_weights_under_the_right_name_fail(tmp_path, monkeypatch, capsys):
    """What belongs onto the dequantised weights is no merge onto the original ones."""
    done, _ = made(tmp_path, monkeypatch, capsys, choice="dequantised", export={"formats": ["merged"]})
    shutil.copy(done.output / "merged" / "model.safetensors", tmp_path / "other.safetensors")
    row = merged.EXPORTER

    def write(trained, folder, section):
        written = row.write(trained, folder, section)
        save_file(load_file(tmp_path / "other.safetensors"), folder / "model.safetensors", metadata={"format": "pt"})
        return written

    monkeypatch.setattr(merged, "EXPORTER", Exporter("merged", row.check, write, row.reload))
    with pytest.raises(ModelError, match="is not what was trained"):
        made(tmp_path, monkeypatch, capsys, choice="original", export={"formats": ["merged"]}, output=str(tmp_path / "two"))
    report = json.loads((tmp_path / "two" / "export_report.json").read_text())["merged"]
    assert report["differences"]["relative"] > 1e-2  # the logits tell it too


def test_files_that_hold_packed_weights_only_leave_no_choice(tmp_path, monkeypatch, capsys):
    """A checkpoint that bitsandbytes wrote: its weights are the ones that our own packing makes."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    steps = {**STEPS, "precision": "bf16"}
    done, _ = made(tmp_path, monkeypatch, capsys, dtype=torch.bfloat16, train=steps, choice="dequantised")
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(base(tmp_path), dtype=torch.bfloat16, quantization_config=how, device_map="cpu")
    theirs.save_pretrained(tmp_path / "packed")
    tok().save_pretrained(tmp_path / "packed")
    keys = {"lora": LORA, "train": steps, "checkpoint": {"save_strategy": "epoch"}, "output": str(tmp_path / "again")}
    output = train(recipe(tmp_path, model={"name": str(tmp_path / "packed")}, export=["adapter", "merged"], **keys))
    report = json.loads((output / "export_report.json").read_text())
    assert {p["verdict"] for p in report.values()} == {"verified"}
    assert report["merged"]["onto"]["base"] == "dequantised"
    assert report["merged"]["gaps"]["original"] is None
    assert not any("model's files" in line or "closer" in line for line in lines(report["merged"]))
    first, second = (load_file(f / "merged" / "model.safetensors") for f in (done.output, output))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert "quantization_config" not in (output / "merged" / "config.json").read_text()
    with pytest.raises(RecipeError, match=r"export\.onto.*no original ones"):
        api.export(output, format="merged", onto="original", output=tmp_path / "third")
    assert not any("model's own" in line for line in load_target(str(output / "adapter"), device="cpu").lines())


@pytest.mark.parametrize("choice", CHOICES)
def test_a_base_that_is_not_packed_leaves_no_choice(choice, tmp_path, monkeypatch):
    loaded = recipe(tmp_path, lora=LORA, train=STEPS, export={"formats": ["merged"], "onto": choice})
    with pytest.raises(RecipeError, match=r"export\.onto.*not packed"):
        api.check(loaded, quiet=True)
    monkeypatch.setattr(session, "Run", lambda *a: pytest.fail("the model was loaded before the recipe was refused"))
    with pytest.raises(RecipeError, match=r"export\.onto.*not packed"):
        train(loaded)


def test_adapters_on_packed_experts_are_refused_by_name(tmp_path):
    base(tmp_path, "QWEN3_MOE")
    with pytest.raises(RecipeError, match=r"lora\.experts.*packed ones cannot be changed"):
        api.check(recipe(tmp_path, kind="QWEN3_MOE", lora={**LORA, "experts": True}, quantize="nf4"), quiet=True)


def test_any_checkpoint_exports_both_ways_later(tmp_path):
    base(tmp_path)
    keys = {"lora": LORA, "quantize": "nf4", "train": STEPS, "checkpoint": {"save_strategy": "epoch"}}
    output = train(recipe(tmp_path, export={"formats": ["merged"]}, **keys))
    found = {}
    for choice in CHOICES:
        folder = api.export(output, format="merged", onto=choice, output=tmp_path / choice)
        found[choice] = load_file(folder / "model.safetensors")
    at_the_end = load_file(output / "merged" / "model.safetensors")
    assert all(torch.equal(at_the_end[n], found["dequantised"][n]) for n in at_the_end)
    assert any(not torch.equal(at_the_end[n], found["original"][n]) for n in at_the_end)


def test_whoever_uses_the_adapter_alone_is_told(tmp_path):
    base(tmp_path)
    keys = {"lora": LORA, "quantize": "nf4", "train": STEPS, "export": {"formats": ["adapter", "merged"]}}
    output = train(recipe(tmp_path, **keys))
    told = {name: load_target(str(output / name), device="cpu").lines() for name in ("adapter", "merged")}
    assert [any("trained beside nf4 weights" in line for line in lines) for lines in told.values()] == [True, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"add_tokens": ["<tool>"]}, "lora": {**LORA, "use_rslora": True}},
        pytest.param({"lora": {**LORA, "modules_to_save": ["lm_head"]}}, marks=pytest.mark.slow),
        pytest.param({"strategy": {"name": "fsdp", "offload": "params"}}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("choice", CHOICES)
def test_other_parts_of_a_recipe_do_not_get_in_the_way(choice, changes, tmp_path):
    """The trials' model has 272 rows for 261 tokens; with 261 rows the vocabulary grows."""
    model_folder(tmp_path, vocab=261, hidden_size=64, intermediate_size=128)
    keys = {"lora": LORA, "quantize": "nf4", "train": STEPS, "export": {"formats": ["adapter", "merged"], "onto": choice}}
    output = train(recipe(tmp_path, **keys | changes))
    report = json.loads((output / "export_report.json").read_text())
    assert {p["verdict"] for p in report.values()} == {"verified"}
    assert report["merged"]["differences"]["relative"] < 1e-5
    assert report["adapter"]["gaps"]["original"]["relative"] > 1e-3


@pytest.mark.parametrize(
    ("strategy", "double"),
    [("fsdp", False), *(pytest.param(s, True, marks=pytest.mark.slow) for s in ("ddp", "zero2", "zero3"))],
)
@pytest.mark.parametrize("choice", CHOICES)
def test_two_ranks_export_what_one_does(choice, strategy, double, tmp_path):
    base(tmp_path)
    export = {"formats": ["adapter", "merged"], "onto": choice}
    packing = {"method": "nf4", "double_quant": double}
    keys = {"lora": LORA, "quantize": packing, "train": {**STEPS, "global_batch_size": 2}, "export": export}
    alone = train(recipe(tmp_path, output=str(tmp_path / "alone"), **keys))
    run_ranks(2, train, recipe(tmp_path, output=str(tmp_path / "two"), strategy=strategy, **keys))
    one, two = (json.loads((p / "export_report.json").read_text()) for p in (alone, tmp_path / "two"))
    for name in ("adapter", "merged"):
        file = "model.safetensors" if name == "merged" else "adapter_model.safetensors"
        a, b = (load_file(p / name / file) for p in (alone, tmp_path / "two"))
        assert a.keys() == b.keys()
        assert all(torch.allclose(a[n], b[n], atol=1e-5, rtol=0) for n in a)
        assert two[name]["gaps"]["original"] == pytest.approx(one[name]["gaps"]["original"], rel=1e-3)
    assert two["merged"]["onto"]["base"] == choice
    assert two["merged"]["updates"]["norm"] == pytest.approx(one["merged"]["updates"]["norm"], rel=1e-4)
