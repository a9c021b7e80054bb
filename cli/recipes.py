"""`swiftlite recipes`."""

from swiftlite.cli.options import Json, print_json


def recipes(json: Json = False) -> None:
    """List the recipes that come with the package."""
    from swiftlite.recipe.load import shipped

    found = shipped()
    if json:
        print_json(found)
    else:
        width = max(map(len, found), default=0)
        print("\n".join(f"{name:<{width}}  {summary}" for name, summary in found.items()))
