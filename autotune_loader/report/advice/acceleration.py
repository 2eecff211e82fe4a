"""What torch.compile and autocast were measured to bring, in a sentence, and whether that is worth an advice."""

from __future__ import annotations

import math

from autotune_loader.results.loader_file import Advice
from autotune_loader.values.trial import Acceleration

WORTH_CHANGING = 0.05
"""A relative gain below this is not worth changing the training for."""


def acceleration_sentence(found: Acceleration) -> str:
    """What one change was measured to do: "autocast(bfloat16): 1.31x (1.25x to 1.38x), loss differs by 0.2 %"."""
    if found.speedup is None:
        return f"{found.name}: {found.note or 'not measured'}"
    ratio = found.speedup
    rate = f"{found.name}: {ratio.value:.2f}x ({ratio.low:.2f}x to {ratio.high:.2f}x) the rate of the step alone"
    parts = [rate, _loss_words(found)]
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
    loader = "; then the loader binds, so tune again" if gain < ratio.value - 1 else ""
    return Advice(
        action=how[found.kind],
        reason=acceleration_sentence(found) + loader,
        expected_gain=gain if gain >= WORTH_CHANGING else None,
    )
