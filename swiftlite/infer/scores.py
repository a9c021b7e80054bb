"""Scores of an evaluation for people. Loads no torch."""

from typing import Any


def as_text(scores: dict[str, Any]) -> str:
    """What `swiftlite.infer.evaluate.evaluate` gave, in a few lines, with answers beside what was expected."""
    rows = f"{scores['trained_tokens']:,} trained tokens of {scores['rows']:,} rows"
    lines = [f"loss         {scores['loss']:.4f} (perplexity {scores['perplexity']:.4g}) over {rows}"]
    if scores["dropped"]:
        lines.append("dropped      " + ", ".join(f"{count:,} {reason}" for reason, count in scores["dropped"].items()))
    if scores.get("answered"):
        lines.append(f"exact match  {scores['exact_match']:.4f}: {scores['matched']:,} of {scores['answered']:,} answers")
    elif "answered" in scores:
        lines.append("exact match  none: no row has a prompt and an answer")
    for example in scores.get("examples", ()):
        lines.append(f"--- {example['source']}: {'right' if example['match'] else 'wrong'}")
        lines += [f"expected     {_short(example['expected'])}", f"answer       {_short(example['answer'])}"]
    return "\n".join(lines)


def _short(text: str, limit: int = 400) -> str:
    """One line, and not too long a one."""
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit:,} more characters]"
