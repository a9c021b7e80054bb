"""A talk on the terminal, or with lines from a pipe."""

import json
import sys
from collections.abc import Callable
from typing import Any

from swiftlite.infer.generate import Decoding, encode
from swiftlite.infer.load import Target
from swiftlite.infer.prompts import RawText
from swiftlite.infer.stream import stream_ids
from swiftlite.recipe.errors import DataError

HELP = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(
    target: Target,
    *,
    system: str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    raw: bool = False,
    trace: bool = False,
    read: Callable[[str], str] | None = None,
    write: Callable[[str], object] | None = None,
) -> None:
    """Answers line by line, each with what was said before, until /exit, the end of input, or Ctrl-C at the prompt.

    Args:
        raw: lines are given to the model as they stand, each by itself.
        trace: print the ids that the model is given.
        read: gives the next line for a prompt text, and raises EOFError at the end; default standard input.
        write: takes pieces of text; default standard output.
    """
    decoding = Decoding(max_new_tokens, temperature, top_p, seed)
    say = write or _print
    if read is None:
        print("\n".join(target.lines()), file=sys.stderr)
        if sys.stdin.isatty():
            print(HELP, file=sys.stderr)
    ask, history = read or _read, list[dict[str, Any]]()
    while True:
        try:
            line = ask("> ")
        except (EOFError, KeyboardInterrupt):
            say("\n" if read is None and sys.stdin.isatty() else "")
            return
        command = line.strip()
        if command == "/exit":
            return
        if command == "/reset":
            history.clear()
        elif command:
            _turn(target, line, history, decoding, system, raw, trace, say)


def _turn(
    target: Target,
    line: str,
    history: list[dict[str, Any]],
    decoding: Decoding,
    system: str | None,
    raw: bool,
    trace: bool,
    say: Callable[[str], object],
) -> None:
    """One answer; the history grows by it. A line that cannot be answered is not kept."""
    asked = {"role": "user", "content": line}
    try:
        ids = encode(target, RawText(line) if raw else [*history, asked], raw=raw, system=system)
    except DataError as error:
        say(f"{error} /reset begins anew.\n" if history else f"{error}\n")
        return
    if trace:
        say(f"prompt ids: {json.dumps(ids)}\n")
    pieces, answer = list[str](), stream_ids(target, ids, decoding)
    try:
        for piece in answer:
            pieces.append(piece)
            say(piece)
    except KeyboardInterrupt:
        say(" [stopped]")
    finally:
        answer.close()  # type: ignore[attr-defined]
    say("\n")
    if not raw:
        history += [asked, {"role": "assistant", "content": "".join(pieces)}]


def _read(prompt: str) -> str:
    if sys.stdin.isatty():
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _print(text: str) -> None:
    print(text, end="", flush=True)
