"""Prepared rows on disk, one folder a set: made once, then mapped by every process and every later run.

A folder is named by a hash of all that decides over its content, and appears under its name only when it is complete. Processes
that want the same set at the same time, on one machine or several, meet at a lock file: one works, the others wait for it. No
collective is involved, so none can time out.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from swiftlite.data.render import Lessons, Renderer
from swiftlite.data.store import Store
from swiftlite.data.workers import Job
from swiftlite.recipe import tables
from swiftlite.recipe.errors import DataError

COMPLETE, ACCOUNT = "COMPLETE", "account"  # not .json: a folder of data may hold the cache
UNUSED_S = 30 * 86400
# What a builder that died has left: its lock is free, and it wrote nothing for this long.
DEAD_S = 86400
ELSEWHERE = "Set data.cache_dir to a folder with room for 8 bytes a token."

# Writes a store into a folder, and returns its report and what its rows taught the renderer.
Build = Callable[[Path], tuple[dict[str, Any], Lessons]]


@dataclass(frozen=True)
class Entry:
    """A prepared set. `found` is the folder that it was taken from, if it was there; `notes` are what a user should know."""

    store: Store
    report: dict[str, Any]
    lessons: Lessons
    found: Path | None = None
    notes: list[str] = field(default_factory=list)


def cache_root(cache_dir: str | None) -> Path:
    """data.cache_dir, else $SWIFTLITE_CACHE/data, else swiftlite/data below $XDG_CACHE_HOME or ~/.cache."""
    if cache_dir:
        return Path(cache_dir).expanduser().absolute()
    if own := os.environ.get("SWIFTLITE_CACHE"):
        return Path(own).expanduser().absolute() / "data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "swiftlite" / "data"


def key(job: Job) -> str:
    """A hash of what decides over prepared rows and their report: data, keys, template, tokenizer, and this code.

    Not of the path of a run, of what is held back or of weights, which choose among prepared rows.
    """
    files = [(str(file), _sha256(file)) for opened in job.sources for file in opened.files]
    tables_ = [opened.table._fingerprint for opened in job.sources if opened.table is not None]
    templates = json.dumps(job.renderer.template)
    about = {
        "files": files,
        "hub": tables_,
        "sources": [opened.source.model_dump(exclude={"weight"}) for opened in job.sources],
        "data": job.data.model_dump(include={"format", "columns", "overlong", "on_bad_rows", "max_bad_fraction"}),
        "formats": {name: row.plugin.parse.__module__ for name, row in tables.FORMATS.items() if row.plugin is not None},
        "renderer": job.renderer.keys,
        "tokenizer": _tokenizer(job.renderer),
        "max_length": job.max_length,
        "eats": job.eats,
        "seed": job.seed if any(opened.source.sample for opened in job.sources) else None,
        "today": date.today().isoformat() if "strftime_now" in templates else None,
        "code": _code(),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]


def entry(key: str, cache_dir: str | None, build: Build) -> Entry:
    """The set under `key`, built if it is not there.

    Raises:
        DataError: the disk is full; and what `build` raises, which leaves nothing behind.
    """
    root = cache_root(cache_dir)
    try:
        found = _open(root / key)
        if found is None:
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / f".{key}.lock"):
                found = _open(root / key)  # another process may have built it meanwhile
                if found is None:
                    return _built(root, key, build)
        return found
    except NotImplementedError:
        reason = "its file system has no locks"
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError("the disk is full; prepared rows are kept there.", where=root, fix=ELSEWHERE) from error
        reason = error.strerror or str(error)
    return _without_cache(root, reason, build)


def _open(folder: Path) -> Entry | None:
    """A complete entry, marked as used; None where there is none, or one that a crash of the machine has damaged."""
    try:
        store, account = Store.open(folder), json.loads((folder / ACCOUNT).read_text("utf-8"))
        used = folder / COMPLETE
        if not used.exists():
            return None
    except (FileNotFoundError, ValueError, KeyError):
        return None
    try:
        os.utime(used)
    except OSError:
        pass  # a cache that others keep
    return Entry(store, account["report"], Lessons(**account["lessons"]), folder)


def _built(root: Path, key: str, build: Build) -> Entry:
    """Builds under the lock of `key`."""
    for left in root.glob(f".{key}.*.part"):  # of a builder that died with the lock in its hand
        shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(root / key, ignore_errors=True)  # damaged, else it would have been opened
    part = root / f".{key}.{uuid.uuid4().hex[:8]}.part"
    with _removed_on_failure(part):
        _write(part, build)
        try:
            part.rename(root / key)
        except OSError:  # where locks do not hold, another may have been faster
            if not (root / key / COMPLETE).exists():
                raise
            shutil.rmtree(part, ignore_errors=True)
    _sweep(root)
    made = _open(root / key)
    assert made is not None
    return Entry(made.store, made.report, made.lessons)


def _write(folder: Path, build: Build) -> None:
    folder.mkdir()
    report, lessons = build(folder)
    (folder / ACCOUNT).write_text(json.dumps({"report": report, "lessons": asdict(lessons)}), "utf-8")
    (folder / COMPLETE).touch()


def _without_cache(root: Path, reason: str, build: Build) -> Entry:
    """A set that lives as long as this process: its files are gone as soon as they are mapped."""
    folder = Path(tempfile.mkdtemp(prefix="swiftlite-"))
    try:
        _write(folder / "data", build)
        made = _open(folder / "data")
    except OSError as error:
        raise DataError(f"prepared rows cannot be written: {error.strerror}.", where=folder, fix=ELSEWHERE) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert made is not None
    note = f"the cache {root} cannot be used ({reason}): rows are prepared anew at every start; set data.cache_dir"
    return Entry(made.store, made.report, made.lessons, notes=[note])


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _sweep(root: Path) -> None:
    """Removes entries that were not used for long, and what builders left that died."""
    now = time.time()
    for marker in root.glob(f"[!.]*/{COMPLETE}"):
        if now - marker.stat().st_mtime > UNUSED_S:
            shutil.rmtree(marker.parent, ignore_errors=True)
    for part in root.glob(".*.part"):
        newest = max((f.stat().st_mtime for f in [part, *part.glob("*")]), default=now)
        if now - newest > DEAD_S and _is_free(root / f".{part.name.split('.')[1]}.lock"):
            shutil.rmtree(part, ignore_errors=True)
    for lock in root.glob(".*.lock"):
        if now - lock.stat().st_mtime > UNUSED_S and _is_free(lock):
            lock.unlink(missing_ok=True)


def _is_free(lock: Path) -> bool:
    try:
        with FileLock(lock, timeout=0):
            return True
    except (Timeout, OSError):
        return False


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error}.", where=file) from error


def _tokenizer(renderer: Renderer) -> str:
    """A hash of all that decides over ids. Padding and truncation are how the tokenizer was last called, not what it is."""
    tokenizer = renderer.tokenizer
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    about = [type(tokenizer).__name__, backend, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


@cache
def _code() -> str:
    """A hash of this package's code and of the versions of what it renders and encodes with."""
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    versions = [version(name) for name in ("tokenizers", "transformers", "jinja2", "pyarrow")]
    return hashlib.sha256(sources + json.dumps(versions).encode()).hexdigest()
