"""Errors a user can cause. Each knows its exit code; the command line prints them without a traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class SwiftliteError(Exception):
    """What went wrong, where, and the one change that mends it.

    Args:
        what: the fault in one sentence, with the offending text.
        where: `file:line`, a key path or a folder; printed in front.
        fix: the one change that mends it; printed behind.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: object = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, None if where is None else str(where), fix
        text = f"{self.where}: {what}" if self.where else what
        if fix and text[-1] not in ".!?\n":
            text += "."
        super().__init__(f"{text} {fix}" if fix else text)


class RecipeError(SwiftliteError):
    """The recipe or the command line is wrong."""

    exit_code = 2


class DataError(SwiftliteError):
    """The data is wrong."""

    exit_code = 3


class ModelError(SwiftliteError):
    """The model, adapter or checkpoint is wrong."""

    exit_code = 4


def nearest(word: str, legal: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the legal word closest to `word`, or an empty string."""
    found = get_close_matches(word.lower(), list(legal), n=1, cutoff=0.6)
    return f" Did you mean '{found[0]}'?" if found else ""
