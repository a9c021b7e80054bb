"""Checkpoint folders: named tensors as safetensors, everything else as JSON, nothing pickled.

A folder carries its final name only once it is whole: it is written under another name, gets a COMPLETE marker that lists every
file with its size, and is renamed. Whatever lacks a true marker is neither resumed from nor deleted.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from swiftlite.recipe.errors import ModelError, SwiftliteError

MARKER = "COMPLETE"
NAME = re.compile(r"step-(\d+)")


@dataclass
class State:
    """What a checkpoint holds: `tensors[file][name]` and a JSON-able `meta`."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    meta: Mapping[str, Any]


class DiskFullError(SwiftliteError):
    """A folder does not fit on the disk; nothing half-written remains."""


GO_ON = "Free some space, then go on with --resume auto."


def require_space(folder: Path, needed: int, fix: str = GO_ON) -> None:
    """Raises DiskFullError where fewer than `needed` bytes are free on the disk of `folder`, which need not exist yet."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        numbers = f"{needed / 1e9:.2g} GB needed, {free / 1e9:.2g} GB free"
        raise DiskFullError(f"not enough space on the disk: {numbers}.", where=folder, fix=fix)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that the disk, a quota or a size limit is full: safetensors only does so in words."""
    number, text = getattr(error, "errno", None), str(error)
    return number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in text or "File too large" in text


def write_folder(final: Path, fill: Callable[[Path], None]) -> Path:
    """Creates the folder `final` in one step: `fill(folder)` writes into a hidden one beside it, which is then renamed.

    Raises:
        DiskFullError: when the disk is full; the hidden folder is removed.
    """
    part = final.with_name(f".{final.name}.part-{os.getpid()}")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        fill(part)
        for path in part.rglob("*"):
            if path.is_file():
                with path.open("rb") as f:
                    os.fsync(f.fileno())
        part.rename(final)
    except BaseException as e:
        shutil.rmtree(part, ignore_errors=True)
        if is_disk_full(e):
            raise DiskFullError("no space left on the disk.", where=final, fix=GO_ON) from e
        raise
    return final


def save(root: Path, step: int, state: State, extra: Callable[[Path], None] | None = None) -> Path:
    """Writes `root/step-NNNNNN` and returns it. `extra(folder)` may add files, as the adapter folder.

    An incomplete folder of that name is set aside.

    Raises:
        DiskFullError: it does not fit on the disk.
        ModelError: there is a complete checkpoint of that step.
    """
    final = root / f"step-{step:06d}"
    if final.exists() and fault(final) is None:
        raise ModelError("this checkpoint exists already", where=final, fix="Resume from it, or choose another --output.")
    if final.exists():  # not ours to delete, and in the way
        final.rename(final.with_name(f"{final.name}.incomplete-{os.getpid()}"))
    require_space(final, sum(t.numel() * t.element_size() for tensors in state.tensors.values() for t in tensors.values()))

    def fill(folder: Path) -> None:
        for name, tensors in state.tensors.items():
            save_file({k: t.contiguous() for k, t in tensors.items()}, folder / f"{name}.safetensors")
        (folder / "state.json").write_text(json.dumps(state.meta))
        if extra:
            extra(folder)
        sizes = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
        (folder / MARKER).write_text(json.dumps(sizes, indent=1))

    return write_folder(final, fill)


def fault(folder: Path) -> str | None:
    """Why a folder is no complete checkpoint, or None when it is one."""
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / MARKER).is_file():
        return "it has no COMPLETE marker"
    try:
        sizes = json.loads((folder / MARKER).read_text())
    except ValueError:
        return "its COMPLETE marker cannot be read"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def read(folder: Path, device: str = "cpu") -> State:
    """The state in a checkpoint folder.

    Raises:
        ModelError: when the folder is no complete checkpoint.
    """
    if (why := fault(folder)) is not None:
        raise ModelError(f"not a complete checkpoint: {why}", where=folder, fix="Take the newest complete one: --resume auto.")
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt", device=device) as f:
            tensors[path.stem] = {k: f.get_tensor(k) for k in f.keys()}
    return State(tensors, json.loads((folder / "state.json").read_text()))


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint folder; None for any other folder."""
    found = NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def complete(root: Path) -> tuple[list[Path], dict[Path, str]]:
    """Complete checkpoints below `root`, oldest first, and what was passed over with the reason."""
    good, skipped = [], {}
    for folder in sorted((p for p in root.glob("*step-*") if p.is_dir()), key=lambda p: (step_of(p) or -1, p.name)):
        why: str | None = "its name is not ours"
        if step_of(folder) is not None:
            why = fault(folder)
        elif ".part-" in folder.name or ".incomplete-" in folder.name:
            why = "it was never finished"
        if why is None:
            good.append(folder)
        else:
            skipped[folder] = why
    return good, skipped


def rotate(root: Path, limit: int | None, best: int | None) -> list[Path]:
    """Removes complete checkpoints beyond the newest `limit`, never the one of step `best`. Returns what was removed.

    A folder loses its marker first: killed half-way, it is seen as incomplete.
    """
    good, _ = complete(root)
    doomed = [p for p in good[: -limit or None] if step_of(p) != best] if limit else []
    for folder in doomed:
        (folder / MARKER).unlink()
        shutil.rmtree(folder)
    return doomed
