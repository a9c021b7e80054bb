"""What a run prints: plain lines in a pipe, a progress bar on a terminal; everything also goes to train.log."""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils import logging as transformers_logging


def calm_libraries() -> None:
    """Keeps libraries' own progress bars and notices to their authors out of what a run prints.

    `datasets` keeps its bars on a terminal: they show a download that may take long.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|torch)\.")
    # `datasets` reads these when it is imported, which is not before the first hub dataset.
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


class Console:
    """Lines for people. They are kept until `log_to` names the file that they also go to."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._log: Path | None = None
        self._early: list[str] = []
        self.rich = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: Any = None

    def line(self, text: str = "") -> None:
        """One line as it is: no markup is read out of data or paths."""
        self._early.append(text)
        if self._log is not None:
            self.log_to(self._log)
        if not self.quiet:
            self.rich.print(text, markup=False)

    def log_to(self, path: Path) -> None:
        """Appends all lines, those already printed too, to a file from now on."""
        self._log = path
        with path.open("a", encoding="utf-8") as f:
            f.writelines(f"{line}\n" for line in self._early)
        self._early.clear()

    def warn(self, text: str) -> None:
        self.line(f"warning: {text}")

    def begin(self, done: int, total: int) -> None:
        """Starts the progress bar, on a terminal only."""
        if self.rich.is_terminal and not self.quiet:
            columns = (
                TextColumn("step"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[info]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.rich, transient=True)
            self._task = self._bar.add_task("train", total=total, completed=done, info="")
            self._bar.start()

    def advance(self, done: int, info: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, info=info)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
