"""What rounding to the written type does to trained updates is measured, said, and the same whatever was trained."""

import json

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.export.report import lines
from swiftlite.export.run import export_all
from swiftlite.export.updates import Updates
from swiftlite.recipe.schema import ExportSection
from tests.export.making import save_base, train
from tests.training import model_folder
from tests.trials.exporting import run

LORA = {"target_modules": ["q_proj", "v_proj"]}


def measured(before, after, dtype):
    updates = Updates()
    updates.add("w", before, after, dtype)
    return updates.as_dict()


def test_shares_of_an_update_known_by_hand():
    """Beside 1, bf16 has steps of 1/128 above and 1/256 below: the first two are lost, one is doubled nearly, one is exact."""
    before = torch.ones(5)
    after = before + torch.tensor([0.001, -0.001, 0.004, 0.25, 0.0])
    found = measured(before, after, torch.bfloat16)
    update, left = after - before, torch.tensor([0, 0, 0.0078125, 0.25, 0])
    assert found["vanished"] == 2 / 4  # the fifth was not changed
    assert found["error"] == pytest.approx(float((left - update).norm() / update.norm()), rel=1e-4)
    assert found["kept"] == pytest.approx(float(left @ update / (update @ update)), rel=1e-4)
    assert (found["tensors"], found["worst"]["name"]) == (1, "w")
    assert measured(before, after, torch.float32)["error"] == 0


def test_an_update_below_the_steps_of_the_type_is_lost_whole():
    before = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = measured(before, before.float() * (1 + 1e-4), torch.bfloat16)
    assert (found["error"], found["kept"], found["vanished"]) == (1, 0, 1)


def test_a_base_that_is_rounded_itself_scatters_the_update_and_does_not_lose_it():
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(400, 400, generator=generator)
    found = measured(before, before + 1e-4 * torch.randn(400, 400, generator=generator), torch.bfloat16)
    assert found["kept"] == pytest.approx(1, abs=0.1)
    assert found["error"] > 3  # steps of up to 1/64 stand for changes of 1e-4
    assert found["vanished"] > 0.9


def test_what_was_not_changed_is_no_update():
    assert measured(torch.ones(3), torch.ones(3), torch.bfloat16) is None


@pytest.mark.parametrize("kind", ["LLAMA", "MIXTRAL"])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_the_report_measures_what_was_written(kind, lora, tmp_path):
    files = save_base(tmp_path / "base", kind, dtype=torch.bfloat16)
    trained = train(files, lora, compute=torch.bfloat16)
    for parameter in trained.model.parameters():
        if parameter.requires_grad and lora is None:
            parameter.data.mul_(1 - 1e-4)  # beside the random step of `train`
    (part,) = export_all(trained, ["merged"], ExportSection(), tmp_path / "run")
    base, merged = load_file(files.weights[0]), load_file(tmp_path / "run" / "merged" / "model.safetensors")
    exact = tmp_path / "exact"
    export_all(trained, ["merged"], ExportSection(dtype="fp32"), exact)
    meant = load_file(exact / "merged" / "model.safetensors")
    changed = {n: meant[n].float() - base[n].float() for n in base if not torch.equal(meant[n].float(), base[n].float())}
    left = {n: merged[n].float() - base[n].float() for n in changed}
    assert len(changed) == part["updates"]["tensors"] == (4 if lora else len(base))
    norm = sum(u.square().sum() for u in changed.values()) ** 0.5
    error = sum((left[n] - u).square().sum() for n, u in changed.items()) ** 0.5 / norm
    gone = sum(int(((u != 0) & (left[n] == 0)).sum()) for n, u in changed.items()) / sum(
        int((u != 0).sum()) for u in changed.values()
    )
    assert part["updates"]["norm"] == pytest.approx(float(norm), rel=1e-4)
    assert part["updates"]["error"] == pytest.approx(float(error), rel=1e-3)
    assert part["updates"]["error"] > 1e-4
    assert part["updates"]["vanished"] == pytest.approx(gone, rel=1e-6)
    assert json.loads((tmp_path / "run" / "export_report.json").read_text())["merged"]["updates"] == part["updates"]
    assert any(line.strip().startswith("updates as written in bfloat16: rounding error") for line in lines(part))


@pytest.mark.parametrize(("dtype", "told"), [("auto", True), ("fp32", False)])
def test_updates_that_16_bits_cannot_hold_are_told(dtype, told, tmp_path):
    trained = train(save_base(tmp_path / "base", dtype=torch.bfloat16), LORA, compute=torch.bfloat16)
    for name, parameter in trained.model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(1e-4)
    (part,) = export_all(trained, ["merged"], ExportSection(dtype=dtype), tmp_path / "run")
    assert any("export.dtype: fp32 holds them" in note for note in part["notes"]) is told
    assert (part["updates"]["vanished"] > 0.5) is told


def test_an_adapter_has_no_updates_of_its_own(tmp_path):
    (part,) = export_all(train(save_base(tmp_path / "base"), LORA), ["adapter"], ExportSection(), tmp_path / "run")
    assert part["updates"] is None
    assert not any("updates as written" in line for line in lines(part))


def test_what_the_files_do_not_hold_is_not_measured(tmp_path):
    """An embedding that grew had no values for its new rows."""
    trained = train(save_base(tmp_path / "base"), None)
    trained.model.resize_token_embeddings(280, mean_resizing=False)
    (part,) = export_all(trained, ["merged"], ExportSection(), tmp_path / "run")
    names = load_file(tmp_path / "run" / "merged" / "model.safetensors").keys()
    assert (part["updates"]["tensors"], part["updates"]["unknown"]) == (len(names) - 2, 2)  # embedding and head


def test_what_pissa_took_out_of_the_base_is_no_update(tmp_path, monkeypatch, capsys):
    keys = {"lora": {"rank": 4, "alpha": 16, "init": "pissa"}, "train": {"max_steps": 2, "learning_rate": 1e-3}}
    done = run(tmp_path, monkeypatch, capsys, export=["merged"], **keys)
    base, merged = (load_file(f / "model.safetensors") for f in (model_folder(tmp_path), done.output / "merged"))
    change = sum((merged[n] - base[n]).square().sum() for n in base) ** 0.5
    report = json.loads((done.output / "export_report.json").read_text())["merged"]["updates"]
    assert report["norm"] == pytest.approx(float(change), rel=1e-3)
    assert report["norm"] < 0.1 * float(sum(base[n].square().sum() for n in base if "proj" in n) ** 0.5)
