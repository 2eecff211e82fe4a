"""What can be said of a run, as a value; and the words that a result is described with."""

from __future__ import annotations

from typing import Any, Literal

RateUnit = Literal["samples/s", "batches/s"]
Status = Literal["complete", "undecided", "partial", "fallback"]
FoundBy = Literal["tune", "autoloader", "watch"]


class Finding(str):
    """What can be said of a run: its sentence, with a name. The tables in `diagnosis` make it; code decides by `kind`."""

    kind: str
    """Such as "cpu" or "larger_reads": the name of its row, in lower case."""
    gain: float | None
    """What it is worth at most, relative to the rate now: 0.5 is half as fast again. None where nothing bounds it."""

    def __new__(cls, *, kind: str, sentence: str, gain: float | None = None) -> Finding:
        self = super().__new__(cls, sentence)
        self.kind, self.gain = kind, gain
        return self

    @property
    def sentence(self) -> str:
        """For people."""
        return str(self)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), {"kind": self.kind, "sentence": str(self), "gain": self.gain}

    def to_plain(self) -> dict[str, Any]:
        """As `loader.json` has it."""
        gain = {} if self.gain is None else {"gain": self.gain}
        return {"kind": self.kind, "sentence": str(self), **gain}

    @classmethod
    def from_plain(cls, raw: Any) -> Finding:
        """The inverse of `to_plain`.

        Raises:
            ValueError: it is none.
        """
        if (
            not isinstance(raw, dict)
            or not isinstance(raw.get("kind"), str)
            or not isinstance(raw.get("sentence"), str)
        ):
            raise ValueError(f"{raw!r:.60} is not a finding with a kind and a sentence")
        if not isinstance(gain := raw.get("gain"), (int, float, type(None))):
            raise ValueError(f"gain={gain!r:.60} is not a number")
        return cls(kind=raw["kind"], sentence=raw["sentence"], gain=gain)
