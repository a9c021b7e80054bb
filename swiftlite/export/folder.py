"""A target folder appears whole or not at all, and an earlier export in it stays until the new one is proven."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swiftlite.dist.checkpoint import DiskFullError, is_disk_full, require_space
from swiftlite.recipe.errors import RecipeError

_MORE_SPACE = "Free some space, or choose another output."


def check_target(target: Path, overwrite: bool, base: Path) -> None:
    """Refuses a target folder that holds something.

    Raises:
        RecipeError: the target is a file, the base model, not empty without `overwrite`, or not an export.
    """
    if target.exists() and base.resolve().is_relative_to(target.resolve()):
        raise RecipeError("this folder holds the base model", where=target, fix="Choose another output.")
    if target.is_file():
        raise RecipeError("the target of the export is a file", where=target, fix="Choose another output.")
    names = {p.name for p in target.iterdir()} if target.exists() else set()
    if names and not overwrite:
        raise RecipeError(
            "the target folder of the export is not empty",
            where=target,
            fix="Set export.overwrite: true, or choose another output.",
        )
    # A mistyped path must not cost a home folder.
    if names and not names & {"config.json", "adapter_config.json"}:
        raise RecipeError(
            "export.overwrite replaces an earlier export, and this folder is none", where=target, fix="Choose another output."
        )


def check_space(target: Path, needed: int) -> None:
    """Raises DiskFullError when fewer than `needed` bytes are free where `target` lies."""
    require_space(target, needed, _MORE_SPACE)


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its name when the block ends well, and vanishes when it does not.

    Raises:
        DiskFullError: the disk is full.
    """
    part = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        for path in part.rglob("*"):
            if path.is_file():
                path.chmod(0o666 & ~_umask())  # safetensors makes its files readable to their owner only
        _swap(part, target)
    except BaseException as e:
        shutil.rmtree(part, ignore_errors=True)
        if is_disk_full(e):
            raise DiskFullError("no space left on the disk for this export.", where=target, fix=_MORE_SPACE) from e
        raise


def _swap(part: Path, target: Path) -> None:
    if not target.exists():
        part.rename(target)
        return
    old = target.with_name(f"{target.name}.old-{os.getpid()}")
    target.rename(old)
    try:
        part.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
