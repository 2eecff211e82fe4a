"""All loaders of one process: which of them is iterated, what is said of it early, and under `run` what tunes it."""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.utils.data import DataLoader

from autotune_loader import LoaderConfig
from autotune_loader.lines import Line, users_line
from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.pipeline.loop_log import Site
from autotune_loader.watch.run_plan import LINE, Plan, say
from autotune_loader.watch.watched import FEWEST_BATCHES, ScriptLoader, watch_iterator

if TYPE_CHECKING:
    from autotune_loader import TuningResult

MOST_FIRST_LOOKS = 3
"""Loaders of a process that are told of before its end."""
MOST_TRACED, FEWEST_TRACED = 24_000, 256
"""Batches of the first loader in a trace; each further one has half as many, so that all of them take at most 50 MB."""
SPEAK_AFTER_S = 9.5
"""From the first batch that is asked for until something is said: within 10 s."""


class Session:
    """The loaders of this process; `on_change` is called where tuning has found a better configuration."""

    def __init__(self, plan: Plan, on_change: Callable[[Any], None] | None = None) -> None:
        self.plan, self.begun, self._on_change = plan, time.monotonic(), on_change
        self.loaders: list[ScriptLoader] = []
        rank, self.ranks = rank_of_environment()
        self.rank = rank or 0
        self.first_line = FirstLine(self._say_so_far)
        self._by_id: dict[int, ScriptLoader] = {}
        self._by_site = defaultdict[Site, list[ScriptLoader]](list)
        self._names, self._first_looks = Counter[str](), 0
        self._file: TuningResult | None = None
        if plan.start_with is not None:
            from autotune_loader import TuningResult  # not under `watch`, which costs nothing

            self._file = TuningResult.load(plan.start_with)

    def close(self) -> None:
        """What is left of it in this process does nothing more."""
        self.first_line.stop()
        ScriptLoader.close()

    @property
    def known(self) -> list[ScriptLoader]:
        """Those that gave a batch."""
        return [each for each in self.loaders if each.log.totals.batches]

    def known_as(self, loader: Any) -> ScriptLoader | None:
        """What is known of a loader; None before it is iterated."""
        known = self._by_id.get(id(loader))
        return known if known is not None and known.owner() is loader else None

    def watch(self, iterator: Any, loader: Any, begun: float) -> None:
        """An iterator has begun to be made; its loop is watched."""
        known, kind = self._loader_of(loader, _found_of(loader)), type(loader)
        is_torchs = kind._get_iterator is DataLoader._get_iterator
        if self.plan.verb == "run" and not is_torchs and known.found is None and known.kept is None:
            from autotune_loader.diagnosis import Kept  # not under `watch`, which costs nothing

            known.kept = Kept.OWN_ITERATOR(kind=kind.__name__)
        watch_iterator(iterator, known, loader, begun)

    def iterator_of(self, loader: Any, torchs: Callable[[], Any]) -> Any:
        """The iterator that `run` puts in the place of the one that torch's `DataLoader` makes."""
        known = None
        try:
            from autotune_loader.autoloader.live import iterator_of, live_of

            known = self._loader_of(loader)
            live = live_of(
                loader,
                known.site.line,
                allow_workers=self.plan.allow_workers,
                max_workers=self.plan.max_workers,
                config=self._start(known),
                on_change=self._on_change,
                log=known.log,
            )
            if known.found is not live.found:
                known.tune_by(live.found)
            if not live.is_torchs:
                return iterator_of(loader, live, torchs)
        except Exception as error:  # whatever it is, torch's own iterator does without
            from autotune_loader.diagnosis import Kept

            if known is not None:
                known.kept, known.found = Kept.NOT_TUNED(error=f"{type(error).__name__}: {error}"), None
        return torchs()

    def _loader_of(self, loader: Any, found: Any = None) -> ScriptLoader:
        """The known loader that it is, or a new one; `found` is what tunes it, where that is known to be what it was."""
        asked = None if found is None else found.tuner.asked
        if distributed.is_available() and distributed.is_initialized():  # at the end the group may be gone
            self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        if (known := self.known_as(loader)) is not None:
            if _is_as_it_was(known, loader, found):
                return known
            if found is None and _has_our_numbers(loader):
                asked = known.own
        # What tunes it sets its numbers: those of the script are the ones that were asked for.
        settings = _settings(loader, asked)
        made_at = vars(loader).get(LINE)
        site = Site.of(loader, Line(*made_at) if made_at else users_line(sys._getframe(2)))
        alike = self._by_site[site]
        known = next((each for each in reversed(alike) if each.settings == settings and _is_free(each, loader)), None)
        if known is None:
            own = LoaderConfig.from_loader(loader) if asked is None else asked
            known = ScriptLoader(site, self._name_of(site), own, self._look_at, self.loaders)
            if self.plan.trace is not None:
                known.begin_trace(max(FEWEST_TRACED, MOST_TRACED // self.ranks >> len(self.loaders)))
            self.loaders.append(known)
            alike.append(known)
        known.owner, known.dataset = weakref.ref(loader), _reference(getattr(loader, "dataset", None))
        known.settings, self._by_id[id(loader)] = settings, known
        if found is not None:
            known.tune_by(found)
        return known

    def _name_of(self, site: Site) -> str:
        """By its line; others that the same line makes by their data and a number, too."""
        line = str(site.line)
        self._names[line] += 1
        return line if self._names[line] == 1 else f"{line} {site.dataset} {self._names[line]}"

    def _look_at(self, known: ScriptLoader) -> None:
        """Tell the first that can be said of a loader, as soon as there is something."""
        if not known.is_worth_telling:
            self.first_line.start()
            return
        self.first_line.stop()
        known.first_look = None
        self._say(known)

    def _say_so_far(self) -> None:
        """It takes long until something can be said: what the loop waits for so far."""
        known = max(self.loaders, key=lambda each: (each.waiting_since is not None, each.log.totals.active_s))
        if known.log.totals.batches >= FEWEST_BATCHES:
            known.first_look = None
        self._say(known)

    def _say(self, known: ScriptLoader) -> None:
        self._first_looks += 1
        if not self.rank and self._first_looks <= MOST_FIRST_LOOKS:
            say(f"\nautotune-loader {self.plan.verb}: {known.name}: {known}")

    def _start(self, known: ScriptLoader) -> LoaderConfig | None:
        """What `--start-with` says of this loader: by its line, else what training is said to be best with."""
        if self._file is None:
            return None
        if (kwargs := self._file.loaders.get(known.name)) is not None:
            return LoaderConfig.from_dict(kwargs)
        return self._file.best if known.site.is_shuffled else None


def _settings(loader: Any, numbers: Any = None) -> tuple[Any, ...]:
    """What makes a loader another one where the script changes it; `numbers` has its workers as the script set them."""
    numbers = loader if numbers is None else numbers
    return numbers.num_workers, numbers.prefetch_factor, loader.pin_memory, loader.batch_size


def _is_as_it_was(known: ScriptLoader, loader: Any, found: Any) -> bool:
    """Whether the script has set nothing of a loader anew."""
    if known.found is None:
        return known.settings == _settings(loader)
    live = _live_of(loader)
    return found is known.found if found is not None else live is not None and live.is_of(loader)


def _has_our_numbers(loader: Any) -> bool:
    live = _live_of(loader)
    return live is not None and live.is_as_told(loader)


def _live_of(loader: Any) -> Any:
    """What tunes it, if anything does."""
    module = sys.modules.get("autotune_loader.autoloader.live")
    return None if module is None else vars(loader).get(module.LIVE)


def _found_of(loader: Any) -> Any:
    """What an AutoLoader, which the script itself has made, has found."""
    module = sys.modules.get("autotune_loader.autoloader.loader")
    return loader.found if module is not None and isinstance(loader, module.AutoLoader) else None


def _is_free(known: ScriptLoader, loader: Any) -> bool:
    """Whether it is this loader, or one that is gone, with its iterators and its data, and whose place this one takes."""
    owner, dataset = known.owner(), known.dataset()
    return owner is loader or (
        owner is None and not known.is_running and (dataset is None or dataset is loader.dataset)
    )


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # as for a list
        return lambda: None


class FirstLine:
    """Calls `speak` once, after a while, unless `stop` comes first: by a thread, as the loop may wait for its first batch.

    The thread is none of `threading`'s, does nothing but wait, and is gone while the process forks: a forked process is warned
    of threads.
    """

    def __init__(self, speak: Callable[[], None], seconds: float = SPEAK_AFTER_S) -> None:
        self._speak, self._seconds, self._is_over = speak, seconds, False
        self._due_s = 0.0
        self._ended: _thread.LockType | None = None
        self._id = 0

    def start(self) -> None:
        """Wait, if nobody does and nothing was said."""
        if self._is_over or self._ended is not None:
            return
        if self not in waiting:
            self._due_s = time.monotonic() + self._seconds
            waiting.append(self)
        self._ended, self._id = _thread.allocate_lock(), 0
        self._ended.acquire()
        _thread.start_new_thread(self._wait, (self._ended,))

    def stop(self) -> None:
        """Say nothing any more."""
        self._is_over = True
        self.pause()
        if self in waiting:
            waiting.remove(self)

    def pause(self) -> None:
        """The thread is gone afterwards; `start` goes on."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.release()
            while not self._id or (
                self._id != _thread.get_native_id() and Path(f"/proc/self/task/{self._id}").exists()
            ):
                time.sleep(0.0001)

    def _wait(self, ended: _thread.LockType) -> None:
        self._id = _thread.get_native_id()
        if not ended.acquire(timeout=max(0.0, self._due_s - time.monotonic())) and not self._is_over:
            self._is_over = True
            with contextlib.suppress(Exception):  # whatever it is, it is no reason to say it
                self._speak()


waiting: list[FirstLine] = []
"""Those that have a thread, or go on after a fork."""


def _pause() -> None:
    for each in waiting:
        each.pause()


def _go_on() -> None:
    for each in waiting:
        each.start()


os.register_at_fork(before=_pause, after_in_parent=_go_on, after_in_child=waiting.clear)
