"""`swiftlite env`."""

from swiftlite.cli.options import Json, print_json


def env(json: Json = False) -> None:
    """Show versions and hardware, as a bug report needs them."""
    from swiftlite.train.environment import as_text, environment

    found = environment()
    if json:
        print_json(found)
    else:
        print(as_text(found))
