"""What a loader, its running epochs and its tuner share; and the one guard between what decides and what trains."""

from __future__ import annotations

import dis
import functools
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autotune_loader.live.budgets import Budgets
from autotune_loader.live.numbered import Item, Raised
from autotune_loader.live.step_threads import StepThreads
from autotune_loader.live.traces import LiveTraces
from autotune_loader.live.trust import TRUSTED, Refusal, Trust
from autotune_loader.pipeline.batches import BatchShape
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.stages import StageSamples

log = logging.getLogger("autotune_loader.live")

SHORTEST_PATIENCE_S = 60.0
"""Storage over a network may stand still for half a minute."""

SEEDING_LIBRARIES = ("transformers", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "torch")
"""Their `worker_init_fn` seeds by worker and does nothing else; here each batch is seeded by its number."""


def depends_on_worker(init_fn: Any) -> Refusal | None:
    """Why samples may depend on the number of workers: a `worker_init_fn` that looks at who the worker is."""
    is_partial = isinstance(init_fn, functools.partial)
    given, init_fn = (len(init_fn.args), init_fn.func) if is_partial else (0, init_fn)
    if init_fn is None or getattr(init_fn, "__module__", "").partition(".")[0] in SEEDING_LIBRARIES:
        return None
    code = getattr(getattr(init_fn, "__func__", init_fn), "__code__", None)
    given += hasattr(init_fn, "__self__")
    if code is not None and code.co_argcount > given:
        argument = code.co_varnames[given]
        loaded = {step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD")}
        if argument not in code.co_cellvars and not {argument, "get_worker_info"} & _flat(loaded):
            return None
    return Refusal(
        reason="its worker_init_fn may make each worker another one",
        mend="a worker_init_fn that does not look at its argument",
    )


def _flat(names: set[Any]) -> set[Any]:
    """Python 3.13 loads two variables at once."""
    return {name for each in names for name in (each if isinstance(each, tuple) else (each,))}


def _never(now: float) -> float:  # noqa: ARG001 - a tuner looks at the clock
    return math.inf


@dataclass(slots=True, kw_only=True)
class LoaderState:
    """Of one loader, over all its epochs."""

    asked: LoaderConfig
    """What the user's arguments say."""
    config: LoaderConfig
    """Wanted now; an epoch that finds another than its own changes to it."""
    budgets: Budgets
    traces: LiveTraces = field(default_factory=LiveTraces)
    shape: BatchShape | None = None
    """The largest batch seen at the start of an epoch."""
    losses: int = 0
    """Pools that were started anew because workers were lost."""
    stages: deque[StageSamples] | None = None
    """What watched workers were at lately; None where they are not watched."""
    threads: StepThreads | None = None
    """Sets those of the step; None leaves them alone."""
    failures: dict[LoaderConfig, Failure] = field(default_factory=dict)
    """Configurations that raised where the one asked for did not."""
    refusal: Refusal | None = None
    """Why the workers stay as they were asked for."""
    is_tuned: bool = False
    """Whether other configurations than the one asked for may run."""
    proof: weakref.ref[Trust] | None = None
    """That workers give what the training process gives; held by the loader and its iterators, as it holds the dataset."""
    wake: float = math.inf
    """When `look` is to be called next, in seconds of the traces' clock."""
    look: Callable[[float], float] = _never
    """Thinks between two batches; returns when to be called again."""
    settled: LoaderConfig | None = None
    """What the tuner has settled on last."""
    tuned: weakref.ref[Any] | None = None
    """The iterator whose batches are noted."""

    def aside(self) -> LoaderState:
        """Of an iterator that runs beside the one that is tuned: with the configuration of now, to its end."""
        return LoaderState(
            asked=self.asked,
            config=self.allowed,
            budgets=self.budgets,
            failures=self.failures,
            refusal=self.refusal,
            is_tuned=self.is_tuned,
            proof=self.proof if self.trust is not None and self.trust.verdict is TRUSTED else None,
        )

    @property
    def trust(self) -> Trust | None:
        """None where nothing is to be proven."""
        return None if self.proof is None else self.proof()

    def may_run(self, config: LoaderConfig) -> bool:
        """Whether batches of a configuration are known to be those of the one asked for."""
        if self._has_asked_workers(config):
            return True
        if self.refusal is not None or not self.is_tuned:
            return False
        if config.num_workers and self.asked.num_workers:
            return True
        return self.trust is not None and self.trust.verdict is TRUSTED

    def _has_asked_workers(self, config: LoaderConfig) -> bool:
        """Whether it differs from what was asked for in threads of the step at most."""
        return replace(config, consumer_threads=self.asked.consumer_threads).key() == self.asked.key()

    @property
    def patience_s(self) -> float:
        """How long workers that nobody asked for may take for a batch."""
        trust = self.trust
        return SHORTEST_PATIENCE_S if trust is None else trust.patience_s(SHORTEST_PATIENCE_S)

    @property
    def awaits_proof(self) -> bool:
        """Whether the training process makes the batches, and it is not known yet whether workers may."""
        trust = self.trust
        if trust is None or self.refusal is not None or self.asked.num_workers:
            return False
        if isinstance(trust.verdict, Refusal):
            self.refuse(trust.verdict)
        return trust.verdict is None

    @property
    def allowed(self) -> LoaderConfig:
        """What may run: what is wanted; as was asked for, as long as workers are not proven."""
        return self.asked if self.awaits_proof else self.config

    def change_to(self, config: LoaderConfig) -> None:
        """Want this configuration from now on."""
        if config != self.config:
            self.config = config

    def refuse(self, refusal: Refusal) -> None:
        """Run what was asked for, from now on."""
        if self.refusal is None:
            self.refusal = refusal
            log.info("the number of workers stays %d: %s; %s", self.asked.num_workers, refusal.reason, refusal.mend)
        if not self._has_asked_workers(self.config):
            self.config = self.asked

    def think(self, now: float) -> None:
        """Let the tuner look."""
        try:
            self.wake = self.look(now)
        except Exception as error:
            self.give_up(error)

    def make(self, make: Callable[[Item], Any], item: Item) -> Any:
        """A batch that the training process makes, looked at as long as workers are not proven."""
        trust = self.trust
        if trust is None or trust.verdict is not None:
            return make(item)
        made = None
        try:
            with trust.fetching(item):
                made = make(item)
            if not isinstance(made[0], Raised):
                trust.made(item, made[0])
        except Exception as error:  # never the user's: `make` returns these
            self.give_up(error)
        return make(item) if made is None else made

    def give_up(self, error: Exception) -> None:
        """The tuner may fail, training may not."""
        self.wake, self.look = math.inf, _never
        self.config = self.settled or self.asked
        log.warning("tuning has ended, training goes on with %s: %s: %s", self.config, type(error).__name__, error)
