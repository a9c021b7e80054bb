"""Checkpoint folders: whole or not there, never resumed from or deleted when they are not ours."""

import errno
import json

import pytest
import torch

from swiftlite.dist import checkpoint
from swiftlite.dist.checkpoint import State
from swiftlite.recipe.errors import ModelError


def state(step: int = 0) -> State:
    return State({"trainable": {"w": torch.full((3,), float(step))}, "rng": {"cpu": torch.get_rng_state()}}, {"step": step})


def test_reads_back_what_was_written(tmp_path):
    folder = checkpoint.save(tmp_path, 7, state(7), lambda f: (f / "note.txt").write_text("x")).wait()
    back = checkpoint.Saved(folder)
    assert folder.name == "step-000007" and back.meta == {"step": 7}
    assert torch.equal(back.rows("trainable", "w"), torch.full((3,), 7.0)) and back.names("optimizer") == []
    assert set(json.loads((folder / "COMPLETE").read_text())) == {"trainable.safetensors", "rng.safetensors", "state.json", "note.txt"}


@pytest.mark.parametrize("harm", ["marker", "file", "size", "garbage"])
def test_an_incomplete_folder_is_passed_over_and_left_alone(tmp_path, harm):
    checkpoint.save(tmp_path, 2, state(2))
    hurt = checkpoint.save(tmp_path, 6, state(6)).wait()
    if harm == "marker":
        (hurt / "COMPLETE").unlink()
    elif harm == "file":
        (hurt / "trainable.safetensors").unlink()
    elif harm == "size":
        (hurt / "trainable.safetensors").write_bytes(b"0123456789")
    else:
        (hurt / "COMPLETE").write_text("{")
    (tmp_path / "my-step-9").mkdir()
    good, skipped = checkpoint.complete(tmp_path)
    assert [p.name for p in good] == ["step-000002"] and {p.name for p in skipped} == {"step-000006", "my-step-9"}
    with pytest.raises(ModelError, match="not a complete checkpoint"):
        checkpoint.Saved(hurt)
    checkpoint.rotate(tmp_path, 1, None)
    assert hurt.exists() and (tmp_path / "my-step-9").exists()


@pytest.mark.parametrize(("limit", "best", "kept"), [(1, 2, [2, 4]), (2, 2, [2, 3, 4]), (2, None, [3, 4]), (None, None, [1, 2, 3, 4]), (9, 1, [1, 2, 3, 4])])
def test_rotation_keeps_the_newest_and_the_best(tmp_path, limit, best, kept):
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, step, state(step))
    checkpoint.rotate(tmp_path, limit, best)
    assert [checkpoint.step_of(p) for p in checkpoint.complete(tmp_path)[0]] == kept


@pytest.mark.parametrize(
    "fault", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: No space left on device (os error 28)")]
)
def test_a_full_disk_leaves_nothing_and_says_so(tmp_path, fault):
    def fail(folder):
        raise fault

    with pytest.raises(checkpoint.DiskFullError, match="no space") as error:
        checkpoint.save(tmp_path, 3, state(3), fail)
    assert str(tmp_path) in str(error.value) and not list(tmp_path.iterdir())


def test_a_step_is_never_written_over(tmp_path):
    checkpoint.save(tmp_path, 1, state(1))
    with pytest.raises(ModelError, match="exists already"):
        checkpoint.save(tmp_path, 1, state(1))
