"""Whether workers give what the training process gives (stand-in)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

TRUSTED = "trusted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    reason: str
    mend: str


class Trust:
    def __init__(self, parts: Any, asked: Any, sampler: Any) -> None:  # noqa: ARG002
        self.verdict: Any = TRUSTED

    def fetching(self, item: Any) -> Any:  # noqa: ARG002
        return contextlib.nullcontext()

    def made(self, item: Any, batch: Any) -> None: ...

    def still_holds(self) -> bool:
        return True

    def close(self) -> None: ...
