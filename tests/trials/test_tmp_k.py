"""Kind K, hub, offline, access, security: five faults with five messages, and no code that was not asked for."""

import json
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from swiftlite.cli.main import run
from swiftlite.infer.generate import generate
from swiftlite.infer.load import load_target
from tests.fixtures import model, tok
from tests.hub_stub import FakeHub

ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def recipe(folder: Path, name: str, *, data: str = "rows.jsonl", **keys: object) -> str:
    """A one-step recipe file."""
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    whole = {
        "model": {"name": name, **keys},
        "data": {"train": str(folder / data), "max_length": 256},
        "lora": {"rank": 2},
        "train": {"max_steps": 1, "global_batch_size": 1},
        "output": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(json.dumps(whole))
    return str(folder / "recipe.yaml")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("path", ["./modles/tiny", "does not exist", "./models/tiny"]),
        ("401", ["example-org/gated", "access", "token"]),
        ("403", ["example-org/gated", "access", "token"]),
        ("404", ["example-org/gated", "not found"]),
        ("offline", ["example-org/gated", "offline"]),
        ("network", ["example-org/gated", "no network"]),
    ],
)
@pytest.mark.parametrize("verb", ["train", "check"])
def test_K06_each_way_a_model_can_be_missing_is_told_apart(tmp_path, monkeypatch, capsys, case, words, verb):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", case == "offline")
    name = "./modles/tiny" if case == "path" else "example-org/gated"
    # The data file is not there either: a run that looked at data first would stop with exit code 3.
    file = recipe(tmp_path, name, data="not-there.jsonl")
    with FakeHub().running() as hub:
        if case in ("401", "403"):
            hub.answers[name] = (int(case), {})
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9" if case == "network" else hub.endpoint)
        close_session()
        start = time.monotonic()
        code = run([verb, file])
        taken = time.monotonic() - start
    close_session()
    out, err = capsys.readouterr()
    assert code == 4 and taken < 10
    assert all(word.lower() in err.lower() for word in words), err
    assert "Traceback" not in out + err and "not-there.jsonl" not in err


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own(tmp_path):
    """A model folder that cannot be loaded without its code, and the file which that code makes."""
    folder, mark = tmp_path / "own", tmp_path / "PWNED"
    model("LLAMA").save_pretrained(folder)
    tok().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(CODE.format(mark=str(mark)))
    return folder, mark


@pytest.mark.parametrize("verb", ["check", "train", "chat", "eval"])
def test_K03_code_in_a_model_folder_is_not_run(tmp_path, own, capsys, verb):
    folder, mark = own
    file = recipe(tmp_path, str(folder))
    command = {"chat": ["chat", str(folder)], "eval": ["eval", str(folder), "--data", str(tmp_path / "rows.jsonl")]}
    assert run(command.get(verb, [verb, file])) == 4
    out, err = capsys.readouterr()
    assert not mark.exists()
    assert "remote code" in err and "modeling_own.py" in err and "model.trust_remote_code" in err
    assert "Traceback" not in out + err


def test_K03_code_runs_with_the_key_and_is_named(tmp_path, own, capsys, caplog):
    folder, mark = own
    assert run(["train", recipe(tmp_path, str(folder), trust_remote_code=True)]) == 0
    out, err = capsys.readouterr()
    assert mark.exists()
    assert "remote code" in out + err + caplog.text and "modeling_own.py" in out + err + caplog.text


@pytest.mark.parametrize("offline", [True, False])
def test_K01_nothing_is_asked_of_the_hub_when_all_is_local(tmp_path, monkeypatch, network_guard, offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    model("LLAMA").save_pretrained(tmp_path / "base")
    tok().save_pretrained(tmp_path / "base")
    file, rows = recipe(tmp_path, str(tmp_path / "base")), str(tmp_path / "rows.jsonl")
    assert run(["train", file, f"data.eval={rows}"]) == 0
    assert run(["train", file, f"data.eval={rows}", "train.max_steps=2", "export.overwrite=true", "--resume", "auto"]) == 0

    # An adapter that names a base nobody has: the base is given, so its name is not looked up.
    config = tmp_path / "run" / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "example-org/not-there"}))
    target = load_target(str(tmp_path / "run" / "adapter"), base=str(tmp_path / "base"))
    assert len(generate(target, [ROW["messages"][:1]], max_new_tokens=2)) == 1
    assert network_guard == []
