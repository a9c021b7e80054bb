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
from swiftlite.export.updates import MUCH
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
        "notes": [*written.notes, *_lost(written)],
        "updates": written.updates,
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
    more = [*_onto(part), *_updates(part), *part["notes"]]
    return [f"{head} {part['verdict']}: {logits}", *(f"  {text}" for text in more)]


def _onto(part: Part) -> list[str]:
    """Where the base was packed: what the adapter does on both kinds of weights, and on which it was merged."""
    gaps, onto = part.get("gaps"), part.get("onto")
    if gaps is None:
        return []
    kinds = {"dequantised": f"the {gaps['packed']} weights, dequantised", "original": "the weights of the model's files"}
    lines = [
        f"adapter on {words}: logits {gap['relative']:.2g} of their norm off, KL {gap['kl']:.2g}, same likeliest token at "
        f"{gap['top1_agreement']:.1%}"
        for kind, words in kinds.items()
        if (gap := gaps[kind]) is not None
    ]
    if onto:
        why = ", the closer ones (export.onto: auto)" if onto["asked"] == "auto" and gaps["original"] else ""
        with_what = "; compared with the adapter on them" if onto["base"] == "original" else ""
        lines.append(f"merged onto {kinds[onto['base']]}{why}{with_what}")
    return lines


def _updates(part: Part) -> list[str]:
    """What rounding to the written type did to what was learned."""
    u = part.get("updates")
    if u is None:
        return []
    text = f"updates as written in {part['dtype']}: rounding error {u['error']:.2g} of their norm, {u['kept']:.1%} of it kept"
    return [f"{text}, {u['vanished']:.1%} of their elements vanished"]


def _lost(written: Written) -> list[str]:
    """A note where the written type cannot well hold what was learned."""
    u = written.updates
    if u is None or u["error"] <= MUCH:
        return []
    how = f"{dtype_name(written.dtype)} rounds the updates by {u['error']:.0%} of their norm (most in {u['worst']['name']})"
    return [f"{how}: they are small beside the weights. export.dtype: fp32 holds them, and so does the adapter"]


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
