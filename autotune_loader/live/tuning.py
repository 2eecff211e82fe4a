"""What ties a loader to its tuner: the loader as a training run that can be changed, what it begins with, whom it tells."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune_loader.live.ranks import Follower, LeaderSource, is_one_of_many, job_link
from autotune_loader.live.result import result_of
from autotune_loader.live.state import LoaderState
from autotune_loader.live.traces import LiveTraces
from autotune_loader.live.tuner import Event, Job, Tuner
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.machine.limits import usable_cores
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.results.cache import job_key, recall, remember
from autotune_loader.results.load import find_loader_file, load_config
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import TunerError
from autotune_loader.values.measurement import Failure

log = logging.getLogger("autotune_loader.live")


@dataclass(slots=True)
class LoaderRun:
    """A loader's running training, as the tuner sees it; it does not keep the loader alive."""

    state: LoaderState
    change: weakref.WeakMethod[Callable[[LoaderConfig], None]]

    @property
    def traces(self) -> LiveTraces:
        return self.state.traces

    @property
    def config(self) -> LoaderConfig:
        return self.state.config

    @property
    def failures(self) -> Mapping[LoaderConfig, Failure]:
        return self.state.failures

    @property
    def awaits_proof(self) -> bool:
        return self.state.awaits_proof

    def may_run(self, config: LoaderConfig) -> bool:
        return self.state.may_run(config)

    def change_to(self, config: LoaderConfig) -> None:
        change = self.change()
        if change is not None:
            change(config)


class Announcer:
    """Says, and keeps for the next job, what a loader has settled on.

    Args:
        on_change: of the user.
        job: key of the job in the cache; None keeps nothing.
    """

    def __init__(self, on_change: Callable[[Event], None] | None, job: str | None) -> None:
        self.on_change, self._job = on_change, job

    def __call__(self, event: Event) -> None:
        if self._job is not None:
            remember(self._job, event.config)
        _say(f"settled on {event.config} after {event.seconds:.0f} s of training")
        if self.on_change is not None:
            self.on_change(event)


class LiveTuning:
    """The tuner of one loader, from its first epoch on.

    Args:
        state: of the loader, which calls the tuner.
        change: changes the loader's configuration; a bound method.
        job: the loader.
        on_change: called when the loader has settled on a configuration.
    """

    def __init__(
        self,
        state: LoaderState,
        change: Callable[[LoaderConfig], None],
        job: Job,
        *,
        on_change: Announcer,
    ) -> None:
        self.job, self.on_change = job, on_change
        self._state = state
        self._run = LoaderRun(state, weakref.WeakMethod(change))
        link = None if job.is_fixed else job_link(job.site)
        has_others = link is None and not job.is_fixed and is_one_of_many()
        if has_others or (link is not None and link.rank):
            self.job = job = replace(job, is_fixed=True)
        self.tuner = Tuner(
            self._run,
            job,
            lambda most: state.budgets.search_space(most, state.config, state.shape),
            source=LeaderSource(self._run, link) if link is not None and not link.rank else None,
            on_change=self._settled,
        )
        follower = Follower(self._run, link) if link is not None and link.rank else None
        state.look, state.wake = self.tuner.look if follower is None else follower.look, 0.0

    def follow(self, change: Callable[[LoaderConfig], None], on_change: Callable[[Event], None] | None) -> None:
        """From now on it is another loader, which does the same work, that is changed and that tells."""
        self._run.change = weakref.WeakMethod(change)
        self.on_change.on_change = on_change

    def result(self, **facts: Any) -> TuningResult:
        """What is known now."""
        return result_of(self.tuner, self.job, refusal=self._state.refusal, **facts)

    def _settled(self, event: Event) -> None:
        self._state.settled = self._state.config
        self.on_change(event)


def first_proposal(loader: Any, saved: Mapping[str, Any] | None) -> tuple[LoaderConfig | None, str | None]:
    """What is tried first, if anything is known, and the key by which the cache knows the job, if it may be asked.

    Args:
        loader: an AutoLoader, whose pinning and life of workers stay as they are.
        saved: a state that it was given.
    """
    try:
        found, key = _known(loader, saved)
        if found is None:
            return None, key
        like = LoaderConfig.from_loader(loader)
        threads = found.consumer_threads if loader.step_threads else None
        like = replace(like.with_workers(found.num_workers, found.prefetch_factor), consumer_threads=threads)
        return like, key
    except (TunerError, ValueError, OSError, UserWarning) as error:
        log.debug("what is known of this job is not tried: %s", error)
        return None, None


def _known(loader: Any, saved: Mapping[str, Any] | None) -> tuple[LoaderConfig | None, str | None]:
    if saved is not None and "config" in saved:
        return LoaderConfig.from_dict(saved["config"]), None
    try:
        return load_config(find_loader_file()), None
    except TunerError:
        key = job_key(DataSide.from_loader(loader), inspect_machine().fingerprint())
        return recall(key), key


def _say(text: str) -> None:
    """To the log where it is listened to, else to a terminal, above what is drawn there."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", text)
    elif getattr(sys.stderr, "isatty", bool)():
        from rich.console import Console

        Console(stderr=True, markup=False, emoji=False).print(f"AutoLoader {text}")


def cores_within(max_cores: int | None) -> int:
    """Cores that this process may count on; the ranks of a node share them."""
    cores = usable_cores().usable
    return cores if max_cores is None else max(1, min(cores, max_cores))
