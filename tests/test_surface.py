"""What users and scripts hold on to: verbs, flags, exit codes and recipe keys. Renew with `python tests/test_surface.py`."""

from pathlib import Path

import typer

from swiftlite.cli.main import app
from swiftlite.recipe import errors
from swiftlite.recipe.keys import keys

FILE = Path(__file__).with_name("surface.txt")


def surface() -> str:
    lines = []
    for name, verb in typer.main.get_command(app).commands.items():
        flags = [opt for p in verb.params for opt in (p.opts if p.param_type_name == "option" else [str(p.name).upper()])]
        lines.append(f"swiftlite {name} {' '.join(flags)}".rstrip())
    own = [kind for kind in errors.SwiftliteError.__subclasses__() if kind.__module__ == errors.__name__]
    lines += [f"exit {error.exit_code} {error.__name__}" for error in (errors.SwiftliteError, *own)]
    lines += [f"recipe {key.path}" for key in keys().values() if not key.section]
    return "\n".join(lines) + "\n"


def test_the_surface_is_as_it_was():
    assert surface() == FILE.read_text(), "a change of the surface is meant: python tests/test_surface.py"


if __name__ == "__main__":
    FILE.write_text(surface())
