"""What may stand in the path of a source besides a path: `org/name:subset[split]@revision`, and `#n` for n drawn rows."""

import glob
import re
from pathlib import Path
from typing import Any

from swiftlite.recipe.errors import DataError
from swiftlite.recipe.schema import DataSource

_HUB = re.compile(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?::([\w.-]+))?(?:\[(.+)\])?(?:@([\w./-]+))?")
_DRAWN = re.compile(r"(.+)#(\d+)")


def spelled_out(source: DataSource) -> DataSource:
    """The source with what its path says besides a path under the keys of their own. What exists by that name is a path.

    Raises:
        DataError: the path and a key say different things, or no rows are asked for.
    """
    drawn = None if _exists(source.path) else _DRAWN.fullmatch(source.path)
    path = drawn.group(1) if drawn else source.path
    given: dict[str, Any] = {"sample": int(drawn.group(2)) if drawn else None}
    hub = None if _exists(path) else _HUB.fullmatch(path)
    if hub and any(hub.groups()[1:]) and not ("/" in path and _folder(path)):
        path = hub.group(1)
        given |= dict(zip(("subset", "split", "revision"), hub.groups()[1:], strict=True))
    given = {key: value for key, value in given.items() if value is not None}
    if given.get("sample") == 0:
        raise DataError("#0 asks for no rows.", where=source.path)
    for key, value in given.items():
        if key in source.model_fields_set and getattr(source, key) not in (None, value):
            raise DataError(
                f"says {key} {value}, the key `{key}` says {getattr(source, key)}.", where=source.path, fix="Keep one."
            )
    return source.model_copy(update={"path": path, **given})


def _exists(path: str) -> bool:
    here = Path(path).expanduser()
    return here.exists() or (glob.has_magic(path) and bool(glob.glob(str(here), recursive=True)))


def _folder(path: str) -> bool:
    """A hub id may look like `folder/name`: where the folder exists, the user meant the folder."""
    return Path(Path(path).expanduser().parts[0]).is_dir()
