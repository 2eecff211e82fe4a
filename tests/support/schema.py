"""The JSON Schema of `loader.json`: `python -m tests.support.schema > docs/loader.schema.json` writes it."""

from __future__ import annotations

import inspect
import json
from typing import Any

import msgspec

from autotune_loader.results.loader_file import LoaderFile


def loader_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `loader.json`, generated from the dataclasses."""
    schema = msgspec.json.schema(LoaderFile)
    for bound in ("low", "high"):
        schema["$defs"]["Interval"]["properties"][bound] = {
            "anyOf": [{"type": "number"}, {"type": "null"}],
            "description": "null: the data do not bound it",
        }
    schema["$defs"]["LoaderFile"]["properties"]["created_by"].pop("default")  # changes with every release
    for each in schema["$defs"].values():
        if "description" in each:
            each["description"] = inspect.cleandoc(each["description"])  # Python 3.13 has done so already
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "loader.json", **schema}


if __name__ == "__main__":
    print(json.dumps(loader_schema(), indent=2))
