"""Numbers for people: rates, sizes, durations and shares as short texts. Only `report` and `cli` use them."""

from __future__ import annotations

import math

from autotune_loader.values.statistics import Interval

WORTH_CLAIMING = 1.005
"""Of a ratio; two digits show no less."""
UNKNOWN = "-"
"""What stands where nothing was measured."""


def rate_text(samples_per_s: float | None) -> str:
    """Three significant digits at least: "1,234/s", "45.6/s", "0.789/s"."""
    return UNKNOWN if samples_per_s is None else f"{number_text(samples_per_s)}/s"


def number_text(value: float) -> str:
    """A number with at least three significant digits and thousands separated."""
    if not math.isfinite(value):
        return str(value)
    magnitude = abs(value)
    decimals = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2 if magnitude >= 0.9995 else 3
    return f"{value:,.{decimals}f}"


def range_text(interval: Interval | None) -> str:
    """The limits of an interval: "1,180–1,290"; unknown where it tells nothing."""
    if interval is None or not interval.is_telling:
        return UNKNOWN
    return f"{number_text(interval.low)}–{number_text(interval.high)}"


def relative_error_text(interval: Interval) -> str:
    """Half the width relative to the value: "± 2.1 %"; "± ?" where the interval tells nothing."""
    if not interval.is_telling:
        return "± ?"
    return f"± {(interval.high - interval.low) / 2 / interval.value * 100:.1f} %"


def ratio_text(interval: Interval | None) -> str:
    """A ratio with its limits: "2.31x (2.20x to 2.42x)"."""
    if interval is None:
        return UNKNOWN
    limits = f" ({interval.low:.2f}x to {interval.high:.2f}x)" if interval.is_telling else ""
    return f"{interval.value:.2f}x{limits}"


def faster_words(subject: str, ratio: Interval, other: str) -> str:
    """How many times as fast something was shown to be in paired rounds: the one wording, wherever a gain is told.

    "It is 2.31x (2.20x to 2.42x) as fast as 0 workers in 5 paired rounds"; what is not shown is not claimed.
    """
    rounds = counted(ratio.count, "paired round")
    if not ratio.is_telling:
        return f"{subject} was {ratio_text(ratio)} as fast as {other} in {rounds}, too few or too noisy for an interval"
    if is_claimed(ratio) or ratio.high < 1:
        return f"{subject} is {ratio_text(ratio)} as fast as {other} in {rounds}"
    return f"{subject} is not shown to be faster than {other}: {ratio_text(ratio)} as fast in {rounds}"


def is_claimed(ratio: Interval) -> bool:
    """Whether words say that something is faster: its interval lies above one, and it is by more than a breath."""
    return ratio.low > 1 and ratio.value > WORTH_CLAIMING


def gain_words(gain: float) -> str:
    """A relative gain that is expected: "12 %", and from a doubling on "3.2 times the rate"."""
    return share_text(gain) if gain < 1 else f"{1 + gain:,.{0 if gain >= 9.5 else 1}f} times the rate"


def share_text(share: float | None) -> str:
    """A share as percent: "12 %", "0.4 %"."""
    if share is None:
        return UNKNOWN
    percent = share * 100
    return f"{percent:.1f} %" if 0 < abs(percent) < 0.95 else f"{percent:.0f} %"


def bytes_text(size: float | None) -> str:
    """A size in binary units: "512 B", "45 MiB", "1.25 GiB"."""
    if size is None:
        return UNKNOWN
    units = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
    factor, unit = next(((factor, unit) for factor, unit in units if abs(size) >= factor), (1, "B"))
    value = size / factor
    decimals = 0 if factor == 1 or abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2
    return f"{value:,.{decimals}f}".removesuffix(".0").removesuffix(".00") + f" {unit}"


def seconds_text(seconds: float | None) -> str:
    """A duration: "0.4 ms", "12 ms", "1.23 s", "45 s", "3 min 20 s"."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 119.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds >= 9.95:
        return f"{seconds:.0f} s"
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1000
    return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 or not milliseconds else f"{milliseconds:.2g} ms"


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 trial", "3 trials"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
