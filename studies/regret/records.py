"""What was measured of real workloads: one JSON line a measurement, and what these lines amount to."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune_loader.values.statistics import Round
from studies.regret import oracle


@dataclass(slots=True)
class Known:
    """What has been measured of one workload."""

    choices: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """By strategy and seed: the record, with `config` as a key or `failure`."""
    surveyed: dict[str, float] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    confirming: list[Round] = field(default_factory=list)

    def chosen(self, by: str | None = None) -> list[str]:
        """Every configuration that some strategy chose, or that a certain one did."""
        records = [record for (strategy, _), record in self.choices.items() if by in (None, strategy)]
        return list(dict.fromkeys(record["config"] for record in records if record.get("config")))

    def regret_of(self, config: str) -> oracle.Regret | None:
        """By all rounds that count for it."""
        return oracle.regret_of(config, self.rounds, self.confirming)


class Log:
    """The records on disk, and what they amount to; rounds in which others used more than `foreign_limit` do not count."""

    def __init__(self, path: Path, foreign_limit: float = oracle.FOREIGN_LIMIT) -> None:
        self._path = path
        self._foreign_limit = foreign_limit

    def append(self, record: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a") as file:
            file.write("\n" * torn + json.dumps({**record, "at": round(time.time(), 1)}, separators=(",", ":")) + "\n")

    def read(self) -> dict[str, Known]:
        known: dict[str, Known] = {}
        for record in self._records():
            mine = known.setdefault(record["workload"], Known())
            if record["kind"] == "choice":
                mine.choices[(record["strategy"], record["seed"])] = record
            elif record["kind"] == "survey":
                mine.surveyed[record["config"]] = record["samples_per_s"]
            else:
                into = mine.confirming if record["kind"] == "confirming" else mine.rounds
                into.append(Round(rates=record["rates"], foreign_cpu_share=record.get("foreign_share")))
        for mine in known.values():
            mine.rounds = oracle.counted_rounds(mine.rounds, self._foreign_limit)
            mine.confirming = [each for each in mine.confirming if not oracle.is_disturbed(each, self._foreign_limit)]
        return known

    def _records(self) -> Iterator[dict[str, Any]]:
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a kill in the midst of a line loses that one
                    yield json.loads(line)
