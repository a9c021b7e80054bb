"""`lora.experts` through whole runs: the step of plain peft, exact resume, verified exports, a use of what was written."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swiftlite.dist import checkpoint
from swiftlite.dist.tensors import whole
from swiftlite.dist.world import leave
from swiftlite.infer.load import load_target
from swiftlite.train.console import Console
from swiftlite.train.loop import train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.ranks import run_ranks
from tests.train.test_added import moe_folder
from tests.training import LORA, losses, recipe, token_rows, train

LENGTHS = [4, 6, 12, 20]
EXPERTS = {**LORA, "experts": True}


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


@pytest.mark.parametrize(("strategy", "checkpointing"), [("none", "none"), ("fsdp", "none"), ("fsdp", "full")])
@pytest.mark.parametrize("kind", ["MIXTRAL", "QWEN3_MOE"])
def test_first_step_equals_plain_peft(tmp_path, kind, strategy, checkpointing):
    keys = {"global_batch_size": 4, "per_device_train_batch_size": 2, "gradient_checkpointing": checkpointing}
    rows = token_rows(LENGTHS)
    loaded = recipe(tmp_path, rows=rows, kind=moe_folder(tmp_path, kind), lora=EXPERTS, strategy=strategy, train=keys)
    run = Run(make_plan(loaded), Console(quiet=True))
    run.optimizer.zero_grad = lambda *a, **k: None
    torch.manual_seed(3)
    trained = {n: p for n, p in run.root.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        if "lora_B" in name:  # zero at the start, which would leave A without a gradient
            local = parameter.data.to_local() if strategy == "fsdp" else parameter.data
            local.copy_(torch.randn(parameter.shape) * 0.1)
    values = {n: whole(p) for n, p in trained.items()}
    report = train_step(run, run.plan.loader.group(0), 0.0)

    net = AutoModelForCausalLM.from_pretrained(tmp_path / kind.lower(), dtype=torch.float32)
    named = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}
    net = get_peft_model(net, LoraConfig(r=4, lora_alpha=16, **named)).base_model.model.train()
    theirs = {n: p for n, p in net.named_parameters() if p.requires_grad}
    assert theirs.keys() == values.keys() and sum("experts" in n for n in theirs) == 8
    for name, parameter in theirs.items():
        parameter.data.copy_(values[name])
    total, count = 0.0, sum(LENGTHS) - 4
    for row in rows:
        x = torch.tensor([row["input_ids"]])
        total = total + net(input_ids=x, labels=x, use_cache=False).loss * (x.shape[1] - 1) / count
    total.backward()
    assert report.loss == pytest.approx(total.item(), rel=1e-5)
    for name, parameter in theirs.items():
        if parameter.grad.norm() > 1e-6 * report.grad_norm:
            assert (whole(trained[name].grad) - parameter.grad).norm() / parameter.grad.norm() <= 5e-6, name


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_it_resumes_exactly_and_its_exports_are_the_trained_model(tmp_path, strategy):
    def run(name, steps, **more):
        keys = {
            "rows": token_rows(LENGTHS),
            "kind": "MIXTRAL",
            "lora": EXPERTS,
            "strategy": strategy,
            "train": {"max_steps": steps},
        }
        saving = {"save_strategy": "steps", "save_steps": 2, **more}
        formats = ["adapter", "merged"] if steps == 4 else []
        return train(recipe(tmp_path, **keys, checkpoint=saving, export=formats, output=str(tmp_path / name)))

    output = run("whole", 4)
    run("part", 2)
    again = run("part", 4, resume="auto")
    assert losses(again) == losses(output) and len(losses(output)) == 4
    ours, theirs = (load_file(checkpoint.complete(o / "checkpoints")[0][-1] / "trainable.safetensors") for o in (again, output))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)

    report = json.loads((output / "export_report.json").read_text())
    assert {name: part["verdict"] for name, part in report.items()} == {"adapter": "verified", "merged": "verified"}
    x = torch.tensor([token_rows(LENGTHS)[3]["input_ids"]])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral")(input_ids=x).logits
    for folder in ("adapter", "merged"):
        logits = load_target(str(output / folder), device="cpu").model(input_ids=x).logits
        assert (logits - base).abs().max() > 0.01
    merged = load_target(str(output / "merged"), device="cpu").model.state_dict()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral").state_dict()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert not torch.equal(merged[name], plain[name])


@pytest.mark.parametrize("method", [{"lora": LORA}, pytest.param({}, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_a_rank_may_hold_no_expert(tmp_path, method):
    """Three ranks hold 2, 2 and 0 of four experts."""
    keys = {"kind": "QWEN3_MOE", "rows": token_rows([9, 14, 6, 11, 8, 12]), **method}
    keys["train"] = {"max_steps": 2, "global_batch_size": 3}
    alone = train(recipe(tmp_path, output=str(tmp_path / "alone"), **keys))
    run_ranks(3, train, recipe(tmp_path, output=str(tmp_path / "three"), strategy="fsdp", **keys))
    assert losses(tmp_path / "three") == pytest.approx(losses(alone), rel=1e-5)


def test_a_continued_adapter_starts_where_it_ended(tmp_path):
    keys = {"rows": token_rows(LENGTHS), "kind": "MIXTRAL", "train": {"max_steps": 4, "global_batch_size": 4}}
    first = train(recipe(tmp_path, lora=EXPERTS, export=["adapter"], output=str(tmp_path / "a"), **keys))
    model = {"name": str(tmp_path / "mixtral"), "adapter": str(first / "adapter")}
    second = train(recipe(tmp_path, model=model, output=str(tmp_path / "b"), **keys))
    assert losses(second)[0] < losses(first)[-1] < losses(first)[0]
