"""What became of every row: counts, reasons, and how training rows look."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftlite.data.findings import Findings
from swiftlite.data.overlong import TOO_LONG
from swiftlite.data.render import IGNORE, Sample
from swiftlite.data.rows import Outcome

LISTED_ROWS = 1000
SHOWN_ROWS = 10
SHOWN_CHARACTERS = 400
# Reading goes on to here after the first bad row, so that the user learns of all mistakes of a file at once, and soon.
BAD_ROWS_SHOWN = 20


def share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


@dataclass
class Tally:
    """Counts of one source. Tokens are those of kept rows, after any cut. `split` rows gave several samples, rows to train on.
    Of `pairs` both sides are samples, and their tokens count.

    `token_histogram` counts samples by length, under the power of two that it does not exceed: "64" has those of 33 to 64 tokens.
    """

    format: str = ""
    read: int = 0
    kept: int = 0
    cut: int = 0
    split: int = 0
    pairs: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    trained_share: float = 0.0
    token_histogram: dict[str, int] = field(default_factory=dict)

    def absorb(self, other: "Tally") -> None:
        """Adds the counts of more rows of this source."""
        self.format = self.format or other.format
        for name in ("read", "kept", "cut", "split", "pairs", "samples", "tokens", "trained_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest = max(self.longest, other.longest)
        self.trained_share = share(self.trained_tokens, self.tokens)
        for upto, count in other.token_histogram.items():
            self.token_histogram[upto] = self.token_histogram.get(upto, 0) + count

    def keep(self, sample: Sample) -> None:
        length = len(sample.input_ids)
        self.samples += 1
        self.tokens += length
        self.trained_tokens += sample.trained
        self.longest = max(self.longest, length)
        self.trained_share = share(self.trained_tokens, self.tokens)
        upto = str(1 << (length - 1).bit_length())
        self.token_histogram[upto] = self.token_histogram.get(upto, 0) + 1


@dataclass(frozen=True)
class BadOne:
    """A row that cannot be used; `at` is its line or row number, with that word in front."""

    source: str
    at: str
    kind: str
    detail: str
    excerpt: str


@dataclass
class Report:
    """Grows while rows are read; `as_dict` is data_report.json."""

    max_length: int
    train_on: str
    sources: dict[str, Tally] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    rows: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    bad: int = 0
    first_bad: list[BadOne] = field(default_factory=list)
    too_long: BadOne | None = None
    findings: Findings = field(default_factory=Findings)
    _listed: Counter[str] = field(default_factory=Counter)

    def source(self, name: str) -> Tally:
        """A new tally; a name that comes twice is numbered."""
        unique, n = name, 1
        while unique in self.sources:
            n += 1
            unique = f"{name} #{n}"
        return self.sources.setdefault(unique, Tally())

    def add(self, outcome: Outcome, tally: Tally) -> None:
        """Counts one row.

        Args:
            tally: of its source, as `source` gave it.
        """
        row = outcome.row
        tally.read += 1
        if outcome.bad is not None:
            self.bad += 1
            bad = BadOne(row.source, f"{row.unit} {row.line}", outcome.bad.kind, outcome.bad.detail, row.excerpt)
            self.first_bad += [bad] if len(self.first_bad) < BAD_ROWS_SHOWN else []
            self.too_long = self.too_long or (bad if bad.kind == TOO_LONG else None)
            self.drop(bad.source, bad.kind, bad.detail, bad.excerpt)
            return
        if not outcome.samples:
            self.drop(row.source, outcome.kind, outcome.detail, row.excerpt)
            return
        if outcome.cut:
            tally.cut += 1
            self.note_row(row.source, "cut", outcome.cut, row.excerpt)
        tally.kept += 1
        tally.split += len(outcome.samples) > 1 and not outcome.pair
        tally.pairs += outcome.pair
        for sample in outcome.samples:
            tally.keep(sample)
        self.findings.keep(outcome.samples)
        if outcome.findings:
            self.findings.note(row.source, outcome.findings)

    def absorb(self, other: "Report", tally: Tally) -> None:
        """Counts the rows that `other` counted, which follow those of this report and are of one source.

        Args:
            tally: of that source.
        """
        for counts in other.sources.values():
            tally.absorb(counts)
        self.bad += other.bad
        self.first_bad += other.first_bad[: BAD_ROWS_SHOWN - len(self.first_bad)]
        self.too_long = self.too_long or other.too_long
        self.dropped.update(other.dropped)
        for kind, row in other.rows:
            self._list(kind, row)
        self.findings.absorb(other.findings)

    def note_row(self, source: str, kind: str, detail: str, text: str) -> None:
        """Lists a row that was dropped or cut; beyond LISTED_ROWS of a kind only the counts grow."""
        self._list(kind, {"source": source, "reason": f"{kind}: {detail}" if detail else kind, "text": text})

    def _list(self, kind: str, row: dict[str, str]) -> None:
        self._listed[kind] += 1
        if self._listed[kind] <= LISTED_ROWS:
            self.rows.append((kind, row))

    def drop(self, source: str, kind: str, detail: str, text: str) -> None:
        self.dropped[kind] += 1
        self.note_row(source, kind, detail, text)

    def total(self, name: str) -> int:
        return sum(getattr(tally, name) for tally in self.sources.values())

    def as_dict(self, notes: Sequence[str], source_of: Callable[[int], str]) -> dict[str, Any]:
        """The report so far.

        Args:
            source_of: the place of the n-th sample that was kept.
        """
        counts = ("read", "kept", "cut", "split", "pairs", "samples", "tokens", "trained_tokens")
        totals = {name: self.total(name) for name in counts}
        lengths: Counter[str] = Counter()
        for tally in self.sources.values():
            tally.token_histogram = dict(sorted(tally.token_histogram.items(), key=lambda bucket: int(bucket[0])))
            lengths.update(tally.token_histogram)
        return {
            **totals,
            "trained_share": share(totals["trained_tokens"], totals["tokens"]),
            "token_histogram": dict(sorted(lengths.items(), key=lambda bucket: int(bucket[0]))),
            "findings": self.findings.as_dict(source_of),
            "dropped": dict(self.dropped),
            "longest": max((t.longest for t in self.sources.values()), default=0),
            "max_length": self.max_length,
            "train_on": self.train_on,
            "sources": {name: asdict(tally) for name, tally in self.sources.items()},
            "notes": list(notes),
            "rows": [row for _, row in self.rows],
            "rows_not_listed": sum(self.dropped.values()) + totals["cut"] - len(self.rows),
        }


def table(report: dict[str, Any], title: str = "data") -> str:
    """A data report as a few lines of text."""
    lines = [f"{f'{title} rows':<32} {'read':>9} {'kept':>9} {'cut':>7} {'tokens':>11} {'trained':>11}"]
    sources = report["sources"]
    for name, t in [*sources.items(), *([("all", report)] if len(sources) > 1 else [])]:
        share = f"{t['trained_tokens'] / t['tokens']:.0%}" if t["tokens"] else "-"
        short = name if len(name) <= 32 else "..." + name[-29:]
        counts = f"{t['read']:>9,} {t['kept']:>9,} {t['cut']:>7,} {t['tokens']:>11,} {t['trained_tokens']:>11,}"
        lines.append(f"{short:<32} {counts} {share:>4}")
    if report["split"]:
        lines.append(f"split {report['split']:,}: {report['kept']:,} rows give {report['samples']:,} rows to train on")
    if report["pairs"]:
        lines.append(f"pairs {report['pairs']:,}: tokens are those of both sides, the prompt twice")
    if report["dropped"]:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in report["dropped"].items())
        lines.append(f"dropped {sum(report['dropped'].values()):,}: {dropped}")
    lines += [f"  {row['source']}  {row['reason']}" for row in report["rows"][:SHOWN_ROWS]]
    more = len(report["rows"]) - SHOWN_ROWS + report["rows_not_listed"]
    lines += [f"  and {more:,} more rows; data_report.json of the run lists them"] if more > 0 else []
    lines += [f"{report['held_back']:,} of the kept rows are held back for evaluation"] if report.get("held_back") else []
    return "\n".join(lines + [f"note: {note}" for note in report["notes"]])


def preview(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, *, count: int = 3, colour: bool = False) -> str:
    """The first rows as the model gets them; what is trained is green, or between {+ and +} without colour."""
    opening, closing = ("\x1b[32m", "\x1b[0m") if colour else ("{+", "+}")
    shown = []
    for s in samples[:count]:
        parts = []
        for trained, run in groupby(zip(s.input_ids, s.labels, strict=True), key=lambda pair: pair[1] != IGNORE):
            text = _middle_out(str(tokenizer.decode([i for i, _ in run], skip_special_tokens=False)))
            parts.append(f"{opening}{text}{closing}" if trained else text)
        shown.append(f"--- {s.source}: {len(s.input_ids)} tokens, {s.trained} trained\n{''.join(parts)}")
    return "\n".join(shown)


def dump(units: Iterable[Sequence[Sample]], path: str | Path) -> None:
    """One JSON line per training row or pack: input_ids, labels, position_ids, and source, the `file:line` of each piece."""
    with open(path, "w", encoding="utf-8") as out:
        for unit in units:
            row = {
                "input_ids": [i for s in unit for i in s.input_ids],
                "labels": [t for s in unit for t in s.labels],
                "position_ids": [p for s in unit for p in range(len(s.input_ids))],
                "source": [s.source for s in unit],
            }
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


def _middle_out(text: str) -> str:
    half, left_out = SHOWN_CHARACTERS // 2, len(text) - SHOWN_CHARACTERS
    return text if left_out <= 0 else f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"
