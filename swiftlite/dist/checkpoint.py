"""Checkpoint folders: named tensors as safetensors, everything else as JSON, nothing pickled.

A folder carries its final name only once it is whole: every rank writes its own parts into a hidden one, the first rank waits for
all, adds a COMPLETE marker that lists every file with its size, and renames. Whatever lacks a true marker is neither resumed from
nor deleted. A sharded tensor is written in the parts that ranks hold, each with its place; readers ask for any rows of it, so a
checkpoint of one layout is read by any other.
"""

import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from swiftlite.dist.tensors import local, place_of
from swiftlite.dist.world import World
from swiftlite.recipe.errors import ModelError, SwiftliteError

MARKER = "COMPLETE"
NAME = re.compile(r"step-(\d+)")


@dataclass
class State:
    """What goes into a checkpoint: `tensors[group][name]` and a JSON-able `meta`.

    Of a DTensor each rank writes its own rows. Other tensors are the same on all ranks, and the first one writes them, but for the
    groups of `own`: these differ, and their names say the rank.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    meta: Mapping[str, Any]
    own: frozenset[str] = frozenset()


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


@dataclass(frozen=True)
class _Part:
    """Rows of a tensor: where they lie, and which they are."""

    file: Path
    start: int
    shape: tuple[int, ...]


class Saved:
    """A complete checkpoint folder, read on demand.

    Raises:
        ModelError: when the folder is no complete checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        if (why := fault(folder)) is not None:
            raise ModelError(f"not a complete checkpoint: {why}", where=folder, fix="Take the newest complete one: --resume auto.")
        self.folder = folder
        self.meta: dict[str, Any] = json.loads((folder / "state.json").read_text())
        self._groups: dict[str, dict[str, list[_Part]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            group = self._groups.setdefault(_FILE.sub("", path.stem), {})
            with safe_open(path, "pt") as f:
                starts = json.loads((f.metadata() or {}).get("starts", "{}"))
                for name in f.keys():
                    group.setdefault(name, []).append(_Part(path, starts.get(name, 0), tuple(f.get_slice(name).get_shape())))

    def names(self, group: str) -> list[str]:
        """Names of the tensors of a group; empty where there is no such group."""
        return list(self._groups.get(group, {}))

    def shape(self, group: str, name: str) -> list[int]:
        """The global shape."""
        parts = self._groups[group][name]
        return [sum(p.shape[0] for p in parts), *parts[0].shape[1:]] if parts[0].shape else []

    def rows(self, group: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor on the CPU, read out of the parts that hold them."""
        found: list[Tensor] = []
        for part in sorted(self._groups[group][name], key=lambda p: p.start):
            with safe_open(part.file, "pt") as f:
                if not part.shape or start == stop:
                    found = [f.get_slice(name)[0:0] if part.shape else f.get_tensor(name)]
                    break
                first = max(start - part.start, 0)
                last = part.shape[0] if stop is None else min(stop - part.start, part.shape[0])
                if first < last:
                    found.append(f.get_slice(name)[first:last])
        return found[0] if len(found) == 1 else torch.cat(found)

    def part(self, group: str, name: str, model: Tensor) -> Tensor:
        """The rows that this rank holds of `model`, which has the global shape."""
        if not isinstance(model, DTensor):
            return self.rows(group, name)
        shape, offset = place_of(model)
        return self.rows(group, name, offset[0], offset[0] + shape[0])


_FILE = re.compile(r"-\d{5}-of-\d{5}$")
_RANK = ".rank-{:05d}.json"  # what a rank wrote, or why it could not


@dataclass
class Saving:
    """A checkpoint on its way to the disk."""

    final: Path
    _part: Path
    _world: World | None
    _thread: threading.Thread | None = None
    _error: list[BaseException] = field(default_factory=list)

    def wait(self) -> Path:
        """The folder, once this rank's share is written; on the first rank, once all is.

        Raises:
            DiskFullError: it does not fit on the disk.
            ModelError: another rank did not write its share.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error:
            error = self._error[0]
            if is_disk_full(error):
                raise DiskFullError("no space left on the disk.", where=self.final, fix=GO_ON) from error
            raise error
        return self.final

    def _run(self, write: Callable[[], None], background: bool) -> "Saving":
        def work() -> None:
            try:
                write()
            except BaseException as error:  # handed to the thread that waits
                self._error.append(error)
                if self._world is None or self._world.is_main:
                    shutil.rmtree(self._part, ignore_errors=True)
                else:  # the first rank waits for this one's word
                    with suppress(OSError):
                        _replace(self._part / _RANK.format(self._world.rank), json.dumps({"error": str(error)}))

        if background:
            self._thread = threading.Thread(target=work, name="checkpoint")
            self._thread.start()
        else:
            work()
        return self


def save(
    root: Path,
    step: int,
    state: State,
    extra: Callable[[Path], None] | None = None,
    *,
    world: World | None = None,
    background: bool = False,
) -> Saving:
    """Writes `root/step-NNNNNN`; all ranks must call. `extra(folder)` may add files, as the adapter folder.

    An incomplete folder of that name is set aside. In the background only the writing goes on when this returns: what is written is
    a copy in host memory.

    Raises:
        DiskFullError: it does not fit on the disk.
        ModelError: there is a complete checkpoint of that step.
    """
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    final, shares = root / f"step-{step:06d}", _shares(state, rank, size)
    if rank == 0:
        if final.exists() and fault(final) is None:
            raise ModelError("this checkpoint exists already", where=final, fix="Resume from it, or choose another --output.")
        if final.exists():  # not ours to delete, and in the way
            final.rename(final.with_name(f"{final.name}.incomplete-{os.getpid()}"))
    mine = sum(t.numel() * t.element_size() for tensors, _ in shares.values() for t in tensors.values())
    whole, pid = (mine, os.getpid()) if world is None else map(int, world.sum(mine, os.getpid() if rank == 0 else 0))
    require_space(final, whole)
    part = final.with_name(f".{final.name}.part-{pid}")
    saving = Saving(final, part, world)

    def write() -> None:
        for name, (tensors, starts) in shares.items():
            save_file(tensors, part / name, metadata={"starts": json.dumps(starts)} if starts else None)
            _sync(part / name)
        if size > 1:
            _replace(part / _RANK.format(rank), json.dumps({"bytes": mine}))
        if rank == 0:
            _finish(part, final, state.meta, size)

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        if world is not None:
            world.barrier()
        if extra:
            extra(part)
        if background:  # training goes on and changes the tensors
            for tensors, _ in shares.values():
                tensors.update({n: t.to("cpu", copy=True) for n, t in tensors.items()})

    saving._run(begin, background=False)
    if not saving._error:
        saving._run(write, background)
    if not background:
        saving.wait()
        if world is not None:
            world.barrier()
    return saving


def _shares(state: State, rank: int, size: int) -> dict[str, tuple[dict[str, Tensor], dict[str, int]]]:
    """What this rank writes: file name -> its tensors, and the first row of each that is a part of one."""
    suffix = f"-{rank + 1:05d}-of-{size:05d}" if size > 1 else ""
    shares = {}
    for group, tensors in state.tensors.items():
        mine: dict[str, Tensor] = {}
        starts: dict[str, int] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                shape, offset = place_of(tensor)
                copy = any(p.is_replicate() and i for p, i in zip(tensor.placements, tensor.device_mesh.get_coordinate() or [], strict=True))
                # A rank without rows writes none, but for tensors that have none at all.
                if copy or (shape[0] == 0 and (offset[0] or rank)):
                    continue
                starts |= {name: offset[0]} if offset[0] else {}
            elif rank and group not in state.own:
                continue
            mine[name] = local(tensor.detach()).contiguous()
        if mine:
            shares[f"{group}{suffix}.safetensors"] = (mine, starts)
    return shares


def _finish(part: Path, final: Path, meta: Mapping[str, Any], size: int, patience_s: float = 3600) -> None:
    """Waits for the shares of all ranks, then makes the folder a checkpoint."""
    began, waiting = time.monotonic(), [part / _RANK.format(rank) for rank in range(size)] if size > 1 else []
    while missing := [p for p in waiting if not p.exists()]:
        if time.monotonic() - began > patience_s:
            rank = int(missing[0].stem.rpartition("-")[2])
            raise ModelError(f"rank {rank} did not write its share within {patience_s:.0f} s", where=final)
        time.sleep(0.05)
    for rank, path in enumerate(waiting):
        if (fault := json.loads(path.read_text()).get("error")) is not None:
            raise ModelError(f"rank {rank} could not write its share: {fault}", where=final, fix=GO_ON)
        path.unlink()
    (part / "state.json").write_text(json.dumps(meta))
    files = [p for p in sorted(part.rglob("*")) if p.is_file()]
    (part / MARKER).write_text(json.dumps({str(p.relative_to(part)): p.stat().st_size for p in files}, indent=1))
    for path in [*files, part / MARKER]:
        _sync(path)
    part.rename(final)


def _replace(path: Path, text: str) -> None:
    """A file that is seen whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.rename(path)


def _sync(path: Path) -> None:
    with path.open("rb") as f:
        os.fsync(f.fileno())


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
