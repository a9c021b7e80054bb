"""A wrong export fails: whatever is damaged between writing and reopening, the folder does not get its name."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftlite.export import adapter, merged
from swiftlite.export.report import lines
from swiftlite.export.run import export_all
from swiftlite.export.trained import Exporter
from swiftlite.export.verify import Differences, Tolerance, compare, prompt_rows, tolerance
from swiftlite.recipe.errors import ModelError
from swiftlite.recipe.schema import ExportSection
from tests.export.making import save_base, train

LORA = {"target_modules": ["q_proj", "v_proj"]}
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


def damage(monkeypatch, module, hurt):
    """Lets `hurt(folder)` run between an exporter's writing and its reopening."""
    row = module.EXPORTER

    def write(trained, folder, section):
        written = row.write(trained, folder, section)
        hurt(folder)
        return written

    monkeypatch.setattr(module, "EXPORTER", Exporter(row.name, row.check, write, row.reload))


def change_tensor(file, name, change):
    def hurt(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors, name)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return hurt


def one_value(tensors, name):
    tensors[name].view(-1)[5] += 1e-3


def drop(tensors, name):
    del tensors[name]


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FAULTS = {
    "a value of a layer": (merged, "LLAMA", change_tensor("model.safetensors", "model.layers.1.mlp.up_proj.weight", one_value)),
    "a row no prompt uses": (merged, "LLAMA", change_tensor("model.safetensors", "model.embed_tokens.weight", one_value)),
    "an expert": (merged, "MIXTRAL", change_tensor("model.safetensors", EXPERT, one_value)),
    "a tensor is gone": (merged, "LLAMA", change_tensor("model.safetensors", "model.layers.1.mlp.up_proj.weight", drop)),
    "an adapter value": (adapter, "LLAMA", change_tensor("adapter_model.safetensors", Q, one_value)),
    "an adapter tensor is gone": (adapter, "LLAMA", change_tensor("adapter_model.safetensors", Q, drop)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_weights_fail_the_export(fault, tmp_path, monkeypatch):
    module, kind, hurt = FAULTS[fault]
    trained = train(save_base(tmp_path / "base", kind), LORA)
    damage(monkeypatch, module, hurt)
    name = module.EXPORTER.name
    with pytest.raises(ModelError, match="is not what was trained"):
        export_all(trained, [name], ExportSection(), tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["export_report.json"]
    assert json.loads((tmp_path / "run" / "export_report.json").read_text())[name]["verdict"] == "failed"


def edit_json(name, **changes):
    def hurt(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(value | changes))

    return hurt


@pytest.mark.parametrize(
    ("module", "hurt"),
    [(adapter, edit_json("adapter_config.json", lora_alpha=17)), (merged, edit_json("config.json", rms_norm_eps=0.1))],
)
def test_damaged_settings_fail_the_export(module, hurt, tmp_path, monkeypatch):
    trained = train(save_base(tmp_path / "base"), LORA)
    damage(monkeypatch, module, hurt)
    with pytest.raises(ModelError, match="largest logit difference"):
        export_all(trained, [module.EXPORTER.name], ExportSection(), tmp_path / "run")


def test_failed_export_leaves_the_earlier_one(tmp_path, monkeypatch):
    trained = train(save_base(tmp_path / "base"), LORA)
    export_all(trained, ["merged"], ExportSection(), tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run" / "merged").iterdir()}
    damage(monkeypatch, merged, FAULTS["a value of a layer"][2])
    with pytest.raises(ModelError):
        export_all(trained, ["merged"], ExportSection(overwrite=True), tmp_path / "run")
    assert {p.name: p.read_bytes() for p in (tmp_path / "run" / "merged").iterdir()} == before


@pytest.mark.parametrize("kind", ["LLAMA", "GPT2"])
def test_merge_that_is_not_the_forward_pass_fails(kind, tmp_path, monkeypatch):
    """Of one layer only, by 3% of its adapter: the logits of 16-bit models would not show it."""
    names = {"LLAMA": ["q_proj", "embed_tokens"], "GPT2": ["c_attn"]}[kind]
    lora = {"target_modules": names, "fan_in_fan_out": kind == "GPT2"}
    trained = train(save_base(tmp_path / "base", kind, dtype=torch.bfloat16), lora, compute=torch.bfloat16)
    layer = next(m for n, m in trained.model.named_modules() if n.endswith(("1.self_attn.q_proj", "1.attn.c_attn")))
    delta = layer.get_delta_weight
    monkeypatch.setattr(layer, "get_delta_weight", lambda adapter: delta(adapter) * 1.03)
    with pytest.raises(ModelError, match=r"1\.(self_)?attn\.(q_proj|c_attn) changes what it computes"):
        export_all(trained, ["merged"], ExportSection(), tmp_path / "run")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(bad, tmp_path):
    trained = train(save_base(tmp_path / "base"), LORA)
    trained.model.model.layers[1].self_attn.q_proj.lora_B["default"].weight.data[0, 0] = bad
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_proj\.weight holds NaN or infinity"):
        export_all(trained, ["merged"], ExportSection(), tmp_path / "run")
    with pytest.raises(ModelError, match="is not the trained model"):  # equal tensors, but NaN is no agreement
        export_all(trained, ["adapter"], ExportSection(), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "export_report.json").read_text())["adapter"]["verdict"] == "failed"


def test_values_that_fp16_cannot_hold_are_named(tmp_path):
    trained = train(save_base(tmp_path / "base"), None)
    trained.model.model.norm.weight.data[3] = 1e5
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds 1e\+05, which float16 cannot"):
        export_all(trained, ["merged"], ExportSection(dtype="fp16"), tmp_path / "run")


def test_no_prompt_no_proof(tmp_path):
    with pytest.raises(ModelError, match="no prompt"):
        export_all(train(save_base(tmp_path / "base"), LORA, prompts=[[]]), ["merged"], ExportSection(), tmp_path / "run")


def test_compare_by_hand():
    ours, theirs = torch.tensor([[0.0, 2.0], [1.0, 3.0]]), torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    found = compare([ours[:1], ours[1:]], iter([theirs[:1], theirs[1:]]))
    p, q = ours.softmax(-1), theirs.softmax(-1)
    assert found.positions == 2
    assert found.max_abs == 3.0
    assert found.largest_logit == 3.0
    assert found.top1_agreement == 0.5
    assert found.relative == pytest.approx(3.0 / 2.0)
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum()) / 2, rel=1e-5)


@pytest.mark.parametrize("row", [0, 1])
def test_nan_is_no_agreement_wherever_it_stands(row):
    ours = [torch.zeros(2, 3), torch.zeros(2, 3)]
    theirs = [t.clone() for t in ours]
    theirs[row][0, 1] = math.nan
    loose = Tolerance(1e9, 1e9, 1e9)
    assert not compare(ours, iter(theirs)).within(loose)
    assert not compare(theirs, iter(ours)).within(loose)
    assert compare(ours, iter(ours)).within(loose)


def test_nothing_compared_is_no_agreement():
    assert not compare([], iter([])).within(Tolerance(1, 1, 1))
    assert not Differences(0, 0.0, 0.0, 0.0, 0.0, 1.0).within(Tolerance(1, 1, 1))


def test_tolerance_is_that_of_the_coarser_type():
    fp32, bf16 = torch.float32, torch.bfloat16
    exact, rounded, computed = tolerance(fp32, fp32), tolerance(fp32, bf16), tolerance(bf16, bf16)
    assert exact.max_abs == 1e-4
    assert exact.relative < rounded.relative < computed.relative
    assert tolerance(bf16, fp32) == computed


def test_prompts_are_cut_to_what_fits():
    rows = prompt_rows([list(range(1000)), [], *[[1, 2]] * 20])
    assert [len(r) for r in rows[:2]] == [64, 2]
    assert len(rows) == 7


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_16_bit_training_verifies(compute, tmp_path):
    trained = train(save_base(tmp_path / "base", "QWEN3", dtype=compute), LORA, compute=compute)
    parts = export_all(trained, ["adapter", "merged"], ExportSection(), tmp_path / "run")
    assert [p["verdict"] for p in parts] == ["verified", "verified"]
    assert parts[1]["dtype"] == str(compute).removeprefix("torch.")


def test_report_holds_what_was_done(tmp_path):
    trained = train(save_base(tmp_path / "base"), {**LORA, "modules_to_save": ["lm_head"]})
    export_all(trained, ["adapter"], ExportSection(), tmp_path / "run")
    parts = export_all(trained, ["merged"], ExportSection(), tmp_path / "run")
    report = json.loads((tmp_path / "run" / "export_report.json").read_text())
    assert set(report) == {"adapter", "merged"}  # a later export adds to the receipt
    assert report["merged"] == parts[0]
    for name, part in report.items():
        folder = tmp_path / "run" / name
        assert part["folder"] == str(folder)
        assert {f["name"]: f["bytes"] for f in part["files"]} == {p.name: p.stat().st_size for p in folder.iterdir()}
        assert part["differences"]["max_abs"] <= part["tolerance"]["max_abs"]
    text = "\n".join(lines(report["adapter"]))
    assert "verified" in text
    assert "modules_to_save" in text


def test_the_trained_model_is_left_in_training_mode(tmp_path):
    trained = train(save_base(tmp_path / "base"), {**LORA, "lora_dropout": 0.5})
    trained.model.train()
    export_all(trained, ["adapter", "merged"], ExportSection(), tmp_path / "run")
    assert trained.model.training
    assert all(m.merged_adapters == [] for m in trained.model.modules() if hasattr(m, "merged_adapters"))


def test_config_overrides_reach_the_export(tmp_path):
    files = save_base(tmp_path / "base")
    trained = train(files, LORA, config_overrides={"rms_norm_eps": 0.01})
    for module in trained.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.01
    parts = export_all(trained, ["adapter", "merged"], ExportSection(), tmp_path / "run")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged").config.rms_norm_eps == 0.01
    assert any("rms_norm_eps" in note for note in parts[0]["notes"])
