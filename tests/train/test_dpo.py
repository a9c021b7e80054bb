"""DPO: the numbers of plain PyTorch + peft, for any split, strategy and number of ranks; what it cannot do is refused."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM

from swiftlite.data.render import IGNORE
from swiftlite.dist.launch import ranks
from swiftlite.dist.tensors import copy_into, whole
from swiftlite.dist.world import leave
from swiftlite.models.adapters import without_adapters
from swiftlite.models.build import skeleton
from swiftlite.recipe.errors import DataError, RecipeError
from swiftlite.recipe.resolve import resolve
from swiftlite.train import reference
from swiftlite.train.console import Console
from swiftlite.train.loop import evaluate, train_step
from swiftlite.train.memory import plan_memory
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.ranks import run_ranks
from tests.train.test_ranks import assert_same
from tests.training import CHAT, LORA, losses, metrics, recipe, train

TEXTS = [
    ("hi", "yo", "bah"),
    ("a?", "b! and more", "x"),
    ("what now", "nothing", "all of it"),
    ("x", "yes indeed", "no"),
    ("", "q", ""),
]
ROWS = [
    {"prompt": [{"role": "user", "content": f"{asked}?"}], "chosen": f"{good}!", "rejected": f"{bad}."}
    for asked, good, bad in TEXTS
]


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def made(path, name="out", kind="LLAMA", method="lora", micro=1, strategy="none", **keys):
    train = {
        "objective": "dpo",
        "dpo_beta": 0.5,
        "global_batch_size": 5,
        "per_device_train_batch_size": micro,
        **keys.pop("train", {}),
    }
    lora = {"lora": keys.pop("lora", LORA)} if method == "lora" else {}
    return recipe(path, rows=ROWS, kind=kind, train=train, strategy=strategy, output=str(path / name), **lora, **keys)


def noise_for(name: str, shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode()))) * 0.05


def first_step(loaded) -> dict:
    """Loss, metrics, norm and gradients of a step away from the start, where nothing is zero, and the weights there."""
    run = Run(make_plan(resolve(loaded, ranks().size)), Console(quiet=True))
    reference.keep(run)
    with torch.no_grad():
        for name, parameter in run.root.named_parameters():
            if parameter.requires_grad:
                moved = whole(parameter).clone() + noise_for(name, parameter.shape)
                for copy in {id(p): p for p in (parameter, run.masters[name])}.values():
                    copy_into(copy, moved)
    run.optimizer.zero_grad = lambda *a, **k: None
    weights = {n: whole(p).clone() for n, p in run.root.named_parameters() if p.requires_grad}
    report = train_step(run, run.plan.loader.group(0), 0.0)
    grads = {n: whole(p.grad).clone() for n, p in run.masters.items() if p.grad is not None}
    samples = [run.plan.loader.samples[i] for i in run.plan.loader.rows_of(0)]
    return {
        "loss": report.loss, "norm": report.grad_norm, "tokens": report.trained_tokens, "metrics": report.metrics,
        "grads": grads, "weights": weights, "samples": samples,
    }  # fmt: skip


def plain(folder, found: dict, lora: bool) -> dict:
    """The same with transformers and peft alone, from the equation of the paper. In fp64: a pair's gradients nearly cancel out,
    and what fp32 leaves of them is less exact here than there."""
    start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if lora:
        net = get_peft_model(net, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")).base_model.model
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(found["weights"][name])

    def logp(model, sample):
        targets = torch.tensor(sample.labels)[1:]
        each = model(input_ids=torch.tensor([sample.input_ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
        return each.gather(-1, targets.clamp_min(0)[:, None])[:, 0][targets != IGNORE].sum()

    margins = []
    for better, worse in zip(found["samples"][0::2], found["samples"][1::2], strict=True):
        with torch.no_grad():
            before = logp(start, better) - logp(start, worse)
        margins.append(0.5 * (logp(net.train(), better) - logp(net, worse) - before))
    loss = torch.stack([-F.logsigmoid(m) for m in margins]).mean()
    loss.backward()
    grads = {n: p.grad.float() for n, p in net.named_parameters() if p.requires_grad}
    return {
        "loss": float(loss.detach()), "norm": float(torch.stack([g.norm() for g in grads.values()]).norm()), "grads": grads,
        "tokens": sum(s.trained for s in found["samples"]), "weights": found["weights"],
        "metrics": {
            "rewards_margin": float(sum(margins).detach()) / len(margins),
            "rewards_accuracy": sum(float(m > 0) for m in margins) / len(margins),
        },
    }  # fmt: skip


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("kind", ["LLAMA", "GEMMA3"])
def test_a_step_equals_plain_pytorch_however_it_is_split(tmp_path, kind, method):
    expected = None
    for strategy, micro, more in (
        ("none", 5, {}),
        ("none", 1, {}),
        ("fsdp", 2, {"gradient_checkpointing": "full"}),
        ("zero3", 3, {}),
    ):
        found = first_step(made(tmp_path, kind=kind, method=method, micro=micro, strategy=strategy, train=more))
        expected = expected or plain(tmp_path / kind.lower(), found, method == "lora")
        assert len(found["samples"]) == 10 and 0 < expected["metrics"]["rewards_accuracy"] < 1
        assert_same(found, expected)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)


@pytest.mark.parametrize(
    "strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow), pytest.param("zero2", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_two_ranks_equal_plain_pytorch(tmp_path, strategy, method):
    """Of five pairs in micro-batches of two, one rank gets three and the other two and padding."""
    both = run_ranks(2, first_step, made(tmp_path, kind="GEMMA3", method=method, micro=2, strategy=strategy))
    expected = plain(tmp_path / "gemma3", both[0], method == "lora")
    for found in both:
        assert_same(found, expected)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)


@pytest.mark.parametrize(
    "lora", [{"use_dora": True}, {"modules_to_save": ["lm_head", "embed_tokens"]}, {"dropout": 0.5}], ids=str
)
@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_the_reference_of_adapters_is_the_model_without_them(tmp_path, lora, strategy):
    run = Run(make_plan(made(tmp_path, lora=LORA | lora, strategy=strategy, micro=5)), Console(quiet=True))
    batch = run.plan.loader.group(0)[0].tensors
    trainable = [n for n, p in run.root.named_parameters() if p.requires_grad]
    before = run.objective.reference(run.root, batch)
    with torch.no_grad():
        for name in trainable:
            parameter = run.root.get_parameter(name)
            copy_into(parameter, whole(parameter) + noise_for(name, parameter.shape))
    torch.testing.assert_close(run.objective.reference(run.root, batch), before, rtol=0, atol=0)
    run.root.eval()
    with torch.no_grad():
        now = run.root.logp_sums({"input_ids": batch["input_ids"]}, batch["labels"], batch["attention_mask"])
    assert (now - before).abs().max() > 0.01
    assert [n for n, p in run.root.named_parameters() if p.requires_grad] == trainable


def test_the_flag_is_put_back_after_an_error(tmp_path):
    run = Run(make_plan(made(tmp_path)), Console(quiet=True))
    with pytest.raises(ValueError, match="x"), without_adapters(run.root):
        raise ValueError("x")
    layers = [m for m in run.root.modules() if isinstance(m, BaseTunerLayer)]
    assert layers and not any(layer.disable_adapters for layer in layers)


def test_log_probabilities_through_the_models_own_forward_are_the_same(tmp_path):
    run = Run(make_plan(made(tmp_path, micro=5)), Console(quiet=True))
    batch = run.plan.loader.group(0)[0].tensors
    inputs = {"input_ids": batch["input_ids"]}
    ours = run.root.logp_sums(inputs, batch["labels"])
    run.root.swiftlite_head = None
    torch.testing.assert_close(run.root.logp_sums(inputs, batch["labels"]), ours)
    torch.testing.assert_close(-run.root.nll_sum(inputs, batch["labels"]), ours.sum())


@pytest.mark.parametrize("method", ["lora", "full"])
def test_thirty_steps_prefer_the_better_answers(tmp_path, method):
    rate = {"lora": 5e-3, "full": 1e-3}[method]
    out = train(
        made(
            tmp_path,
            method=method,
            train={"learning_rate": rate, "max_steps": 30},
            data={"eval_split": 1},
            eval={"eval_on_start": True},
        )
    )
    rows = [row for row in metrics(out) if "loss" in row]
    assert rows[0]["loss"] == pytest.approx(0.693147, abs=1e-6) and rows[0]["rewards_margin"] == 0
    assert rows[-1]["rewards_margin"] > 2 and rows[-1]["rewards_accuracy"] == 1 and rows[-1]["loss"] < 0.2
    assert rows[0]["trained_tokens"] > 30 and rows[0]["tokens"] > rows[0]["trained_tokens"]
    evals = [row["eval_loss"] for row in metrics(out) if "eval_loss" in row]
    assert evals[0] == pytest.approx(0.693147, abs=1e-6) and len(evals) > 1 and evals[-1] != evals[0]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_evaluation_is_the_same_for_any_batch_size(tmp_path, method):
    found = []
    for size in (1, 2, 5):
        file = tmp_path / "rows.jsonl"
        keys = {
            "data": {"eval": str(file)},
            "eval": {"per_device_eval_batch_size": size},
            "train": {"learning_rate": 1e-3, "max_steps": 2},
        }
        found.append(
            [row["eval_loss"] for row in metrics(train(made(tmp_path, f"o{size}", method=method, **keys))) if "eval_loss" in row][
                -1
            ]
        )
    assert found[0] < 0.69 and found[1:] == pytest.approx(found[:1] * 2, rel=1e-5)


def test_a_resumed_full_run_compares_with_the_first_start(tmp_path):
    keys = {"method": "full", "checkpoint": {"save_strategy": "steps", "save_steps": 3}}
    train(made(tmp_path, "whole", train={"learning_rate": 1e-3, "max_steps": 6}, **keys))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000006")
    keys["checkpoint"] = {**keys["checkpoint"], "resume": "auto"}
    train(made(tmp_path, "parts", train={"learning_rate": 1e-3, "max_steps": 6}, **keys))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole") and losses(tmp_path / "whole")[-1] < 0.6
    with pytest.raises(RecipeError, match="train.dpo_beta"):
        train(made(tmp_path, "parts", train={"learning_rate": 1e-3, "max_steps": 9, "dpo_beta": 0.2}, **keys))


def test_an_adapter_that_is_trained_on_is_its_own_start(tmp_path):
    first = train(made(tmp_path, "first", train={"learning_rate": 5e-3, "max_steps": 5}, export=["adapter"]))
    again = made(tmp_path, "again", model={"adapter": str(first / "adapter")}, train={"learning_rate": 5e-3, "max_steps": 3})
    found = losses(train(again))
    assert losses(first)[-1] < 0.69 and found[0] == pytest.approx(0.693147, abs=1e-6) and found[-1] < found[0]


def test_streamed_pairs_are_trained_on(tmp_path):
    out = train(
        made(
            tmp_path,
            data={"streaming": True, "train_sampling_strategy": "sequential"},
            train={"max_steps": 3, "learning_rate": 1e-3},
        )
    )
    plainly = train(made(tmp_path, "plain", train={"max_steps": 3, "learning_rate": 1e-3}))
    assert losses(out) == pytest.approx(losses(plainly), rel=1e-5)


REFUSED = [
    ({"data": {"packing": True}}, "data.packing"),
    ({"data": {"padding_free": True}}, "data.padding_free"),
    ({"data": {"overlong": "split"}}, "data.overlong"),
    ({"data": {"train_on": "all"}}, "data.train_on"),
    ({"train": {"label_smoothing_factor": 0.1}}, "train.label_smoothing_factor"),
    ({"train": {"router_aux_loss_coef": 0.1}}, "train.router_aux_loss_coef"),
    ({"method": "full", "data": {"streaming": True}, "train": {"max_steps": 2}}, "data.streaming"),
    ({"train": {"objective": "sft"}}, "train.dpo_beta"),
]


@pytest.mark.parametrize(("keys", "where"), REFUSED, ids=[where for _, where in REFUSED])
def test_what_dpo_cannot_honour_is_refused(tmp_path, keys, where):
    with pytest.raises(RecipeError, match=where):
        make_plan(made(tmp_path, **keys))


def test_rows_of_the_other_kind_are_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"are those of format preference, and rows are wanted here. For pairs set train.objective: dpo"
    ):
        make_plan(recipe(tmp_path, rows=ROWS))
    with pytest.raises(DataError, match=r"are those of format messages, and pairs are wanted here"):
        make_plan(recipe(tmp_path, rows=CHAT, train={"objective": "dpo"}))
    mixed = {"train": str(tmp_path / "rows.jsonl"), "eval": str(tmp_path / "chat.jsonl")}
    (tmp_path / "chat.jsonl").write_text('{"text": "hi"}\n')
    with pytest.raises(DataError, match=r"chat.jsonl: the columns text are those of format text"):
        make_plan(recipe(tmp_path, rows=ROWS, train={"objective": "dpo"}, data=mixed))


def test_the_plan_counts_pairs(tmp_path):
    plan = make_plan(made(tmp_path, micro=2, data={"eval_split": 1}))
    lines = "\n".join(plan.lines())
    memory = plan_memory(plan, skeleton(plan.files, plan.recipe, plan.tokenizer, plan.precision, plan.device))
    assert (memory.rows, memory.tokens) == (4, plan.train.samples.lengths.max())
    assert "4 pairs" in lines and "eval: 1 pairs" in lines and "each of 5 pairs in 3 forward passes of 2" in lines


def test_evaluation_before_any_step_is_log_two(tmp_path):
    run = Run(make_plan(made(tmp_path, data={"eval_split": 2})), Console(quiet=True))
    run.record_eval = lambda row: None
    assert evaluate(run)["eval_loss"] == pytest.approx(0.693147, abs=1e-6)
