"""The worker's side of a launch: only rank 0 speaks, and an error is said once. Loads no torch."""

import faulthandler
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from swiftlite.dist.launch import FOLDER, is_worker, ranks
from swiftlite.recipe.errors import SwiftliteError

# Seconds. A rank that only lost its fellows, or that may have failed like rank 0 did, gives the cause time to be seen first.
AFTER_RANK_0, AFTER_ALL = 3.0, 6.0

# peft imports it where it is installed, and on some CPUs it then speaks of a kernel that nothing here asks for.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


class SilentRankError(SwiftliteError):
    """A rank gave no sign for too long. Starting again may help."""


class _Voice:
    """Where this worker's words go: its log, and the console's stderr as it was."""

    log: Path | None = None
    console: int | None = None


def log_path(output: Path, rank: int) -> Path:
    return output / "logs" / f"rank-{rank}.log"


def hush(output: Path) -> None:
    """Sends what a worker other than rank 0 prints, and a crash's trace, to its log below `output`. Call it first of all."""
    if not is_worker():
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch, not loaded yet, warns of its own affairs
    rank = ranks().rank
    _Voice.log = log_path(output, rank)
    if rank > 0:
        _Voice.log.parent.mkdir(parents=True, exist_ok=True)
        _Voice.console = os.dup(2)
        sys.stdout.flush()
        log = os.open(_Voice.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    faulthandler.enable()


def tidy(output: Path) -> None:
    """Removes logs below `output` in which nothing stands, and folders that held nothing else."""
    for log in output.glob("logs/rank-*.log"):
        if log.stat().st_size == 0:
            log.unlink(missing_ok=True)
    for folder in (output / "logs", output):
        try:
            folder.rmdir()
        except OSError:  # not empty, or not there
            return


def report(error: BaseException, code: int, debug: bool = False) -> bool:
    """Tells what ended this worker: its launcher if that is ours, else the console. False where no launcher is: say it yourself.

    Args:
        code: exit code of this process; 130 for an interrupt.
        debug: show the traceback. That of a fault that is no user's mistake goes to the log of `hush` anyway.
    """
    if not is_worker():
        return False
    rank, lost, silent = ranks().rank, _lost(error), isinstance(error, SilentRankError)
    trace, fault = "".join(traceback.format_exception(error)), not isinstance(error, SwiftliteError) and code != 130
    text, log = f"{type(error).__name__}: {error}" if fault else str(error), _Voice.log
    if fault and log is None:
        text = trace
    elif fault and log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as f:
            f.write(trace)
    end = {
        "rank": None if silent else rank,  # it speaks of another one
        "code": code,
        "text": text,
        "lost": lost,
        "again": silent or fault,
        "time": time.time(),
        "trace": trace,
        "log": str(log) if fault and log is not None else None,
    }
    if folder := os.environ.get(FOLDER):
        part = Path(folder, f"{rank}.part")
        part.write_text(json.dumps(end), encoding="utf-8")
        part.rename(part.with_suffix(".json"))
    else:
        _say(end, rank, debug)
    return True


def _say(end: Mapping[str, object], rank: int, debug: bool) -> None:
    """For launchers that only pass on what is printed: they end the others as soon as the first one is gone."""
    if end["code"] == 130:
        if rank == 0:
            print("interrupted", file=sys.stderr)
        return
    time.sleep(AFTER_ALL if end["lost"] else AFTER_RANK_0 if rank else 0)
    who = "" if end["rank"] is None else f"rank {rank}: "
    where = f". See {end['log']}" if end["log"] else ""
    text = f"{end['trace'] if debug else ''}error: {who}{end['text']}{where}\n"
    os.write(2 if _Voice.console is None else _Voice.console, text.encode())


def _lost(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.distributed.DistError):
        return True
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport", "NCCL error")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
