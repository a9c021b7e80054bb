"""Joined rows learn what single rows learn: same loss, norm and gradients; one sample never moves another. Trials of kind D."""

import json

import pytest
import torch
import transformers as tf

from swiftlite.data.render import IGNORE
from swiftlite.data.report import dump
from swiftlite.dist.tensors import whole
from swiftlite.dist.world import leave
from swiftlite.recipe.errors import DataError, RecipeError
from swiftlite.train.console import Console
from swiftlite.train.loop import evaluate, train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.fixtures import SMALL, tok
from tests.training import CHAT, LORA, losses, metrics, recipe, token_rows, train

LENGTHS = [7, 13, 9, 12, 4, 11, 20, 6]
MORE = {
    "MISTRAL": lambda: tf.MistralConfig(**SMALL, vocab_size=261, sliding_window=8),
    "GPT_OSS": lambda: tf.GptOssConfig(
        **{**SMALL, "intermediate_size": 32},
        vocab_size=261,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
    ),
    "GEMMA2": lambda: tf.Gemma2Config(**SMALL, vocab_size=261, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "BLOOM": lambda: tf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=261),
    "OPT": lambda: tf.OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=261, word_embed_proj_dim=32
    ),
    "MAMBA": lambda: tf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=261, state_size=8),
}


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def folder(tmp_path, kind):
    """A model folder of a kind that tests.fixtures lacks."""
    path = tmp_path / kind.lower()
    if kind in MORE and not path.exists():
        torch.manual_seed(0)
        tf.AutoModelForCausalLM.from_config(MORE[kind]()).save_pretrained(path)
        tok().save_pretrained(path)
    return path


def step(loaded):
    run = Run(make_plan(loaded), Console(quiet=True))
    run.optimizer.zero_grad = lambda *a, **k: None
    report = train_step(run, run.plan.loader.group(0), 0.0)
    return report, {n: whole(p.grad) for n, p in run.root.named_parameters() if p.requires_grad and p.grad is not None}, run


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["LLAMA", "QWEN3", "GEMMA3", "MISTRAL", "MIXTRAL", "GPT_OSS", "GEMMA2", "OPT"])
def test_joined_rows_learn_what_single_rows_learn(tmp_path, kind, attention):
    if attention == "sdpa" and kind in ("GPT_OSS", "GEMMA2"):
        pytest.skip("has no right sdpa")
    folder(tmp_path, kind)
    results = []
    for data, sizes in (
        ({}, (8, 8)),
        ({"packing": True, "max_length": 29}, (64, 64)),  # all packs in one step; 29 is no multiple of 8 (D04)
        ({"packing": True, "max_length": 29}, (64, 1)),
        ({"padding_free": True}, (8, 4)),
    ):
        total, micro = sizes
        loaded = recipe(
            tmp_path, rows=token_rows(LENGTHS), kind=kind, data=data, model={"attn_implementation": attention},
            train={"global_batch_size": total, "per_device_train_batch_size": micro},
        )  # fmt: skip
        results.append(step(loaded)[:2])
    (plain, grads), *others = results
    assert plain.trained_tokens == sum(LENGTHS) - len(LENGTHS)
    for report, joined in others:
        assert report.loss == pytest.approx(plain.loss, rel=1e-5) and report.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
        assert report.trained_tokens == plain.trained_tokens and joined.keys() == grads.keys()
        for name, grad in grads.items():
            if grad.norm() > 1e-6 * plain.grad_norm:
                assert (joined[name] - grad).norm() / grad.norm() <= 2e-5, name


@pytest.mark.parametrize("key", ["packing", "padding_free"])
@pytest.mark.parametrize("kind", ["BLOOM", "MAMBA"])
def test_a_class_that_lets_samples_see_each_other_is_refused(tmp_path, kind, key):
    folder(tmp_path, kind)
    loaded = recipe(tmp_path, rows=token_rows([6, 7]), kind=kind, data={key: True, "max_length": 64})
    with pytest.raises(RecipeError, match=f"data.{key}.*does not keep joined rows apart"):
        Run(make_plan(loaded), Console(quiet=True))


def test_lost_positions_would_be_seen(tmp_path, monkeypatch):
    """The trial on the model itself catches what switches isolation off without a word: here, positions that never arrive."""
    from swiftlite.models import isolation

    plain = isolation.body
    monkeypatch.setattr(isolation, "body", lambda root, x: plain(root, {k: v for k, v in x.items() if k == "input_ids"}))
    with pytest.raises(RecipeError, match="does not keep joined rows apart"):
        Run(make_plan(recipe(tmp_path, rows=token_rows([6, 7]), data={"packing": True})), Console(quiet=True))


@pytest.mark.parametrize("kind", ["LLAMA", "GEMMA3"])
def test_D01_D03_D08_the_numbers_of_two_rows(tmp_path, kind):
    rows = [{"input_ids": list(range(10, 15))}, {"input_ids": list(range(20, 27))}]
    values = []
    for packing in (False, True):
        data = {"packing": packing, "max_length": 12, "eval": str(tmp_path / "rows.jsonl")}
        loaded = recipe(
            tmp_path, rows=rows, kind=kind, data=data, train={"global_batch_size": 2, "per_device_train_batch_size": 2}
        )
        run = Run(make_plan(loaded), Console(quiet=True))
        run.begin()
        group = run.plan.loader.group(0)
        assert sum(int((m.tensors["labels"][:, 1:] != IGNORE).sum()) for m in group) == 10
        values += [train_step(run, group, 0.0).loss, evaluate(run)["eval_loss"]]
        leave()
    assert values == pytest.approx([values[0]] * 4, abs=1e-5)
    if kind == "LLAMA":
        assert values[0] == pytest.approx(5.610325, abs=1e-4)


def test_D05_packing_keeps_the_masks(tmp_path):
    trained = []
    for packing in (False, True):
        plan = make_plan(recipe(tmp_path, rows=CHAT, data={"packing": packing, "max_length": 128}))
        groups = [m for s in range(plan.loader.steps_per_epoch) for m in plan.loader.group(s)]
        trained.append(sorted(t for m in groups for t in m.tensors["labels"].flatten().tolist() if t != IGNORE))
    assert trained[0] == trained[1] and len(trained[0]) > 20


@pytest.mark.parametrize(("overlong", "kept"), [("truncate", 2), ("drop", 0)])
def test_D06_every_piece_of_a_pack_starts_a_row(tmp_path, overlong, kept):
    rows = token_rows([13, 11])
    loaded = recipe(tmp_path, rows=rows, data={"packing": True, "max_length": 10, "overlong": overlong})
    if not kept:
        with pytest.raises(DataError, match="no trainable tokens"):
            make_plan(loaded)
        return
    plan = make_plan(loaded)
    starts = [
        m.tensors["input_ids"][0, p].item()
        for s in range(plan.loader.steps_per_epoch)
        for m in plan.loader.group(s)
        for p in (m.tensors["position_ids"][0] == 0).nonzero()
    ]
    assert sorted(starts) == sorted(r["input_ids"][0] for r in rows)


def test_D09_an_evaluation_set_smaller_than_a_pack(tmp_path):
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(r) + "\n" for r in token_rows([8, 12], seed=5)))
    found = []
    for packing in (False, True):
        data = {"packing": packing, "max_length": 128, "eval": str(tmp_path / "eval.jsonl")}
        output = train(
            recipe(
                tmp_path,
                rows=token_rows([9, 9]),
                data=data,
                output=str(tmp_path / str(packing)),
                train={"max_steps": 1, "learning_rate": 0.0},
            )
        )
        found.append(next(r["eval_loss"] for r in metrics(output) if "eval_loss" in r))
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_a_packed_run_resumes_exactly_and_dumps_its_packs(tmp_path, monkeypatch):
    rows = token_rows([int(n) for n in torch.randint(3, 20, (40,), generator=torch.Generator().manual_seed(0))])
    keys = {"rows": rows, "lora": {**LORA, "dropout": 0.2}, "train": {"global_batch_size": 3, "num_train_epochs": 2}}
    data = {"packing": True, "max_length": 32, "train_sampling_strategy": "random"}
    whole_run = train(recipe(tmp_path, **keys, data=data, output=str(tmp_path / "whole")))
    steps = len(losses(whole_run))
    part = {"data": data, "output": str(tmp_path / "part"), "checkpoint": {"save_strategy": "epoch", "resume": "auto"}}
    record = Run.record

    def stop_late(self, report):
        record(self, report)
        self.stop.asked = self.step == steps - 2

    with monkeypatch.context() as patch:
        patch.setattr(Run, "record", stop_late)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(tmp_path, **keys, **part))
    assert losses(train(recipe(tmp_path, **keys, **part))) == losses(whole_run)

    plan = make_plan(recipe(tmp_path, **keys, data=data))
    packs = [[plan.train.samples[i] for i in unit] for unit in plan.loader.units(0)]
    dump(packs, tmp_path / "packs.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "packs.jsonl").read_text().splitlines()]
    group = [m for s in range(plan.loader.steps_per_epoch) for m in plan.loader.group(s)]
    for line, micro in zip(lines, group, strict=True):
        size = len(line["input_ids"])
        assert line["source"] == micro.sources
        for key in ("input_ids", "labels", "position_ids"):
            assert micro.tensors[key][0, :size].tolist() == line[key]
