"""One row to what is trained of it, or to why nothing is. Knows no other row, so rows can be made anywhere, in any order."""

from dataclasses import dataclass, field

from swiftlite.data.findings import suspicious
from swiftlite.data.formats import Format, RowError, conversation, pick_format
from swiftlite.data.overlong import fit, fit_pair
from swiftlite.data.read import BadRow, Row
from swiftlite.data.render import Renderer, Sample
from swiftlite.recipe.schema import DataSection, DataSource


@dataclass(slots=True)
class Outcome:
    """What became of a row: `samples`, or `bad`, or left out for `kind`. `cut` says what was left out of a kept row.

    `findings` are (kind, text) of what looks wrong with a kept row. `pair`: its two samples are the sides of one.
    """

    row: Row | BadRow
    samples: list[Sample] = field(default_factory=list)
    bad: RowError | None = None
    kind: str = ""
    detail: str = ""
    cut: str = ""
    findings: list[tuple[str, str]] = field(default_factory=list)
    pair: bool = False


class Maker:
    """Makes samples of the rows of one source.

    Args:
        data: the keys for all sources: format, columns, overlong.
        max_length: tokens that a row may have.
        format: how the rows are read; None: found by the columns of the first row that can be read.
        eats: what the objective learns from, rows or pairs.
    """

    def __init__(
        self,
        source: DataSource,
        data: DataSection,
        renderer: Renderer,
        max_length: int,
        format: Format | None = None,
        eats: str = "rows",
    ) -> None:
        self.source, self.data, self.renderer, self.max_length, self.format = source, data, renderer, max_length, format
        self.eats = eats
        self.columns = data.columns if source.columns is None else source.columns

    def pick_format(self, row: Row) -> None:
        """Settles how the rows of this source are read.

        Raises:
            DataError, RecipeError: no format fits, or more than one does.
        """
        self.format = pick_format(self.source.format or self.data.format, row.value, self.columns, self.source.path, self.eats)

    def __call__(self, row: Row | BadRow) -> Outcome:
        """What becomes of one row; what is wrong with it alone is not raised but told.

        Raises:
            DataError, RecipeError: what is wrong with the source as a whole, or with a key.
        """
        if isinstance(row, BadRow):
            return Outcome(row, bad=RowError(row.kind, row.reason))
        if self.format is None:
            self.pick_format(row)
            assert self.format is not None
        try:
            conv = conversation(row, self.format, self.columns, self.source.system)
            sides = conv.sides
            if (pair := len(sides) > 1) != (self.eats == "pairs"):
                raise RowError("no pair" if not pair else "a pair", f"format {self.format.name} says that it gives {self.eats}")
            if pair:
                whole = [self.renderer.sample(side) for side in sides]
                fitted = fit_pair(whole, self.data.overlong, self.max_length)
            else:
                whole = self.renderer.samples(conv)
                fitted = fit(conv, whole, self.renderer, self.data.overlong, self.max_length)
        except RowError as error:
            return Outcome(row, bad=error)
        if not fitted.samples:
            return Outcome(row, kind=fitted.kind, detail=fitted.detail)
        if pair:
            found = [f for side, s in zip(sides, whole, strict=True) for f in suspicious(row, side, [s], self.renderer)]
            found = list(dict(reversed(found)).items())[::-1]  # a kind counts once a row
        else:
            found = suspicious(row, conv, whole, self.renderer)
        return Outcome(row, fitted.samples, cut=fitted.cut, findings=found, pair=pair)
