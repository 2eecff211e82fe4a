"""What a change to the training step itself would bring: torch.compile and autocast, timed against the plain step in turns.

    from the same weights, on the same batch    plain ─ losses      plain, other random numbers ─ losses      changed ─ losses
    then in rounds, alternating who is first    plain plain changed changed plain plain ...                  ratio per round

The losses of the first steps tell whether the change still trains the same; the rounds tell what it gains. The loader plays
no part: the batch lies on the device. Beside the plain step's model there is one more at a time, as memory may be scarce.
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune_loader.decision.rounds import in_turning_order
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.device import timeline_of
from autotune_loader.probe.failures import failure_of
from autotune_loader.probe.inference import infer
from autotune_loader.probe.stand_in_trainer import is_lightning_module
from autotune_loader.probe.step import TrainingStep, build_step
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval, Round, paired_ratio
from autotune_loader.values.trial import Acceleration, AccelerationKind

# Steps whose losses are compared: the first one sees forward alone, the later ones what backward and optimizer did.
COMPARED_STEPS = 4
# Relative difference of losses above which a change no longer trains the same. Compiled kernels add in another order
# (1e-6, and more after a few steps); bfloat16 keeps 8 bits, 0.4 % of each product, of which a mean keeps less.
SAME_LOSS = {"compile": 0.002, "amp": 0.02}
# Of the difference that other random numbers (dropout) make anyway, so much more is no change.
NOISE_FACTOR = 2.0
# One turn of a round: long enough that clock and scheduler do not show.
TURN_S = 0.05
# As many as there is time for; the interval of fewer is too wide to say anything.
ROUNDS, FEWEST_ROUNDS = 12, 4
_NO_MODULE = "there is no model to compile: pass model=, and use the model that train_step is given"
_NOTHING_COMPILED = "nothing was compiled: train_step does not call the model that it is given"
_NEEDS_SCALER = "this device has no bfloat16, so training needs torch.amp.GradScaler besides"
Forward = Callable[[Any], Any]


def measure_acceleration(
    kind: AccelerationKind, fresh: Callable[[], TrainingSide], batch: Any, plain: TrainingStep, plan: BurstPlan
) -> Acceleration | Failure:
    """The gain of one change over the plain step, and whether its losses stay the same; a failure of it is an answer.

    Args:
        kind: "compile" or "amp".
        fresh: makes model, step and optimizer anew, with the weights that training would begin with.
        batch: trained on again and again, as the loader delivers it.
        plain: the step as it is, warm.
        plan: the rounds take `max_s` at most.
    """
    name, device = name_of(kind, plain.device), plain.device
    try:
        if kind == "compile" and not isinstance(fresh().model, torch.nn.Module):
            return Acceleration(kind=kind, name=name, note=_NO_MODULE)
        batch = plain.move(batch)
        gc.collect()  # a change that was measured before
        expected = _plain_losses(fresh, batch, device, seed=0)
        noise = relative_difference(expected, _plain_losses(fresh, batch, device, seed=1))
        changed = _Changed(kind, fresh(), batch, device)
        begun = time.monotonic()
        losses = _first_losses(changed, batch, seed=0)
        synchronize(device)
        warm_up_s = time.monotonic() - begun
        if kind == "compile" and not _compiled_anything():
            return Acceleration(kind=kind, name=name, note=_NOTHING_COMPILED, warm_up_s=warm_up_s)
        speedup = _in_turns(plain, changed.step, batch, plan.max_s)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        return failure_of(error, "step")
    difference = relative_difference(expected, losses)
    return Acceleration(
        kind=kind,
        name=name,
        speedup=speedup,
        loss_difference=difference,
        loss_noise=noise,
        is_same_loss=None if difference is None else is_same_loss(kind, difference, noise),
        warm_up_s=warm_up_s,
        note=_NEEDS_SCALER if kind == "amp" and _amp_dtype(device) is torch.float16 else None,
    )


def name_of(kind: AccelerationKind, device: torch.device) -> str:
    """The change as a user writes it."""
    return "torch.compile" if kind == "compile" else f"autocast({str(_amp_dtype(device)).removeprefix('torch.')})"


def is_same_loss(kind: AccelerationKind, difference: float, noise: float | None) -> bool:
    """Whether losses that differ by so much (relatively) still tell of the same training."""
    return difference <= SAME_LOSS[kind] + NOISE_FACTOR * (noise or 0.0)


def relative_difference(expected: Sequence[float | None], found: Sequence[float | None]) -> float | None:
    """The largest relative difference of two series of losses; infinite where only the latter is no number, None with none."""
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    if any(math.isfinite(a) and not math.isfinite(b) for a, b in pairs):
        return math.inf
    pairs = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    if not pairs:
        return None
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    timeline = timeline_of(device)
    if timeline is not None:
        timeline.synchronize()


class _Changed:
    """The step with its way from batch to loss changed (or not), and its losses kept on demand."""

    def __init__(self, kind: AccelerationKind | None, side: TrainingSide, batch: Any, device: torch.device) -> None:
        if isinstance(side.model, torch.nn.Module):
            side.model.to(device)
        forward = _compiled(side, batch) if kind == "compile" else infer(side, batch).loss
        forward = _autocast(forward, device) if kind == "amp" else forward
        self.losses: list[Any] | None = None
        self.step = build_step(replace(side, train_step=lambda model, batch: self._kept(forward(batch))), batch)

    def _kept(self, loss: Any) -> Any:
        if self.losses is not None:
            self.losses.append(loss.detach().float().mean() if isinstance(loss, torch.Tensor) else loss)
        return loss


def _plain_losses(fresh: Callable[[], TrainingSide], batch: Any, device: torch.device, seed: int) -> list[float | None]:
    """Losses of a model that is gone afterwards."""
    losses = _first_losses(_Changed(None, fresh(), batch, device), batch, seed)
    gc.collect()  # a step and the function that it calls know each other
    return losses


def _first_losses(changed: _Changed, batch: Any, seed: int) -> list[float | None]:
    kept: list[Any] = []
    changed.losses = kept
    torch.manual_seed(seed)
    for _ in range(COMPARED_STEPS):
        changed.step.run(batch)
    changed.losses = None
    return [float(loss) if isinstance(loss, (int, float, torch.Tensor)) else None for loss in kept]


def _compiled_anything() -> bool:
    from torch._dynamo.utils import counters

    return bool(counters["stats"]["unique_graphs"])


def _compiled(side: TrainingSide, batch: Any) -> Forward:
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no pool of processes that would outlive the measurement
    torch._dynamo.reset()
    if is_lightning_module(side.model):
        return torch.compile(infer(side, batch).loss)  # training_step calls its submodules, not the module
    # Not model.compile(): with a module of torch's own, such as Sequential, it quietly compiles nothing.
    return infer(replace(side, model=torch.compile(side.model)), batch).loss


def _autocast(forward: Forward, device: torch.device) -> Forward:
    def within(batch: Any) -> Any:
        with torch.autocast(device.type, dtype=_amp_dtype(device)):
            return forward(batch)

    return within


def _amp_dtype(device: torch.device) -> torch.dtype:
    without_bfloat16 = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if without_bfloat16 else torch.bfloat16


def _in_turns(plain: TrainingStep, changed: TrainingStep, batch: Any, max_s: float) -> Interval:
    """Rate of the changed step over the plain one, from paired rounds whose number does not depend on the outcome."""
    plain_s = min(_seconds(plain, batch, 1) for _ in range(2))
    steps = max(1, round(TURN_S / max(plain_s, 1e-6)))
    until = time.monotonic() + max_s
    turns, rounds = {"plain": plain, "changed": changed}, list[Round]()
    while len(rounds) < FEWEST_ROUNDS or (len(rounds) < ROUNDS and time.monotonic() < until):
        seconds = in_turning_order(list(turns), lambda name: _seconds(turns[name], batch, steps), len(rounds))
        rounds.append(Round(rates={name: 1 / taken for name, taken in seconds}))
    return paired_ratio(rounds, "changed", "plain")


def _seconds(step: TrainingStep, batch: Any, steps: int) -> float:
    """Seconds that one step takes, from so many in a row."""
    synchronize(step.device)
    begun = time.perf_counter()
    for _ in range(steps):
        step.run(batch)
    synchronize(step.device)
    return (time.perf_counter() - begun) / steps
