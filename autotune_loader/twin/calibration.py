"""All that the bursts taught, and the fixed point that turns it into the stage times of any configuration.

The contention model gives the shape between and beyond the bursts; the *nodes* bend it so that it passes through each
of them. Every fitted value is an array over draws: the first `BEST` are the best fit, the others draws from its
uncertainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune_loader.twin.contention import Contention, busy_beside
from autotune_loader.twin.recursion import Floats, Ints
from autotune_loader.twin.stages import Columns, Load, Stages, starved_threads, step_share

BEST = 3
"""Runs of the best fit per configuration, each with the batches in another order; their mean is the prediction."""
DRAWS = 9
"""Runs with drawn parameters per configuration; their spread makes the interval."""
EXTRAPOLATION_SD = 0.2
"""Further uncertainty of the service time per e-fold of busy workers beyond the most that a burst has seen."""
MACHINE_SPEED_SD = 0.06
"""Relative sd of CPU seconds for the same work between one minute and another: 6.3 % over 25 minutes on a quiet virtual
machine with 4 cores (studies/fidelity). All that computes shares it, so no number of batches shows it."""
FIXED_POINT_ROUNDS = 30
SAME_BUSY = 1.05
"""Bursts whose busy workers differ by less than this factor are averaged, not interpolated."""
SAME_WORKERS = 0.25
"""Or by less than this part of a worker: so little does not explain why one burst was slower than another."""
ALONE = -1e6
"""Where a burst without workers lies on the axis of `Calibration.step`: far from all with workers, however idle."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nodes:
    """Values at the loads that were seen; straight lines between them, flat beyond."""

    busy: Floats
    values: Floats
    """Shape (loads, draws)."""

    @classmethod
    def of(cls, busy: Sequence[float], values: Floats) -> Nodes:
        """Nodes at these loads, in any order; those at nearly the same load are averaged."""
        order = np.argsort(busy, kind="stable")
        groups: list[list[int]] = []
        for index in order:
            first = busy[groups[-1][0]] if groups else -np.inf
            if busy[index] <= max(first * SAME_BUSY, first + SAME_WORKERS):
                groups[-1].append(int(index))
            else:
                groups.append([int(index)])
        return cls(
            busy=np.array([np.mean([busy[i] for i in group]) for group in groups]),
            values=np.array([values[group].mean(axis=0) for group in groups]),
        )

    def at(self, busy: Floats, draw: Ints) -> Floats:
        """The value at each column's load."""
        if len(self.busy) == 1:
            single: Floats = self.values[0, draw]
            return single
        right = np.clip(np.searchsorted(self.busy, busy), 1, len(self.busy) - 1)
        left = right - 1
        t = np.clip((busy - self.busy[left]) / (self.busy[right] - self.busy[left]), 0.0, 1.0)
        value: Floats = (1.0 - t) * self.values[left, draw] + t * self.values[right, draw]
        return value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """What the bursts taught. Built by `fitting.calibrate`."""

    contention: Contention
    noise_sd: float
    """Relative standard deviation between bursts of one configuration, as the bursts show it."""
    service: Nodes
    """Logarithm of the seen service time over the contention model's."""
    step: Nodes
    """Logarithm of the seen step time over the undisturbed one on shared cores, over busy workers or, where the step
    computes on several cores, over `starved_threads`."""
    step_by_threads: Nodes
    """How far that logarithm lies off the curve beside workers, over the threads of the step."""
    step_is_parallel: bool
    receive: Nodes
    """Seconds to take a ready batch over."""
    transit_s: float
    """Seconds that a whole batch travels before a training loop that waits for it can begin to take it over."""
    serial_service_s: Floats
    serial_receive_s: Floats
    pin_s: Floats
    hand_over_s: float
    """Seconds to take a pinned batch over; inf where none was seen."""
    luck: Floats
    """A standard normal value per draw, 0 for the best fit: scales the uncertainties that no burst can show."""
    speed: Floats
    """Factor on CPU seconds per draw, 1 for the best fit: the machine may be slower later than it was in the bursts."""

    def settle(self, columns: Columns, efficiency: Floats) -> tuple[Stages, Load]:
        """The fixed point of load -> stage times -> rate -> load, when the rate is `efficiency` times its bound."""
        fitted = self.contention.take(columns.draw)
        busy = np.maximum(columns.workers.astype(np.float64), 1.0)
        load = Load(at_work=busy, busy=busy, wanting=busy * 0.5, consumer=np.full(len(busy), 0.5))
        for _ in range(FIXED_POINT_ROUNDS):
            stages = self.stages(columns, fitted, load)
            rate = efficiency * stages.bound(columns)
            at_work = np.minimum(rate * stages.service_s, columns.workers)
            seen = busy_beside(at_work, columns.workers.astype(np.float64), self.contention.variability)
            consumer = np.minimum(rate * (stages.receive_s + stages.step_s), 1.0)
            wanting = seen * stages.cpu_share
            load = load.halfway(to=Load(at_work=at_work, busy=seen, wanting=wanting, consumer=consumer))
        return self.stages(columns, fitted, load), load

    def stages(self, columns: Columns, fitted: Contention, load: Load) -> Stages:
        """Stage times under a load; `fitted` is the contention, one value per column."""
        serial = columns.workers == 0
        luck, speed = self.luck[columns.draw], self.speed[columns.draw]
        cpu_wall = fitted.cpu_wall_s(
            load.wanting, columns.workers.astype(np.float64), load.consumer, columns.step_threads, columns.cores
        )
        waiting = fitted.waiting_s(load.busy)
        beyond = np.log(np.maximum(load.at_work / np.maximum(self.service.busy[-1], 1.0), 1.0))
        bend = np.exp(self.service.at(load.at_work, columns.draw) + EXTRAPOLATION_SD * beyond * luck)
        crowd = np.where(serial, 0.0, load.wanting)
        shared = step_share(crowd, fitted.step_cores * columns.step_threads, columns.cores)
        disturbance = load.at_work
        if self.step_is_parallel:
            disturbance = starved_threads(crowd, columns.step_threads, columns.cores)
        disturbance = np.where(serial, ALONE, disturbance)
        off = np.where(serial, 0.0, self.step_by_threads.at(columns.step_threads, columns.draw))
        step = np.exp(self.step.at(disturbance, columns.draw) + off + columns.step_sd * luck)
        receive = self.receive.at(load.at_work, columns.draw) * speed
        cpu_share = cpu_wall / np.maximum(cpu_wall + waiting, 1e-12)
        receive = np.where(columns.pinned, np.minimum(receive, self.hand_over_s), receive)
        return Stages(
            service_s=np.where(serial, self.serial_service_s[columns.draw], (cpu_wall + waiting) * bend)
            * (1.0 + cpu_share * (speed - 1.0)),
            receive_s=np.where(serial, self.serial_receive_s[columns.draw], receive),
            step_s=columns.step_s * shared * step * (speed if self.step_is_parallel else 1.0),
            pin_s=np.where(columns.pinned & ~serial, self.pin_s[columns.draw], 0.0),
            transit_s=np.where(serial | columns.pinned, 0.0, self.transit_s),
            cpu_share=cpu_share,
            crowding=cpu_wall / fitted.cpu_s,
        )
