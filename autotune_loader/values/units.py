"""Numbers for people: rates, sizes, durations and shares as short texts; None is `-`."""

from __future__ import annotations

import math

UNKNOWN = "-"
"""Shown where nothing was measured."""


def number_text(value: float) -> str:
    """A number with at least three significant digits and thousands separated: "0.789", "1,234", "123k", "1.23M"."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    magnitude = abs(value)
    if magnitude >= 99_950:
        return f"{number_text(value / 1e6)}M" if magnitude >= 999_500 else f"{value / 1e3:.0f}k"
    decimals = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2 if magnitude >= 0.9995 else 3
    return f"{value:,.{decimals}f}"


def rate_text(rate: float | None, unit: str = "samples/s") -> str:
    """Three significant digits at least, with the unit: "1,234 samples/s", "0.789 batches/s"."""
    return UNKNOWN if rate is None else f"{number_text(rate)} {unit}"


def factor_text(value: float) -> str:
    """A ratio: "0.98x", "2.31x", "38.5x"."""
    return f"{value:.2f}x" if value < 9.995 else f"{number_text(value)}x"


def share_text(share: float | None) -> str:
    """A share as percent: "12%", "0.4%"."""
    if share is None:
        return UNKNOWN
    percent = share * 100
    return f"{percent:.1f}%" if 0 < abs(percent) < 0.95 else f"{percent:.0f}%"


def bytes_text(size: float | None) -> str:
    """A size in binary units: "512 B", "45 MiB", "1.25 GiB"."""
    if size is None:
        return UNKNOWN
    units = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
    factor, unit = next(((factor, unit) for factor, unit in units if abs(size) >= factor), (1, "B"))
    text = number_text(size / factor) if factor > 1 else f"{size:.0f}"
    return f"{text.removesuffix('.00').removesuffix('.0')} {unit}"


def seconds_text(seconds: float | None) -> str:
    """A duration: "0.4 ms", "12 ms", "1.23 s", "45 s", "3 min 20 s"."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 119.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds >= 0.9995:
        return f"{seconds:.{0 if seconds >= 9.95 else 2}f} s"
    milliseconds = seconds * 1000
    if 0 < milliseconds < 0.0995:
        return f"{milliseconds * 1000:.2g} us"
    return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 or not milliseconds else f"{milliseconds:.2g} ms"


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 trial", "3 trials", "2 batches"."""
    plural = "es" if noun.endswith("tch") else "s"
    return f"{count:,} {noun}" + ("" if count == 1 else plural)
