"""The console script `swiftlite`: its verbs and the one place where errors end.

Exit codes: 0 done; 2 the recipe or command line is wrong; 3 the data; 4 the model or checkpoint; 130 interrupted; 1 the rest.
"""

import os
import sys
import traceback

import typer

from swiftlite.cli.chat import chat
from swiftlite.cli.check import check
from swiftlite.cli.download import download
from swiftlite.cli.env import env
from swiftlite.cli.eval import evaluate
from swiftlite.cli.explain import explain
from swiftlite.cli.export import export
from swiftlite.cli.generate import generate
from swiftlite.cli.recipes import recipes
from swiftlite.cli.selftest import selftest
from swiftlite.cli.train import train
from swiftlite.dist import launch, worker
from swiftlite.recipe.errors import SwiftliteError

VERBS = {
    "train": train,
    "check": check,
    "export": export,
    "eval": evaluate,
    "chat": chat,
    "generate": generate,
    "download": download,
    "recipes": recipes,
    "explain": explain,
    "selftest": selftest,
    "env": env,
}

app = typer.Typer(
    name="swiftlite",
    help="Fine-tune any causal language model of the Hugging Face ecosystem from one YAML recipe.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for name, verb in VERBS.items():
    app.command(name)(verb)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("swiftlite"))
        raise typer.Exit


@app.callback()
def common(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Runs the command line and exits with its code."""
    try:
        code = run()
        if code and launch.is_worker():
            sys.stdout.flush()
            os._exit(code)  # what is left of a broken group may hang at the end of the interpreter
        sys.exit(code)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def run(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code. A user's mistake is one message; a fault of ours shows its traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(arguments, prog_name="swiftlite", standalone_mode=False)
        code = code if isinstance(code, int) else 0
        if code == 130 and not worker.report(KeyboardInterrupt(), 130):  # typer's word for an interrupt
            print("interrupted", file=sys.stderr)
        return code
    except SwiftliteError as error:
        if worker.report(error, error.exit_code, "--debug" in arguments):
            return error.exit_code
        if "--debug" in arguments:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort) as error:
        if not worker.report(error, 130):
            print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # a mistake on the command line itself; typer words it
            error.show()
            return int(error.exit_code)
        if worker.report(error, 1):
            return 1
        traceback.print_exc()
        return 1
