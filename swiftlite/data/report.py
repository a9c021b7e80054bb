"""What became of every row: counts, reasons, and how training rows look."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftlite.data.render import IGNORE, Sample

LISTED_ROWS = 1000
SHOWN_ROWS = 10
SHOWN_CHARACTERS = 400


@dataclass
class Tally:
    """Counts of one source. Tokens are those of kept rows, after any cut."""

    format: str = ""
    read: int = 0
    kept: int = 0
    cut: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0


@dataclass
class Report:
    """Grows while rows are read; `as_dict` is data_report.json."""

    max_length: int
    train_on: str
    sources: dict[str, Tally] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    rows: list[dict[str, str]] = field(default_factory=list)
    bad: int = 0

    def source(self, name: str) -> Tally:
        """A new tally; a name that comes twice is numbered."""
        unique, n = name, 1
        while unique in self.sources:
            n += 1
            unique = f"{name} #{n}"
        return self.sources.setdefault(unique, Tally())

    def keep(self, tally: Tally, sample: Sample) -> None:
        tally.kept += 1
        tally.tokens += len(sample.input_ids)
        tally.trained_tokens += sample.trained
        tally.longest = max(tally.longest, len(sample.input_ids))

    def note_row(self, source: str, reason: str, text: str) -> None:
        """Lists a row that was dropped or cut; beyond LISTED_ROWS only the counts grow."""
        if len(self.rows) < LISTED_ROWS:
            self.rows.append({"source": source, "reason": reason, "text": text})

    def drop(self, source: str, kind: str, detail: str, text: str) -> None:
        self.dropped[kind] += 1
        self.note_row(source, f"{kind}: {detail}" if detail else kind, text)

    def total(self, name: str) -> int:
        return sum(getattr(tally, name) for tally in self.sources.values())

    def as_dict(self, notes: Sequence[str] = ()) -> dict[str, Any]:
        totals = {name: self.total(name) for name in ("read", "kept", "cut", "tokens", "trained_tokens")}
        return {
            **totals,
            "dropped": dict(self.dropped),
            "longest": max((t.longest for t in self.sources.values()), default=0),
            "max_length": self.max_length,
            "train_on": self.train_on,
            "sources": {name: asdict(tally) for name, tally in self.sources.items()},
            "notes": list(notes),
            "rows": self.rows,
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


def dump(samples: Sequence[Sample], path: str | Path) -> None:
    """One JSON line per training row: input_ids, labels, position_ids, and source, the `file:line` of each piece."""
    with open(path, "w", encoding="utf-8") as out:
        for s in samples:
            positions = list(range(len(s.input_ids)))
            row = {"input_ids": s.input_ids, "labels": s.labels, "position_ids": positions, "source": [s.source]}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


def _middle_out(text: str) -> str:
    half, left_out = SHOWN_CHARACTERS // 2, len(text) - SHOWN_CHARACTERS
    return text if left_out <= 0 else f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"
