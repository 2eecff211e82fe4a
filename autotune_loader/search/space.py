"""Every configuration that is legal for this workload on this machine, what each costs, and why the others are not.

What does not fit into shared memory, descriptors or memory is vetoed by arithmetic before it is tried:
`(workers * prefetch + 1) * batch_bytes` of shared memory was found to be exact; a loader for validation needs as much.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune_loader.values import (
    TORCH_PREFETCH_FACTOR,
    WITHOUT_WORKERS,
    Failure,
    FailureKind,
    LoaderConfig,
    Measurement,
)
from autotune_loader.values.units import bytes_text

if TYPE_CHECKING:
    import optuna

MOST_WORKERS = 64  # more on one rank have never been shown to help, and starting them takes seconds
PREFETCH_FACTORS = (1, 2, 4, 8)  # the deeper a queue, the less one more batch in it changes
SAFE_SHARE = 0.9  # of /dev/shm, descriptors and memory: batches of a whole training differ more than a burst's
WORKER_BASE_BYTES = 60 << 20  # interpreter, torch and an untouched forked dataset, before a worker has loaded anything
RESERVED_DESCRIPTORS = 64  # what the process needs apart from the batches in flight
CHEAP_BYTES, CHEAP_SHARE = 1 << 30, 0.02  # a queue of so many bytes and this share of the memory costs nothing
LOADERS = 2  # share /dev/shm: one for training and one for validation
UNMODELLED = ("batch_size", "pin_memory", "device_prefetch", "in_order")
"""Settings that the twin does not model: only bursts tell. The grid changes one of them at a time."""
SEARCHED = ("num_workers", "prefetch_factor", *UNMODELLED)
"""All that a study can search."""
FLAGS = ("pin_memory", "in_order")
MOST_VALUES = 5  # of a range that an objective gives such a setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The machine and the step, as measured without a loader."""

    usable_cores: int
    step_cores: float = 1.0
    """Cores that the step keeps busy while it runs: its intra-op threads on a CPU, 1 where it only feeds an accelerator."""
    step_s: float | None = None
    """Seconds of the step on a cached batch; None where there is no step, or it was not timed."""
    epoch_batches: int | None = None  # batches of an epoch; None where that is unknown
    fetch_s: float | None = None
    """Wall seconds of fetching the very first batch, in one process alone; None where that is unknown."""
    fetch_cpu_s: float = 0.0  # CPU seconds of the same
    start_s: float = 0.0  # seconds in which a worker starts that imports torch anew; 0 where workers are forked


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a configuration may use of this machine; None means unlimited or unknown."""

    shm_bytes: int | None = None
    memory_bytes: int | None = None
    descriptors: int | None = None
    device_bytes: int | None = None  # memory of the accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """What one batch takes while it travels."""

    bytes: int = 0
    tensors: int = 0
    samples: int | None = None  # samples in it, so that a batch of another size can be scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The legal values of every setting: the first is kept unless another is shown to be better."""

    max_workers: int = MOST_WORKERS
    min_workers: int = 0  # 1 where the dataset cannot be read without workers
    prefetch_factors: tuple[int, ...] = PREFETCH_FACTORS
    pin_memory: tuple[bool, ...] = (False,)
    device_prefetch: tuple[int, ...] = (0,)
    in_order: tuple[bool, ...] = (True,)
    batch_size: tuple[int | None, ...] = (None,)
    persistent_workers: bool = False
    """Whether workers are kept between epochs; set, never searched, as no burst can see it."""
    multiprocessing_context: str | None = None  # start method of the user's own loader; carried, never searched
    is_pinning_decided: bool = False
    """Whether batches are pinned as the first value says, unless the user's own configuration is another one."""
    also: tuple[LoaderConfig, ...] = ()  # legal, though no grid has it: the user's own
    limits: Limits = Limits()
    batch: BatchCost = BatchCost()

    def candidates(self, most_workers: float = math.inf) -> tuple[LoaderConfig, ...]:
        """Every configuration of the grid that is not vetoed, fewest workers first, and the user's own."""
        legal = [self._own(config) or config for config in self._grid(most_workers) if self.veto(config) is None]
        return tuple(dict.fromkeys([*legal, *self.also]))

    def as_set(self, config: LoaderConfig) -> LoaderConfig:
        """The configuration with the first value of what is searched beside workers and prefetch, and with what is set."""
        values: dict[str, Any] = {name: getattr(self, name)[0] for name in UNMODELLED}
        values |= {name: getattr(self, name) for name in ("persistent_workers", "multiprocessing_context")}
        return replace(config, **(values if config.num_workers else values | WITHOUT_WORKERS))

    def as_kept(self, config: LoaderConfig) -> LoaderConfig:
        """The configuration as a job keeps it: with workers that persist where they may; the user's own as it is."""
        persists = self.persistent_workers and config.num_workers > 0
        return self._own(config) or replace(config, persistent_workers=persists)

    def is_modelled(self, config: LoaderConfig) -> bool:
        """Whether the twin models all that it changes."""
        first = self.as_set(config)
        return all(getattr(config, name) == getattr(first, name) for name in UNMODELLED)

    def asked(self, distributions: Mapping[str, Any], *, is_whole: bool) -> Space:
        """The space as an objective asks for it: as many workers, and its own values of the other settings.

        What it has not asked for has torch's value, where `is_whole` says that it has asked for all that it will.
        """
        known: dict[str, Any] = {"prefetch_factors": (TORCH_PREFETCH_FACTOR,) if is_whole else ()}
        for name, each in distributions.items():
            if name == "num_workers":
                known["max_workers"] = closest(each, self.max_workers)
            elif name == "prefetch_factor":
                known["prefetch_factors"] = tuple(closest(each, factor) for factor in self.prefetch_factors)
            elif name in UNMODELLED:
                usual = getattr(self, name)
                known[name] = tuple(sorted(_values(name, each), key=lambda value: value not in usual))
        return replace(self, **{name: value for name, value in known.items() if value not in (None, ())})

    # What Optuna is told

    def distributions(self) -> dict[str, Any]:
        """Optuna's distribution of every setting that has more than one value."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        whole: dict[str, Any] = {
            "num_workers": IntDistribution(self.min_workers, self._most("num_workers", self.max_workers)),
            "prefetch_factor": IntDistribution(1, self._most("prefetch_factor", max(self.prefetch_factors)), log=True),
        }
        return {name: whole.get(name) or CategoricalDistribution(getattr(self, name)) for name in self._names()}

    def suggest(self, trial: optuna.trial.Trial) -> LoaderConfig:
        """The configuration of a trial, exactly as Optuna proposes it; what only workers have is asked with workers only.

        A setting that the sampler refuses (ValueError), as a `GridSampler` without it does, stays as it is.
        """
        values: dict[str, Any] = {}
        for name, each in self.distributions().items():  # the number of workers is the first
            if name in WITHOUT_WORKERS and not values.get("num_workers"):
                continue
            with contextlib.suppress(*((ValueError,) if values else ())):
                if hasattr(each, "choices"):
                    values[name] = trial.suggest_categorical(name, each.choices)
                else:
                    values[name] = trial.suggest_int(name, each.low, each.high, log=each.log)
        return self.config(values)

    def params(self, config: LoaderConfig) -> dict[str, Any]:
        """The parameters of which `suggest` makes this configuration."""
        asked = [name for name in self._names() if config.num_workers or name not in WITHOUT_WORKERS]
        return {name: getattr(config, name) for name in asked}

    def _names(self) -> list[str]:
        """Every setting that has more than one value, the number of workers first."""
        prefetch = ["prefetch_factor"] if self._most("num_workers", self.max_workers) else []
        return ["num_workers", *prefetch, *(name for name in UNMODELLED if len(getattr(self, name)) > 1)]

    def config(self, params: dict[str, Any]) -> LoaderConfig:
        """The configuration that these parameters make, or the user's own that has them; unknown ones are ignored.

        So is what only workers have, where an objective asks for it without any.
        """
        read = {name: _read(name, value) for name, value in params.items() if name in SEARCHED}
        known = {name: value for name, value in read.items() if read.get("num_workers") or name not in WITHOUT_WORKERS}
        made = replace(self.as_set(LoaderConfig(**known)), **known)
        return self._own(made) or made

    # What is legal, and what it costs

    def holds(self, config: LoaderConfig) -> bool:
        """Whether a study of this space can propose it, and it may be tried: one of a file or an earlier study may not."""
        params, legal = self.params(config), self.distributions()
        is_contained = all(
            value in (getattr(each := legal[name], "choices", None) or range(each.low, each.high + 1))
            for name, value in params.items()
        )
        return is_contained and self.config(params).key() == config.key() and self.veto(config) is None

    def veto(self, config: LoaderConfig) -> Failure | None:
        """Why a configuration must not be tried on this machine; None when it may."""
        if config.num_workers < self.min_workers:
            return _refusal(f"the dataset cannot be read without workers. Try num_workers={self.min_workers}.")
        if config in self.also:
            return None
        if config.num_workers > self.max_workers:
            return _refusal(
                f"more than {self.max_workers} workers are ruled out (max_workers, too few shards, repeated samples or data "
                f"on an accelerator). Try num_workers={self.max_workers}."
            )
        if not config.num_workers and (config.batch_size or 0) <= (self.batch.samples or math.inf):
            return None
        limits, in_flight, batch_bytes = self.limits, config.batches_in_flight, self._batch_bytes(config)
        descriptors = in_flight * self.batch.tensors + RESERVED_DESCRIPTORS
        memory = memory_bytes(config, worker_bytes=WORKER_BASE_BYTES, batch_bytes=batch_bytes)
        over = functools.partial(_over, f"{config} would need")
        return (
            over(LOADERS * in_flight * batch_bytes, limits.shm_bytes, "of /dev/shm for two loaders")
            or over(descriptors, limits.descriptors, "descriptors")
            or over(memory, limits.memory_bytes, "of host memory")
        )

    def over_margin(self, config: LoaderConfig, burst: Measurement) -> Failure | None:
        """Why a configuration of a tuned batch size takes too much, from what its burst took; None where it does not."""
        if config.batch_size is None:
            return None
        over = functools.partial(_over, f"{config} took")
        return over(burst.taken_bytes, self.limits.memory_bytes, "of host memory", "memory_guard") or over(
            burst.gpu_memory_bytes, self.limits.device_bytes, "of device memory", "device_memory"
        )

    def cost(self, config: LoaderConfig) -> tuple[float, ...]:
        """What a configuration costs, most important first: another batch size, workers, their memory, odd settings."""
        memory = max(0, math.ceil(self._dearness(config)))
        # Where memory is no matter, a deeper queue is hardly ever slower, and it evens out the slow batches that no burst has
        # seen: with the shallow first 89 instead of 95% of 300 simulated machines are within 2% (studies/regret/README.md).
        depth = -(config.prefetch_factor or 0)
        return (config.batch_size is not None, config.num_workers, memory, not self.is_modelled(config), depth)

    def is_cheap(self, config: LoaderConfig) -> bool:
        """Whether its queue costs nothing, so that a deep one may bridge slow batches that no burst has seen."""
        return self._dearness(config) <= 0

    def _dearness(self, config: LoaderConfig) -> float:
        """Doublings by which its queue takes more than costs nothing. Torch locks pages by powers of two."""
        if not config.num_workers:
            return 0.0
        free = min(CHEAP_BYTES, CHEAP_SHARE * (self.limits.memory_bytes or math.inf))
        size = max(self._batch_bytes(config), 1.0)
        return math.log2(
            config.batches_in_flight * (2 ** math.ceil(math.log2(size)) if config.pin_memory else size) / free
        )

    def _own(self, config: LoaderConfig) -> LoaderConfig | None:
        """The user's own configuration that has the same parameters."""
        return next((own for own in self.also if self.params(own) == self.params(config)), None)

    def _batch_bytes(self, config: LoaderConfig) -> float:
        if config.batch_size is None or not self.batch.samples:
            return self.batch.bytes
        return self.batch.bytes * config.batch_size / self.batch.samples

    def _most(self, name: str, most: int) -> int:
        return max([most, *(getattr(own, name) or 0 for own in self.also)])

    def _grid(self, most_workers: float) -> Iterator[LoaderConfig]:
        """All numbers of workers to 16, every second to 32, every fourth to 64, and the most: finer than can be measured."""
        most = int(min(self.max_workers, most_workers))
        counts = (*range(16), *range(16, 32, 2), *range(32, MOST_WORKERS, 4))
        for workers in (*(count for count in counts if self.min_workers <= count < most), most):
            for prefetch in self.prefetch_factors if workers else (None,):
                plain = self.as_set(LoaderConfig(num_workers=workers, prefetch_factor=prefetch))
                yield plain
                for name in UNMODELLED:
                    if name == "pin_memory" and self.is_pinning_decided:
                        continue
                    if workers or name != "in_order":
                        yield from (replace(plain, **{name: value}) for value in getattr(self, name)[1:])


def closest(distribution: Any, value: float | None) -> Any:
    """The value of one of Optuna's distributions that is nearest to a setting, of None the lowest; None where it has none."""
    value = value or 0
    if hasattr(distribution, "choices"):
        numbers = [each for each in distribution.choices if isinstance(each, (int, float))]
        return min(numbers, key=lambda each: abs(each - value), default=None)
    low, step, inside = distribution.low, distribution.step, min(max(value, distribution.low), distribution.high)
    return type(low)(low + round((inside - low) / step) * step if step else inside)


def _read(name: str, value: Any) -> Any:
    """A setting as an objective makes it of what it asks for: perhaps 0 and 1 for a flag, a real number for an integer."""
    return bool(value) if name in FLAGS else int(value) if isinstance(value, float) else value


def _values(name: str, distribution: Any) -> list[Any]:
    """What a setting can have of a distribution: of all that it lists, or of some, evenly in doublings, with the lowest."""
    values, legal = getattr(distribution, "choices", None), dict[Any, None]()
    if values is None:
        low, high = distribution.low, max(distribution.high, 1)
        values = [low, *(closest(distribution, each) for each in np.geomspace(max(low, 1), high, MOST_VALUES))]
    for value in values:
        with contextlib.suppress(TypeError, ValueError):
            legal[getattr(LoaderConfig(num_workers=1, **{name: _read(name, value)}), name)] = None
    return list(legal)


def memory_bytes(config: LoaderConfig, *, worker_bytes: float, batch_bytes: float) -> float:
    """Bytes of the workers of a configuration, and of the batches that its queue may hold."""
    return config.num_workers * worker_bytes + config.batches_in_flight * batch_bytes


def _over(
    what: str, need: float | None, limit: int | None, of: str, kind: FailureKind = "infeasible"
) -> Failure | None:
    """The refusal of what needs more than is safe; None where it does not, or either is not known."""
    if need is None or limit is None or need <= limit * SAFE_SHARE:
        return None
    text = str if of == "descriptors" else bytes_text
    return _refusal(f"{what} {text(need)} of {text(limit)} {of}, more than {SAFE_SHARE:.0%}", kind)


def _refusal(message: str, kind: FailureKind = "infeasible") -> Failure:
    return Failure(kind=kind, phase="plan", message=message)
