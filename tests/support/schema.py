"""The JSON Schema of `loader.json`: `python -m tests.support.schema > docs/loader.schema.json` writes it."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from typing import Any, get_type_hints

import msgspec

from autotune_loader.results.result import ELSEWHERE, FILE_ONLY, TuningResult


def loader_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `loader.json`, generated from the dataclasses."""
    schema = msgspec.json.schema(msgspec.defstruct("LoaderFile", _keys(), kw_only=True))
    for bound in ("low", "high"):
        schema["$defs"]["Interval"]["properties"][bound] = {
            "anyOf": [{"type": "number"}, {"type": "null"}],
            "description": "null: the data do not bound it",
        }
    for each in schema["$defs"].values():
        if "description" in each:
            each["description"] = inspect.cleandoc(each["description"])  # Python 3.13 has done so already
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "loader.json", **schema}


def _keys() -> list[Any]:
    """Name, type and default of every key of the file."""
    hints, needed = get_type_hints(TuningResult), {"schema_version", "status", "dataloader_kwargs"}
    types = {
        **FILE_ONLY,
        **{each.name: hints[each.name] for each in fields(TuningResult) if each.name not in ELSEWHERE},
    }
    return [(name, kind) if name in needed else (name, kind, msgspec.UNSET) for name, kind in types.items()]


if __name__ == "__main__":
    print(json.dumps(loader_schema(), indent=2))
