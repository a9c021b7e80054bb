"""The JSON Schema for editors, short forms included. `swiftlite explain --schema` prints it; a copy lies beside this file.

# yaml-language-server: $schema=.../swiftlite/recipe/recipe.schema.json
"""

import json
from pathlib import Path
from typing import Any

from swiftlite.recipe.keys import TABLE_OF
from swiftlite.recipe.schema import Recipe

FILE = Path(__file__).with_name("recipe.schema.json")
TEXT, TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe file."""
    made = Recipe.model_json_schema()
    defs = made["$defs"]
    for definition in (made, *defs.values()):
        for name, field in definition["properties"].items():
            field.pop("title", None)
            if field == {**field, **TEXTS}:  # one text stands for a list of one
                definition["properties"][name] = _either(field, TEXT, TEXTS)
    root, data = made["properties"], defs["DataSection"]["properties"]
    sources: dict[str, Any] = {"anyOf": [TEXT, {"$ref": "#/$defs/DataSource"}]}
    for name in ("train", "eval"):
        data[name] = _either(data[name], *sources["anyOf"], {"type": "array", "items": sources})
    for name, section in (("model", "ModelSection"), ("strategy", "StrategySection")):
        root[name] = _either(root[name], TEXT, {"$ref": f"#/$defs/{section}"})
    root["data"] = _either(root["data"], TEXT, {"type": "array", "items": sources}, {"$ref": "#/$defs/DataSection"})
    root["export"] = _either(root["export"], TEXT, TEXTS, {"$ref": "#/$defs/ExportSection"})
    root["lora"] = _either(root["lora"], {"$ref": "#/$defs/LoraSection"}, {"type": "boolean"}, {"type": "null"})
    checkpointing = defs["TrainSection"]["properties"]["gradient_checkpointing"]
    checkpointing["anyOf"].append({"type": "boolean"})
    for path, table in TABLE_OF.items():
        if path.count(".") == 1 and path != "data.format":
            section, _, name = path.partition(".")
            field = defs[f"{section.capitalize()}Section"]["properties"][name]
            field["examples"] = list(table)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _either(field: dict[str, Any], *forms: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in field.items() if name in ("description", "default")}
    return {**kept, "anyOf": list(forms)}


def as_text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
