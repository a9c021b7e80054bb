"""Trials that ask for a whole run, of kinds whose parts are tried elsewhere: what is printed, and what lies on the disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer

from swiftlite.cli.main import run as swiftlite
from swiftlite.models import head
from swiftlite.train.plan import make_plan
from tests.conftest import REPO
from tests.fixtures import CHATML, CHATML_GEN, LLAMA3, tok
from tests.training import CHAT, LORA, losses, metrics, model_folder, recipe, train, write_rows
from tests.trials.exporting import BOTH, logits, reload, run
from tests.trials.test_k_hub import own

__all__ = ["own"]  # the fixture
QUESTION = {"messages": [{"role": "user", "content": "a long question here"}, {"role": "assistant", "content": "ok"}]}
SAVE = {"save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_A12_nothing_to_train_ends_before_step_1(tmp_path, capsys, overlong):
    model_folder(tmp_path, tokenizer=tok(CHATML_GEN))
    loaded = recipe(tmp_path, rows=[QUESTION] * 4, data={"max_length": 8, "overlong": overlong})
    assert swiftlite(["train", loaded.path]) == 3
    out, err = capsys.readouterr()
    assert "no trainable tokens: all 4 rows" in err and "max length 8" in err
    assert "loss" not in out and not (tmp_path / "out").exists()


def test_A12_rows_that_are_left_out_are_told_and_listed(tmp_path, capsys):
    model_folder(tmp_path, tokenizer=tok(CHATML_GEN))
    loaded = recipe(tmp_path, rows=[QUESTION] * 3 + CHAT[:1], data={"max_length": 40}, train={"max_steps": 1})
    assert swiftlite(["train", loaded.path]) == 0
    out = capsys.readouterr().out
    for text in (out, (tmp_path / "out" / "train.log").read_text()):
        assert "dropped 3: 3 longer than max length 40" in text and "rows.jsonl:3" in text
    report = json.loads((tmp_path / "out" / "data_report.json").read_text())["train"]
    assert (report["read"], report["kept"], len(report["rows"])) == (4, 1, 3)
    assert losses(tmp_path / "out")[0] > 1


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_C07_the_loss_before_training_knows_nothing_of_new_rows(tmp_path, monkeypatch, capsys, lora):
    base, tokens = model_folder(tmp_path, vocab=261), [f"<new{i}>" for i in range(8)]
    new = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " ".join(tokens)}]}]
    sets = [{"path": str(write_rows(tmp_path / f"{n}.jsonl", rows)), "name": n} for n, rows in (("old", CHAT[:1]), ("new", new))]
    keys = {"lora": lora, "eval": {"eval_on_start": True}, "train": {"max_steps": 1, "learning_rate": 0.0}}
    plain = train(recipe(tmp_path, **keys, data={"eval": [{**sets[0]}]}, output=str(tmp_path / "plain")))
    done = run(tmp_path, monkeypatch, capsys, **keys, data={"eval": sets}, model={"add_tokens": tokens}, export=["merged"])
    before = metrics(done.output)[0]
    assert abs(before["eval_loss/old"] - metrics(plain)[0]["eval_loss"]) < 0.05
    assert before["eval_loss/new"] < 2 * torch.tensor(269.0).log()
    tensors, start = (load_file(f / "model.safetensors") for f in (done.output / "merged", base))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        norms = tensors[name].norm(dim=1)
        assert len(norms) == 269 and torch.equal(tensors[name][:261], start[name])
        assert ((norms[261:] / norms[:261].mean() - 1).abs() < 2 / 3).all()


def test_C05_N03_the_adapter_of_a_checkpoint_can_be_used_as_it_is(tmp_path, monkeypatch, capsys):
    """With the tokens that were added, the template of training, and their rows."""
    base = model_folder(tmp_path, vocab=272)
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": f"<tool> {q}"}]} for q in "abcd"]
    keys = {"rows": rows, "lora": LORA, "model": {"add_tokens": ["<tool>"]}, "train": {"max_steps": 4}, "checkpoint": SAVE}
    done = run(tmp_path, monkeypatch, capsys, **keys, export=["adapter"])
    saved = done.output / "checkpoints" / "step-000004" / "adapter"
    assert AutoTokenizer.from_pretrained(saved).convert_tokens_to_ids("<tool>") == 261
    adapted = PeftModel.from_pretrained(reload(base), saved)
    torch.testing.assert_close(logits(adapted), done.logits(), atol=1e-5, rtol=0)
    names = sorted(p.name for p in (done.output / "adapter").iterdir())
    assert sorted(p.name for p in saved.iterdir()) == names
    assert all((saved / n).read_bytes() == (done.output / "adapter" / n).read_bytes() for n in names)


@pytest.mark.parametrize("base_template", [None, LLAMA3])
def test_N03_the_template_of_training_is_in_every_folder(base_template, tmp_path, monkeypatch, capsys):
    model_folder(tmp_path, tokenizer=tok(base_template))
    given = {"rows": CHAT[:1], "lora": LORA, "train": {"max_steps": 1}, "checkpoint": SAVE, "data": {"chat_template": CHATML}}
    done = run(tmp_path, monkeypatch, capsys, **given, export=BOTH)
    row = tok().decode(done.trained.prompts[0])
    for folder in ("checkpoints/step-000001/adapter", "adapter", "merged"):
        loaded = AutoTokenizer.from_pretrained(done.output / folder)
        text = loaded.apply_chat_template(CHAT[0]["messages"][:1], add_generation_prompt=True, tokenize=False)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" and row.startswith(text), folder


@pytest.mark.parametrize("targets", [["gate_proj", "up_proj", "down_proj"], ["w1"]])
def test_F02_targets_that_reach_no_expert_end_the_run(tmp_path, capsys, targets):
    loaded = recipe(tmp_path, kind="MIXTRAL", lora={"target_modules": targets})
    assert swiftlite(["train", loaded.path]) == 2
    assert f"lora.target_modules: '{targets[0]}'" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_F02_the_summary_says_what_of_the_experts_trains(tmp_path, monkeypatch, capsys):
    done = run(tmp_path, monkeypatch, capsys, kind="MIXTRAL", lora=LORA, train={"max_steps": 1})
    trained = sum(p.numel() for p in done.trained.model.parameters() if p.requires_grad)
    assert f"trainable {trained:,} of " in done.printed
    assert "experts: 2 x MixtralExperts" in done.printed and "router: 2 x Mixtral" in done.printed


@pytest.mark.parametrize("kind", ["LLAMA_TIED", "GEMMA3"])
def test_L08_tied_models_in_a_sharded_run(kind, tmp_path, monkeypatch, capsys):
    keys = {"kind": kind, "strategy": "fsdp", "checkpoint": {**SAVE, "resume": "auto"}}
    train(recipe(tmp_path, **keys, train={"max_steps": 1}))
    done = run(tmp_path, monkeypatch, capsys, **keys, train={"max_steps": 2}, export=["merged"])
    assert "at step 1 of 2" in done.printed
    assert "lm_head.weight" not in load_file(done.output / "merged" / "model.safetensors")
    assert "lm_head.weight" not in load_file(done.output / "checkpoints" / "step-000002" / "trainable.safetensors")
    loaded, plain = reload(done.output / "merged"), tmp_path / "plain"
    assert loaded.config.tie_word_embeddings and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    keys |= {"strategy": "none", "output": str(plain)}
    once = run(tmp_path, monkeypatch, capsys, **keys, train={"max_steps": 2}, export=["merged"])
    torch.testing.assert_close(logits(loaded), once.logits(), atol=1e-5, rtol=0)


HEADS = {
    "linear": {"target_modules": ["q_proj"]},
    "adapted": {"target_modules": ["q_proj", "lm_head"]},
    "in full": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}
FAST = {
    "chunks": {},
    "checkpointing": {"train": {"gradient_checkpointing": "full"}},
    "fsdp": {"strategy": "fsdp"},
    "eager": {"model": {"attn_implementation": "eager"}},
    "batch": {"train": {"per_device_train_batch_size": 4}},
}


def plain_step(base: Path, adapter: Path, samples: list, rate: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and updates of one SGD step on all rows by plain transformers and peft, with all logits."""
    net = PeftModel.from_pretrained(reload(base), adapter, is_trainable=True)
    parts = []
    for sample in samples:
        scores = net(input_ids=torch.tensor([sample.input_ids]), use_cache=False).logits[0, :-1]
        parts.append(torch.nn.functional.cross_entropy(scores, torch.tensor(sample.labels[1:]), reduction="sum"))
    loss = torch.stack(parts).sum() / sum(sample.trained for sample in samples)
    loss.backward()
    return loss.item(), {n.replace(".default", ""): -rate * p.grad for n, p in net.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("lora", HEADS)
def test_J09_every_fast_road_learns_what_the_plain_one_does(tmp_path, monkeypatch, lora):
    """From an adapter whose matrices are both not zero, so that every one of them has a gradient."""
    section, batch = {**LORA, **HEADS[lora]}, {"global_batch_size": 4, "optim": "sgd", "max_steps": 1}
    begun = recipe(tmp_path, lora=section, train={"max_steps": 5}, export=["adapter"], output=str(tmp_path / "begun"))
    before = train(begun) / "adapter"
    start = load_file(before / "adapter_model.safetensors")
    loss, updates = plain_step(model_folder(tmp_path), before, make_plan(begun).train.samples, 0.01)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 272 * 3)  # three positions at a time
    for name, keys in FAST.items():
        keys = {**keys, "model": {"adapter": str(before), **keys.get("model", {})}, "train": {**batch, **keys.get("train", {})}}
        output = train(recipe(tmp_path, **keys, export=["adapter"], output=str(tmp_path / name)))
        assert losses(output)[0] == pytest.approx(loss, rel=1e-6), name
        after = load_file(output / "adapter" / "adapter_model.safetensors")
        assert len(updates) == len(start) == len(after)
        for key, tensor in after.items():
            wanted = next(u for n, u in updates.items() if n.replace(".modules_to_save", "") == key)
            assert wanted.abs().max() > 0 and (tensor - start[key] - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7, (name, key)


def test_K03_a_run_exports_with_its_key_and_not_without(tmp_path, own, capsys):
    folder, _ = own
    loaded = recipe(
        tmp_path, lora=LORA, model={"name": str(folder), "trust_remote_code": True}, train={"max_steps": 1}, checkpoint=SAVE
    )
    train(loaded)
    export = ["export", str(tmp_path / "out"), "--format", "merged", "--output", str(tmp_path / "exports")]
    saved = tmp_path / "out" / "recipe.yaml"
    trusting = saved.read_text()
    saved.write_text(trusting.replace("trust_remote_code: true", "trust_remote_code: false"))
    assert swiftlite(export) == 4 and not (tmp_path / "exports").exists()
    err = capsys.readouterr().err
    assert "remote code" in err and "modeling_own.py" in err and "model.trust_remote_code" in err and "Traceback" not in err
    saved.write_text(trusting)
    assert swiftlite(export) == 0 and (tmp_path / "exports" / "merged" / "modeling_own.py").is_file()


class LocalTracker(GeneralTracker):
    """Keeps all it is told in files of its folder."""

    name, requires_logging_directory = "local", True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self.folder = Path(logging_dir) / run_name
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def tracker(self) -> "LocalTracker":
        return self

    def start(self) -> None:
        pass

    def store_init_configuration(self, values: dict) -> None:
        (self.folder / "config.json").write_text(json.dumps(values))

    def log(self, values: dict, step: int | None = None, **kwargs: object) -> None:
        with (self.folder / "values.jsonl").open("a") as f:
            f.write(json.dumps(values) + "\n")


def test_K04_no_file_and_no_line_of_a_run_holds_a_secret(tmp_path, monkeypatch, capsys):
    secrets = {"MY_TOKEN": "hf_TESTONLY123", "MY_KEY": "wkey-TESTONLY"}
    for name, value in {**secrets, "HF_TOKEN": "hf_TESTONLY123", "WANDB_API_KEY": "wkey-TESTONLY"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SWIFTLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", LocalTracker)
    template = CHATML.replace("{% for m", "{% if token %}{% endif %}{% for m", 1)
    keys = {
        "model": {"config_overrides": {"auth": "${MY_TOKEN}", "rope": {"key": "is ${MY_KEY}"}}},
        "data": {"chat_template": template, "template_kwargs": {"token": "${MY_TOKEN}"}},
        "log": {"report_to": ["tensorboard"], "project": "${MY_KEY}"},
    }
    loaded = recipe(tmp_path, lora=LORA, train={"max_steps": 1}, checkpoint=SAVE, export=BOTH, **keys)
    output, rows = tmp_path / "out", str(tmp_path / "rows.jsonl")
    assert swiftlite(["check", loaded.path, "--dump", str(tmp_path / "dump.jsonl")]) == 0
    assert swiftlite(["check", loaded.path, "--json"]) == 0
    assert swiftlite(["train", loaded.path, "--debug"]) == 0
    assert swiftlite(["train", loaded.path, "train.max_steps=2", "export.overwrite=true", "--resume", "auto"]) == 0
    assert swiftlite(["export", str(output), "--format", "merged", "--output", str(tmp_path / "exports")]) == 0
    assert swiftlite(["eval", str(output), "--data", rows]) == 0
    # A mistake beside a secret shows neither.
    assert swiftlite(["train", loaded.path, "train.learnin_rate=1", "--debug"]) == 2
    out, err = capsys.readouterr()
    written = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert written[output / "trackers" / "out" / "config.json"] and len(written) > 30
    for secret in secrets.values():
        assert secret not in out + err
        assert [str(p) for p, content in written.items() if secret.encode() in content] == []
    assert b"${MY_TOKEN}" in written[output / "recipe.yaml"] and "auth" in out and "goes into no export" in out


NO_SOCKETS = """
import socket, sys
def refuse(*args, **kwargs):
    open(sys.argv[1], "a").write(f"{args[1:] or args}\\n")
    raise OSError("sockets are disabled")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from swiftlite.cli.main import run
from swiftlite.infer.chat import chat
from swiftlite.infer.load import load_target
_, log, recipe, rows, base, out = sys.argv
assert run(["train", recipe, "train.max_steps=1"]) == 0
assert run(["train", recipe, "train.max_steps=2", "export.overwrite=true", "--resume", "auto"]) == 0
assert run(["export", out, "--format", "merged", "--output", out + "-exports"]) == 0
config = out + "/adapter/adapter_config.json"
text = open(config).read().replace(base, "example-org/not-there")
assert "not-there" in text
open(config, "w").write(text)
lines, said = iter(["hi"]), []
def read(prompt):
    try:
        return next(lines)
    except StopIteration:
        raise EOFError
chat(load_target(out + "/adapter", base=base), max_new_tokens=4, read=read, write=said.append)
assert "".join(said).strip(), said
"""


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["1", None])
def test_K01_a_process_without_sockets_trains_resumes_exports_and_chats(tmp_path, offline):
    base, log = model_folder(tmp_path), tmp_path / "sockets.log"
    data = {"eval": str(tmp_path / "rows.jsonl")}
    loaded = recipe(tmp_path, lora=LORA, data=data, checkpoint=SAVE, export=BOTH)
    env = {k: v for k, v in os.environ.items() if "OFFLINE" not in k} | ({"HF_HUB_OFFLINE": offline} if offline else {})
    arguments = [log, loaded.path, data["eval"], base, tmp_path / "out"]
    command = [sys.executable, "-c", NO_SOCKETS, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not log.exists(), log.read_text()
