"""The receipt of an export: what was written, and how far it is from the trained model."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from swiftlite.export.config import dtype_name
from swiftlite.export.trained import Written
from swiftlite.export.verify import Differences, Tolerance

NAME = "export_report.json"
Part = dict[str, Any]


def part(
    name: str, target: Path, staged: Path, written: Written, differences: Differences, limit: Tolerance, faults: Sequence[str]
) -> Part:
    """The report on one format. `staged` is where the files lie until they are proven."""
    good = differences.within(limit) and not faults
    return {
        "format": name,
        "folder": str(target),
        "verdict": "verified" if good else "failed",
        "dtype": dtype_name(written.dtype),
        "files": [
            {"name": str(p.relative_to(staged)), "bytes": p.stat().st_size, "sha256": _sha256(p)}
            for p in sorted(staged.rglob("*"))
            if p.is_file()
        ],
        "differences": differences.as_dict() | {"wrong_tensors": list(faults)},
        "tolerance": vars(limit).copy(),
        "notes": written.notes,
        "versions": {library: version(library) for library in ("torch", "transformers", "peft", "safetensors")},
    }


def save(output: Path, parts: Sequence[Part]) -> Path:
    """Adds parts to OUTPUT/export_report.json, in which each format has its latest one."""
    path = output / NAME
    old: Mapping[str, Part] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    output.mkdir(parents=True, exist_ok=True)
    whole = {**old, **{p["format"]: _finite(p) for p in parts}}
    path.write_text(json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    return path


def lines(part: Part) -> list[str]:
    """What a person reads of it."""
    d, size = part["differences"], sum(f["bytes"] for f in part["files"])
    head = f"{part['format']}: {part['folder']} ({part['dtype']}, {size / 1e6:.1f} MB)"
    logits = f"largest logit difference {d['max_abs']:.2g} of {d['largest_logit']:.3g}, KL {d['kl']:.2g}, "
    logits += f"same likeliest token at {d['top1_agreement']:.1%} of {d['positions']} positions"
    return [f"{head} {part['verdict']}: {logits}", *(f"  {note}" for note in part["notes"])]


def why(part: Part) -> str:
    """The reason of a failed verdict."""
    d, limit = part["differences"], part["tolerance"]
    if wrong := d["wrong_tensors"]:
        return f"{wrong[0]}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
    found = f"largest logit difference {d['max_abs']:.3g}, relative {d['relative']:.3g}, KL {d['kl']:.3g}"
    allowed = f"{limit['max_abs'] * max(1.0, d['largest_logit']):.3g}, {limit['relative']:.3g}, {limit['kl']:.3g}"
    return f"{found}; allowed {allowed}"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: their names stand for them."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
