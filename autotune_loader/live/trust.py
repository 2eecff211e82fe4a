"""Whether workers would give what the loop itself makes: looked at first, then proven by a shadow.

    loop's fetches   looks: what changed, what moved, what no fork may carry   ── anything: refused, nothing was forked
    the next ones    a shadow fetches the same items; digests are compared     ── all the same: trusted

Until it is known, the loop goes on as it was asked to; it never waits for it.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autotune_loader.live.seeds import WorkerSeeds
from autotune_loader.live.shadow import WORKERS, Shadow, become_torch_worker, sent
from autotune_loader.machine.facts import start_method
from autotune_loader.pipeline.digest import Leaf, difference, digest
from autotune_loader.pipeline.look import PROCESS, THOROUGH, Held, Look, look, moved, positions, process_state, shown
from autotune_loader.values.config import LoaderConfig

LOOKS = 4
"""Batches that are looked at before anything is forked."""
SAME = 4
"""Batches of each worker that must be the same."""
SHORTEST_WAIT_S, WAIT_FETCHES = 10.0, 20.0
"""An answer that takes longer, and longer than so many of the loop's own fetches, does not come any more."""
MOST_STARTS = 5
"""Shadows of one loader: the data may change between short epochs, and a paused loop outlives its shadow."""
PURE_SAMPLERS = {
    "torch.utils.data.sampler", "torch.utils.data.distributed", "torch.utils.data.dataloader",
    "torchdata.stateful_dataloader.sampler", "torchvision.datasets.samplers.clip_sampler",
    "accelerate.data_loader", "transformers.trainer_pt_utils",
    "lightning.fabric.utilities.distributed", "lightning.pytorch.overrides.distributed",
    "pytorch_lightning.overrides.distributed", "lightning_fabric.utilities.distributed",
}  # fmt: skip
"""Modules whose samplers draw from their arguments and a generator alone."""
HANDLERS = ("torch.", "autotune_loader.")
"""Packages whose handlers of SIGCHLD look at their own workers only."""
PURE_VALUES = (tuple, range, torch.Tensor, np.ndarray)
"""Values that are samplers; a list may grow while it is iterated."""

OPTS_IN = "num_workers=1 opts in"
WHY = {
    "did": ("fetching {told}", f"{OPTS_IN}, where workers may"),
    "reads": (
        "its samples may depend on which worker makes them: it asks who the worker is",
        "do without get_worker_info().id and .num_workers",
    ),
    "unsent": ("{batch} cannot be sent from a worker: {told}", "num_workers=0 is right"),
    "raised": ("{batch} raises in a worker: {told}", OPTS_IN),
    "ended": ("{told}", OPTS_IN),
    "changes": (
        "fetching changes {told}",
        f"{OPTS_IN}: each worker then changes a copy of its own",
    ),
}
"""What a shadow may answer in place of a digest, or a worker beside its batch, and the reason and mend that it makes."""
TRUSTED = "trusted"

log = logging.getLogger("autotune_loader.live")
Item = tuple[int, int, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why the number of workers stays as it was asked for."""

    reason: str
    mend: str
    """What would allow workers, or asks for them."""


class Trust:
    """Proof for one loader that workers give the same batches as the training process.

    Args:
        parts: of the user: `dataset`, `collate_fn`, `batched`, `worker_init_fn`, `context`, `loop_seeds`.
        asked: what the user's arguments say.
        sampler: the loader's batch sampler; its sampler where the dataset makes the batches.

    Attributes:
        verdict: None as long as it is not known, TRUSTED or a Refusal.
    """

    def __init__(self, parts: Any, asked: LoaderConfig, sampler: Any) -> None:
        self.verdict: str | Refusal | None = None
        self._parts, self._sampler = parts, sampler
        self._asked_context, self._asked_workers = asked.multiprocessing_context, asked.num_workers
        self._roots = {"dataset": parts.dataset, "collate_fn": parts.collate_fn, "sampler": sampler}
        self._looks, self._last, self._epoch = 0, Look(), -1
        self._last_item: Item | None = None
        self._held: Held | None = None
        self._base: tuple[int, Look] | None = None
        """A thorough look after the first fetch, and the epoch; compared with one before anything is forked."""
        self._is_looked_at = False
        self._comparison = _Comparison(lambda seed: _fetcher(parts, seed, is_forked=self._start_method == "fork"))

    @contextlib.contextmanager
    def fetching(self, item: Item) -> Iterator[None]:
        """Goes around a fetch that the loop makes itself."""
        if self.verdict is not None:
            yield
            return
        before = self._guarded(self._look_before, item)
        yield
        if before is not None and self.verdict is None:
            self._guarded(self._look_after, item, before)

    def made(self, item: Item, batch: Any) -> None:
        """Takes note of the batch that such a fetch has made."""
        if self.verdict is None:
            self._guarded(self._comparison.take, item, batch)
            self._conclude(self._comparison.verdict)

    def patience_s(self, least_s: float) -> float:
        """Seconds after which a worker's batch does not come any more: so many, or many of the loop's slowest fetches."""
        return self._comparison.patience_s(least_s)

    def begun(self) -> None:
        """Workers begin now: they see the dataset as it is."""
        self._guarded(self._note_held)

    def still_holds(self) -> bool:
        """Whether the dataset is what it was when workers began; takes microseconds (71 of a large dataset)."""
        if self._held is None:
            self._guarded(self._note_held)
        return self._held is None or self._held.is_unchanged()

    def close(self) -> None:
        """End what runs beside the loop."""
        self._comparison.close()

    __del__ = close

    @property
    def _start_method(self) -> str:
        context = self._parts.context or self._asked_context or start_method()
        return context if isinstance(context, str) else str(context.get_start_method())

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Nothing of this may reach the training."""
        try:
            return function(*arguments)
        except Exception as error:
            log.debug("proof", exc_info=True)
            self._conclude(Refusal(reason=f"it could not be proven ({type(error).__name__}: {error})", mend=OPTS_IN))

    def _conclude(self, verdict: str | Refusal | None) -> None:
        if verdict is not None and self.verdict is None:
            self.verdict = verdict
            self.close()
            self._last = Look()

    def _look_before(self, item: Item) -> Look | None:
        epoch = item[1]
        if not self._looks:
            self._conclude(_sampler_refusal(self._sampler) or _method_refusal(self._start_method) or _handler_refusal())
        seen = self._look(item)
        # The step may have changed what the dataset handed out: the samples of its batch, which only a look with them shows.
        again = seen if self._last_item is None else self._look(self._last_item)
        changed = _of_data(self._last.changed(again))
        if changed and epoch == self._epoch:
            self._conclude(_changed_by_training(changed[0]))
        elif changed:
            self._comparison.close()  # between two epochs: a shadow that was forked before has not seen it
        self._conclude(_handle_refusal(seen, was_there=True) if not self._looks else None)
        if self.verdict is not None:
            return None
        if self._is_looked_at:
            self._comparison.ask(item)
            self._conclude(self._comparison.verdict)
        self._epoch = epoch
        return seen

    def _look_after(self, item: Item, before: Look) -> None:
        now, self._last_item = self._look(item), item
        self._looks += 1
        if (file := moved(before.files, now.files)) is not None:
            self._conclude(_moved_file(file))
        self._conclude(_handle_refusal(now, was_there=False))
        self._conclude(_changed_by_fetching(before.changed(now), before.generators, is_first=self._looks == 1))
        self._last = now
        if self.verdict is None and not self._is_looked_at and (self._base is None or self._looks >= LOOKS):
            self._look_thoroughly(item[1])

    def _look_thoroughly(self, epoch: int) -> None:
        now = look(self._roots, scale=THOROUGH)
        changed = [] if self._base is None else _of_data(self._base[1].changed(now))
        if not changed and self._base is not None:
            self._is_looked_at, self._base = True, None
        elif self._base is not None and self._base[0] == epoch:
            self._conclude(_changed_by_fetching(changed, now.generators, is_first=False))
        else:
            self._base, self._looks = (epoch, now), 1

    def _look(self, item: Item) -> Look:
        number, _, indices = item
        seen = look(self._roots, indices if isinstance(indices, (list, tuple)) else (indices,), number)
        seen.tokens |= process_state()
        seen.files = positions()
        return seen

    def _note_held(self) -> None:
        seen = look({name: value for name, value in self._roots.items() if name != "sampler"})
        self._held = Held(seen, counts_shared=not self._asked_workers)


class _Comparison:
    """The loop's digests beside those of a shadow.

    Args:
        fetcher: given the seed of an epoch, makes what the shadow's workers fetch with.
    """

    def __init__(self, fetcher: Callable[[int], Callable[[int], Callable[[Item], Any]]]) -> None:
        self.verdict: str | Refusal | None = None
        self._fetcher, self._starts = fetcher, 0
        self._shadow: Shadow | None = None
        self._asked: dict[tuple[int, int], tuple[int, float]] = {}
        """Items that were sent: to which worker, when."""
        self._made: dict[tuple[int, int], list[Leaf]] = {}
        self._answers: dict[tuple[int, int], list[Leaf]] = {}
        self._same = [0] * WORKERS
        self._slowest_s, self._began = 0.0, 0.0

    def ask(self, item: Item) -> None:
        """Have the shadow fetch an item, which the loop is about to fetch."""
        if self._shadow is None:
            self._start(item[1])
        self._began = time.monotonic()
        if self._shadow is not None:
            self._hear()
        shadow = self._shadow
        if shadow is None or self.verdict is not None:
            return
        worker = min(range(WORKERS), key=lambda each: (self._same[each] + self._waiting(each), each))
        if not self._waiting(worker) or self._same[worker] + self._waiting(worker) < SAME:
            self._asked[item[:2]] = worker, self._began
            shadow.channels[worker].send(item)

    def take(self, item: Item, batch: Any) -> None:
        """The loop's own batch."""
        key = item[:2]
        if key in self._asked:
            self._slowest_s = max(self._slowest_s, time.monotonic() - self._began)
            self._made[key] = digest(batch)
            self._hear()

    def close(self) -> None:
        if self._shadow is not None:
            self._shadow.close()
        self._shadow = None
        self._asked, self._made, self._answers = {}, {}, {}

    def patience_s(self, least_s: float) -> float:
        return max(least_s, WAIT_FETCHES * self._slowest_s)

    def _waiting(self, worker: int) -> int:
        return sum(each == worker for each, _ in self._asked.values())

    def _start(self, seed: int) -> None:
        self._starts += 1
        if self._starts > MOST_STARTS:
            self.verdict = Refusal(reason="its data change between epochs too short for a proof", mend=OPTS_IN)
            return
        try:
            self._shadow = Shadow(self._fetcher(seed))
        except OSError as error:
            self.verdict = Refusal(reason=f"no helper process could be started ({error})", mend=OPTS_IN)

    def _hear(self) -> None:
        assert self._shadow is not None
        for channel in self._shadow.channels:
            for message in channel.received():
                self._understand(message)
        self._compare()
        if self.verdict is None and any(channel.is_closed for channel in self._shadow.channels):
            self.close()  # its time was up: the loop had paused
        patience = self.patience_s(SHORTEST_WAIT_S)
        late = [key for key, (_, when) in self._asked.items() if self._began - when > patience]
        if late and self.verdict is None:
            self.verdict = Refusal(
                reason=f"a worker gave no answer for batch {late[0][0]} in {patience:.0f} s", mend=OPTS_IN
            )

    def _understand(self, message: dict[str, Any]) -> None:
        if "digest" in message:
            self._answers[message["item"]] = message["digest"]
            return
        batch = f"batch {message['item'][0]}" if "item" in message else "a batch"
        kind, told = next((kind, message[kind]) for kind in WHY if kind in message)
        if self.verdict is None and (kind != "ended" or self._asked):
            self.verdict = refusal(kind, batch, _end_of_worker(told) if kind == "ended" else told)

    def _compare(self) -> None:
        for key in [key for key in self._answers if key in self._made]:
            worker, _ = self._asked.pop(key)
            differs = difference(self._made.pop(key), self._answers.pop(key))
            if differs is not None and self.verdict is None:
                self.verdict = Refusal(reason=f"a worker makes another batch {key[0]}: {differs} differs", mend=OPTS_IN)
            self._same[worker] += differs is None
        if self.verdict is None and min(self._same) >= SAME:
            self.verdict = TRUSTED


def refusal(kind: str, batch: str = "", told: Any = "what the dataset or collate_fn hold") -> Refusal:
    """What an answer of `WHY` means."""
    reason, mend = WHY[kind]
    return Refusal(reason=reason.format(batch=batch, told=told), mend=mend)


def _end_of_worker(code: int) -> str:
    if code in (-11, -7):  # SIGSEGV, SIGBUS
        return "fetching writes to memory that processes share, or ends its worker"
    return "fetching writes a file" if code == -25 else f"fetching ends its worker (exit code {code})"  # SIGXFSZ


def _fetcher(parts: Any, seed: int, *, is_forked: bool) -> Callable[[int], Callable[[Item], Any]]:
    """What a worker fetches with, as torch's would."""

    def begin(worker: int) -> Callable[[Item], Any]:
        dataset, collate, init = parts.dataset, parts.collate_fn, parts.worker_init_fn
        if not is_forked:
            dataset, collate, init = sent((dataset, collate, init))
        become_torch_worker(dataset, worker, seed)
        if init is not None:
            init(worker)
        seeds = WorkerSeeds() if parts.loop_seeds else None

        def make(item: Item) -> Any:
            number, epoch_seed, indices = item
            if seeds is not None:
                seeds.begin(epoch_seed, number)
            if not parts.batched:
                return collate(dataset[indices])
            if getattr(dataset, "__getitems__", None):
                return collate(dataset.__getitems__(indices))
            return collate([dataset[index] for index in indices])

        return make

    return begin


def _of_data(paths: list[str]) -> list[str]:
    """Those that the training may not change: without the sampler and what belongs to the whole process."""
    return [path for path in paths if not path.startswith("sampler") and path not in PROCESS]


def _changed_by_fetching(changed: list[str], generators: set[str], *, is_first: bool) -> Refusal | None:
    """What is changed by the first fetch alone is made ready once; a generator goes on with every batch."""
    for path in changed:
        if path in generators:
            return Refusal(
                reason=f"fetching draws from {shown(path)}, a random generator of its own",
                mend=f"draw from the global generators of torch, numpy or random; {OPTS_IN}",
            )
    if not changed or is_first:
        return None
    return refusal("changes", told=shown(changed[0]))


def _changed_by_training(path: str) -> Refusal:
    return Refusal(
        reason=f"the training changes {shown(path)} while it iterates",
        mend=f"{OPTS_IN}: workers then see what it is when an epoch begins",
    )


def _moved_file(file: str) -> Refusal:
    return Refusal(
        reason=f"fetching moves the position of `{file}`, which forked workers would share",
        mend=f"open it in `__getitem__`; {OPTS_IN}",
    )


def _handle_refusal(seen: Look, *, was_there: bool) -> Refusal | None:
    if not seen.handles:
        return None
    path, words = seen.handles[0]
    mend = "open it in `__getitem__`; " if was_there and words.startswith("an open") else ""
    end = "" if was_there else ": each worker then opens its own"
    return Refusal(reason=f"{words} in {shown(path)}", mend=f"{mend}{OPTS_IN}{end}")


def _sampler_refusal(sampler: Any) -> Refusal | None:
    """Why drawing ahead may give another order: a sampler of the user's may listen to the training."""
    while sampler is not None:
        kind = type(sampler)
        if kind not in PURE_VALUES and kind.__module__ not in PURE_SAMPLERS:
            return Refusal(
                reason=f"its sampler {kind.__name__} may depend on the training, and workers need batches ahead",
                mend=OPTS_IN,
            )
        inner = getattr(sampler, "batch_sampler", None)
        sampler = inner if inner is not None else getattr(sampler, "sampler", None)
    return None


def _handler_refusal() -> Refusal | None:
    """Why the script would hear of workers: it is told of each child of the process that ends."""
    handler = signal.getsignal(signal.SIGCHLD)
    if handler in (signal.SIG_DFL, None) or (getattr(handler, "__module__", None) or "").startswith(HANDLERS):
        return None
    return Refusal(reason="the script handles SIGCHLD, and would be told when workers end", mend=OPTS_IN)


def _method_refusal(method: str) -> Refusal | None:
    """Why processes that do not inherit the training process would see something else."""
    if method == "fork":
        return None
    mend = f"{OPTS_IN}; so does multiprocessing_context='fork'"
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        return Refusal(reason=f"workers started by {method!r} cannot import what is no file", mend=mend)
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not (
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
    ):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename == "<string>":
        return None  # a process that was started so itself
    if frame is None or not _is_in_guard(Path(frame.f_code.co_filename), frame.f_lineno):
        return Refusal(
            reason=f"workers started by {method!r} would run the script anew, which has no guard around this line",
            mend=f'put it under `if __name__ == "__main__":`; {mend}',
        )
    return None


def _is_in_guard(file: Path, line: int) -> bool:
    for node in ast.parse(file.read_text()).body:
        is_guard = (
            isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) and "__main__" in ast.unparse(node.test)
        )
        if is_guard and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):  # type: ignore[attr-defined]
            return True
    return False
