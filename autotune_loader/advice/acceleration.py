"""Whether the step itself can be made faster: asked only where it binds and the user allows it, answered by measuring.

torch.compile and autocast change what is trained, so they are never applied; a result tells what they would bring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Protocol

from autotune_loader.loader_file import Advice, Verdict
from autotune_loader.trial import Acceleration, AccelerationKind, BurstPlan, Failure

# The cheap one first: a compilation that does not end costs the probe process.
KINDS: tuple[AccelerationKind, ...] = ("amp", "compile")
NAMES: dict[AccelerationKind, str] = {"amp": "autocast", "compile": "torch.compile"}
# Seconds of the rounds alone, and until when everything must have answered: compiling a large model takes minutes.
ROUNDS_S = 4.0
DEADLINE_S: dict[AccelerationKind, float] = {"amp": 60.0, "compile": 180.0}
# With less than this left of the budget it is not begun: two models to warm up, and for torch.compile a compiler to load.
LEAST_S: dict[AccelerationKind, float] = {"amp": 4.0, "compile": 15.0}
# So much of the budget the search leaves for each, and no more than this share of it for both.
KEPT_S: dict[AccelerationKind, float] = {"amp": 8.0, "compile": 25.0}
KEPT_SHARE = 0.4
# A gain below this is not worth changing the training for.
WORTH_CHANGING = 0.05


def budget_of_search(budget_s: float, allow: Collection[str]) -> float:
    """Seconds of the budget that the search may use, where what is allowed wants a part of it."""
    wanted = sum(KEPT_S[kind] for kind in KINDS if kind in allow)
    return budget_s - min(wanted, KEPT_SHARE * budget_s)


class StepProbe(Protocol):
    """A probe that can change the step."""

    def acceleration(
        self, kind: AccelerationKind, consumer_threads: int | None, plan: BurstPlan
    ) -> Acceleration | Failure:
        """Time the step with one change to it against the step as it is."""
        ...


def measure_allowed(
    allow: Collection[str],
    verdict: Verdict,
    probe: StepProbe | None,
    consumer_threads: int | None,
    seconds_left: Callable[[], float],
) -> tuple[Acceleration, ...]:
    """What each allowed change of the step brings, or why that was not measured; a failure of one is a note.

    Args:
        allow: what the user allows; "compile" and "amp" are what matters here.
        verdict: on the best configuration; only where the step binds is anything measured.
        probe: None where several ranks tune together.
        consumer_threads: of the best configuration.
        seconds_left: of the budget.
    """
    found = []
    for kind in (kind for kind in KINDS if kind in allow):
        reason = _reason_not_to(kind, verdict, probe, seconds_left())
        if reason or probe is None:
            found.append(Acceleration(kind=kind, name=NAMES[kind], note=f"not measured: {reason}"))
        else:
            plan = BurstPlan(max_s=min(ROUNDS_S, seconds_left() / 4), deadline_s=min(DEADLINE_S[kind], seconds_left()))
            found.append(_answer(kind, probe.acceleration(kind, consumer_threads, plan)))
    return tuple(found)


def _reason_not_to(kind: AccelerationKind, verdict: Verdict, probe: StepProbe | None, seconds_left: float) -> str:
    if verdict.binding != "step":
        return (
            f"the training step does not bind (the verdict is {verdict.binding!r}), so a faster one would gain nothing"
        )
    if probe is None:
        return "several ranks tune together; tune() in one process measures it"
    if seconds_left < LEAST_S[kind]:
        return f"{max(0.0, seconds_left):.0f} s were left of the budget, and it takes at least {LEAST_S[kind]:.0f} s"
    return ""


def _answer(kind: AccelerationKind, outcome: Acceleration | Failure) -> Acceleration:
    if isinstance(outcome, Acceleration):
        return outcome
    text = outcome.message.strip().splitlines()
    return Acceleration(kind=kind, name=NAMES[kind], note=f"it failed: {text[0] if text else outcome.kind}")


def acceleration_sentence(found: Acceleration) -> str:
    """What one change was measured to do: "autocast(bfloat16): 1.31x (1.25x to 1.38x), loss differs by 0.2 %"."""
    if found.speedup is None:
        return f"{found.name}: {found.note or 'not measured'}"
    ratio = found.speedup
    parts = [f"{found.name}: {ratio.value:.2f}x ({ratio.low:.2f}x to {ratio.high:.2f}x) the rate of the step alone"]
    parts += [_loss_words(found)]
    parts += [f"the first steps took {found.warm_up_s:.0f} s"] if (found.warm_up_s or 0.0) >= 1 else []
    parts += [found.note] if found.note else []
    return ", ".join(parts)


def _loss_words(found: Acceleration) -> str:
    if found.loss_difference is None:
        return "whether the loss stays the same was not seen, as the step returns none"
    if not math.isfinite(found.loss_difference):
        return "the loss is no number any more"
    noise = f" (other random numbers: {_percent(found.loss_noise)})" if found.loss_noise else ""
    judged = "" if found.is_same_loss else ", which is more than rounding explains"
    return f"loss differs by {_percent(found.loss_difference)}{noise}{judged}"


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %" if share >= 1e-4 else "less than 0.01 %"


def advise_on(found: Acceleration, most_gain: float | None) -> Advice | None:
    """The advice to make a change that is shown to be faster and to train the same; None otherwise.

    Args:
        found: what was measured of the change.
        most_gain: relative gain that the loader allows; None where that is not known.
    """
    ratio = found.speedup
    if ratio is None or found.is_same_loss is False or ratio.low <= 1 or ratio.value < 1 + WORTH_CHANGING:
        return None
    gain = ratio.value - 1 if most_gain is None else min(ratio.value - 1, most_gain)
    how = {
        "compile": "Compile the model: model = torch.compile(model).",
        "amp": f"Train in mixed precision: with torch.{found.name.replace('(', '(device_type, dtype=torch.')} around the "
        "forward pass and the loss.",
    }
    loader = ""
    if gain < ratio.value - 1:
        loader = "; then the loader binds, so tune again"
    return Advice(
        action=how[found.kind],
        reason=acceleration_sentence(found) + loader,
        expected_gain=gain if gain >= WORTH_CHANGING else None,
    )
