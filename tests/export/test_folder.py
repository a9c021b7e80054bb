"""Target folders: whole or absent, never mixed with an earlier export, never somebody else's."""

import errno
import stat

import pytest
from safetensors import SafetensorError

from swiftlite.dist.checkpoint import DiskFullError
from swiftlite.export import folder as folders
from swiftlite.export import merged
from swiftlite.export.merged import shard_bytes
from swiftlite.export.run import check, export_all
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.schema import ExportSection
from tests.export.making import save_base, train

LORA = {"target_modules": ["q_proj"]}
SHARDED = ExportSection(max_shard_size="20KB")


@pytest.fixture
def trained(tmp_path):
    return train(save_base(tmp_path / "base"), LORA)


def test_target_with_content_is_refused(trained, tmp_path):
    export_all(trained, ["merged"], ExportSection(), tmp_path / "run")
    with pytest.raises(RecipeError, match="not empty") as error:
        check(trained, ["merged"], ExportSection(), tmp_path / "run")
    assert "export.overwrite" in str(error.value)


def test_overwriting_leaves_nothing_of_the_earlier_export(trained, tmp_path):
    export_all(trained, ["merged"], SHARDED, tmp_path / "run")
    target = tmp_path / "run" / "merged"
    (target / "notes.txt").write_text("from before")
    assert len(list(target.glob("*.safetensors"))) > 2
    export_all(trained, ["merged"], ExportSection(overwrite=True), tmp_path / "run")
    names = {p.name for p in target.iterdir()}
    assert {n for n in names if "safetensors" in n} == {"model.safetensors"}
    assert "notes.txt" not in names
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"merged", "export_report.json"}


def test_overwrite_spares_folders_that_are_no_export(trained, tmp_path):
    target = tmp_path / "run" / "merged"
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(RecipeError, match="this folder is none"):
        export_all(trained, ["merged"], ExportSection(overwrite=True), tmp_path / "run")
    assert (target / "thesis.tex").read_text() == "years of work"


def test_base_model_is_never_overwritten(tmp_path):
    trained = train(save_base(tmp_path / "merged"), LORA)
    before = (tmp_path / "merged" / "model.safetensors").read_bytes()
    with pytest.raises(RecipeError, match="base model"):
        export_all(trained, ["merged"], ExportSection(overwrite=True), tmp_path)
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == before


def test_file_as_target_is_refused(trained, tmp_path):
    (tmp_path / "merged").write_text("a file")
    with pytest.raises(RecipeError, match="is a file"):
        check(trained, ["merged"], ExportSection(overwrite=True), tmp_path)


def test_empty_target_is_taken(trained, tmp_path):
    (tmp_path / "run" / "merged").mkdir(parents=True)
    assert export_all(trained, ["merged"], ExportSection(), tmp_path / "run")[0]["verdict"] == "verified"


FULL = {
    "errno": OSError(errno.ENOSPC, "No space left on device"),
    "quota": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "safetensors": SafetensorError("Error while serializing: IoError(Os { code: 28, message: No space left on device })"),
}


@pytest.mark.parametrize("error", FULL)
def test_full_disk_is_said_and_leaves_no_half_folder(error, trained, tmp_path, monkeypatch):
    export_all(trained, ["merged"], ExportSection(), tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run" / "merged").iterdir()}
    real, calls = merged.save_file, []

    def save_file(tensors, path, **kwargs):
        calls.append(path)
        if len(calls) == 3:
            raise FULL[error]
        real(tensors, path, **kwargs)

    monkeypatch.setattr(merged, "save_file", save_file)
    section = ExportSection(max_shard_size="20KB", overwrite=True)
    with pytest.raises(DiskFullError, match="space") as raised:
        export_all(trained, ["merged"], section, tmp_path / "run")
    assert str(tmp_path / "run" / "merged") in str(raised.value)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run" / "merged").iterdir()} == before
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"merged", "export_report.json"}


def test_space_is_asked_for_before_writing(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(DiskFullError, match="needed"):
        export_all(trained, ["merged"], ExportSection(), tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_interruption_leaves_no_half_folder(trained, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(merged, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        export_all(trained, ["merged"], ExportSection(), tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_swap_that_fails_brings_the_earlier_export_back(tmp_path, monkeypatch):
    target = tmp_path / "merged"
    target.mkdir()
    (target / "config.json").write_text("old")
    rename = folders.Path.rename

    def fail_once(self, other):
        if ".tmp-" in self.name:
            raise OSError(errno.EIO, "broken disk")
        return rename(self, other)

    monkeypatch.setattr(folders.Path, "rename", fail_once)
    with pytest.raises(OSError, match="broken disk"), folders.staged(target) as part:
        (part / "config.json").write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["merged"]
    assert (target / "config.json").read_text() == "old"


def test_files_can_be_read_by_others(trained, tmp_path):
    """safetensors writes files that only their owner can read."""
    export_all(trained, ["adapter", "merged"], ExportSection(), tmp_path / "run")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    (tmp_path / "probe").write_text("")
    assert set(modes.values()) == {stat.S_IMODE((tmp_path / "probe").stat().st_mode)}


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("200 MB", 2 * 10**8), ("1.5GiB", 3 * 2**29), ("10kb", 10_000)])
def test_shard_sizes(text, size):
    assert shard_bytes(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "5 apples", "-1GB", "0MB", "5GBs"])
def test_bad_shard_sizes_are_refused(text, trained, tmp_path):
    with pytest.raises(RecipeError, match="is no size"):
        check(trained, ["merged"], ExportSection(max_shard_size=text), tmp_path / "run")
