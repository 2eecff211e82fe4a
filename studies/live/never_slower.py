"""Is a short script ever slower with AutoLoader, or under `run`, than with DataLoader? One process for each, in turns.

    python -m studies live.never_slower                    # twelve jobs, with 0 and with 2 workers asked; about 25 minutes
    python -m studies live.never_slower --only waits --rounds 1
    python -m studies live.never_slower --slowed           # beside a busy process a core
    python -m studies live.never_slower --watch-only       # plain and `watch` in turns: about 15 minutes
    python -m studies live.never_slower --quick            # a minute: is "never slower by more than 2% + 0.5 s" broken?

Under `watch` the loop takes at most 1.01 x plain + 0.1 s, and the whole script 0.2 s more. With `--quick` a promise is broken
only where the lower end of the paired interval is beyond it, in two looks, while the cores are free, and then the exit status
is 1. "Could not tell" is no failure: noise, or a busy machine, turns nothing red.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import statistics
import time
from typing import Any

from autotune_loader.machine.limits import usable_cores
from autotune_loader.values import Interval
from studies.processes import answer, busy_neighbours, cores_free, forked
from studies.study import Row, Table
from studies.verdict import SLOWER, SLOWER_S, Verdict, confirmed, never_slower, ratio

HOWS = {"plain": (), "auto": (), "run": ("-m", "autotune_loader", "run", "--allow-workers"),
        "watch": ("-m", "autotune_loader", "watch")}  # fmt: skip
"""The command of each, if it has one."""
WAITING, WATCH_MOST, WATCH_MORE_S, WATCH_SCRIPT_S = 0.6, 1.01, 0.1, 0.2
"""Times plain where samples wait and workers are allowed; and what `watch` may cost."""
BAR = "1.02 x plain + 0.5 s (--quick: surely beyond it is broken), `waits` from 0 workers 0.6 x plain; watch as told above"
QUICK, QUICK_ROUNDS, QUICK_S = (("text", 0), ("jpegs", 0), ("short_epochs", 2)), 4, 30.0
"""Jobs, rounds, and seconds after which no further round of a look begins: on a busy machine few rounds tell nothing."""


def jobs() -> dict[str, tuple[Any, dict[str, Any], int, float]]:
    """Datasets, arguments, epochs and seconds of a step. Imported by the jobs alone."""
    import numpy as np
    import torch
    from PIL import Image
    from torch.utils.data import TensorDataset

    from studies.workloads import Items

    picture = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (160, 160, 3), dtype=np.uint8)).save(picture, "JPEG")

    def jpeg(index: int) -> Any:
        image = Image.open(io.BytesIO(picture.getvalue())).resize((96, 96))
        return torch.from_numpy(np.asarray(image).copy()).float(), index

    def waits(index: int) -> Any:
        time.sleep(0.004)
        return torch.full((16,), float(index)), index

    def rows(index: int) -> Any:
        return torch.tensor([float(index + number) for number in range(20)])

    def text(index: int) -> Any:
        return [ord(letter) % 97 for letter in f"a sentence about the sample {index} " * 6]

    def padded(samples: list[Any]) -> Any:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(each) for each in samples], batch_first=True)

    tensors = TensorDataset(torch.randn(64_000, 64), torch.arange(64_000))
    return {
        "waits": (Items(waits, 640), {"batch_size": 32}, 4, 0.0005),
        "jpegs": (Items(jpeg, 1600), {"batch_size": 32}, 3, 0.001),
        "in_memory": (tensors, {"batch_size": 64}, 4, 0.0002),
        "rows": (Items(rows, 20_000), {"batch_size": 64}, 4, 0.0002),
        "text": (Items(text, 12_000), {"batch_size": 32, "collate_fn": padded}, 3, 0.0005),
        "large": (Items(lambda i: torch.full((150_000,), float(i)), 2400), {"batch_size": 32}, 2, 0.002),
        "busy_step": (Items(jpeg, 800), {"batch_size": 32}, 3, 0.05),
        "short_epochs": (Items(waits, 40), {"batch_size": 8}, 25, 0.001),
        "epochs_of_0.1_s": (TensorDataset(*tensors[:14_000]), {"batch_size": 64}, 40, 0.0002),
        "batches_of_64_mib": (Items(lambda i: torch.full((1 << 21,), float(i)), 192), {"batch_size": 8}, 2, 0.002),
        "made_anew": (Items(waits, 160), {"batch_size": 16}, 12, 0.001),
        "tiny_epochs": (TensorDataset(torch.randn(64, 4)), {"batch_size": 64}, 5000, 0.0),
    }


def loop_s(name: str, workers: int, how: str) -> float:
    """Seconds of the loop."""
    import torch

    torch.set_num_threads(1)
    if how == "auto":
        from autotune_loader import AutoLoader as Loader
    else:
        from torch.utils.data import DataLoader as Loader  # type: ignore[assignment]
    data, arguments, epochs, step_s = jobs()[name]
    arguments |= {"shuffle": True} | ({"num_workers": workers} if workers else {})
    begun, loader = time.perf_counter(), Loader(data, **arguments)
    for _ in range(epochs):
        if name == "made_anew":
            loader = Loader(data, **arguments)
        for _ in loader:
            until = time.perf_counter() + step_s
            while time.perf_counter() < until:
                pass
    return time.perf_counter() - begun


def seconds(name: str, workers: int, how: str) -> tuple[float, float]:
    """Of the loop, and of the rest of the script."""
    begun = time.perf_counter()
    loop = float(answer(loop_s, under=HOWS[how], name=name, workers=workers, how=how))
    return loop, time.perf_counter() - begun - loop


def row(name: str, workers: int, rounds: int) -> Row:
    found: dict[str, list[tuple[float, float]]] = {how: [] for how in HOWS}
    for number in range(rounds):
        for how in sorted(HOWS, reverse=bool(number % 2)):
            found[how].append(seconds(name, workers, how))
    loops = {how: [loop for loop, _ in each] for how, each in found.items()}
    plain, auto, run, watch = map(statistics.median, loops.values())
    pairs = zip(found["watch"], found["plain"], strict=True)
    more_s = watch - plain + statistics.median(own_s - its_s for (_, own_s), (_, its_s) in pairs)
    bar = WAITING * plain if name == "waits" and not workers else SLOWER * plain + SLOWER_S
    is_cheap = watch <= WATCH_MOST * plain + WATCH_MORE_S and more_s <= WATCH_SCRIPT_S + 0.01 * plain
    cells = {"job": name, "workers asked": workers, **{f"{how}, s": each for how, each in loops.items()}}
    cells |= {"AutoLoader / plain": auto / plain, "run / plain": run / plain}
    return Row({**cells, "script under watch, s more": more_s, "watch within its bar": is_cheap}, max(auto, run) <= bar)


def watch_row(name: str, workers: int, rounds: int) -> Row:
    """The loop of a script, and the script, with and without `watch`."""
    plain, watch = list[tuple[float, float]](), list[tuple[float, float]]()
    for number in range(rounds):
        for how in ("watch", "plain") if number % 2 else ("plain", "watch"):
            (watch if how == "watch" else plain).append(seconds(name, workers, how))
    loops, own = ([loop for loop, _ in each] for each in (plain, watch))
    more_s = statistics.median(mine - its for (mine, _), (its, _) in zip(watch, plain, strict=True))
    script_s = statistics.median(sum(mine) - sum(its) for mine, its in zip(watch, plain, strict=True))
    most_s = (WATCH_MOST - 1) * statistics.median(loops) + WATCH_MORE_S
    cells = {"job": name, "workers asked": workers, "plain, s": loops, "watch, s": own}
    cells |= {"loop, s more": more_s, "at most": most_s, "script, s more": script_s}
    return Row(cells, more_s <= most_s)


def quick_row(name: str, workers: int) -> Row:
    """The loop alone, each in a fork of this process, which has imported torch."""
    plain, ours = list[float](), list[float]()

    def look() -> tuple[Interval, Verdict]:
        begun, first = time.monotonic(), len(plain)
        for number in range(QUICK_ROUNDS):
            if time.monotonic() < begun + QUICK_S:
                for how in ("auto", "plain") if number % 2 else ("plain", "auto"):
                    (ours if how == "auto" else plain).append(forked(loop_s, name, workers, how))
        found = ratio(ours[first:], plain[first:])
        return found, never_slower(found, statistics.median(plain[first:]))

    found, verdict, free = confirmed(look, cores_free)
    cells = {"job": name, "workers asked": workers, "DataLoader, s": plain, "AutoLoader, s": ours}
    return Row(
        {**cells, "AutoLoader / DataLoader": found, "cores free": f"{free:.0%}", "never slower": verdict.value},
        verdict.is_met,
    )


def rows(
    *, only: str = "", rounds: int = 3, slowed: bool = False, quick: bool = False, watch_only: bool = False
) -> Table:
    if quick:
        import PIL.Image  # noqa: F401
        import torch  # noqa: F401 - forks have both

        import autotune_loader  # noqa: F401
    with busy_neighbours(usable_cores().usable) if slowed else contextlib.nullcontext():
        # tiny_epochs with workers would take plain torch minutes: it starts them 5,000 times
        every = QUICK if quick else [each for each in itertools.product(jobs(), (0, 2)) if each != ("tiny_epochs", 2)]
        for name, workers in every:
            if only in name:
                yield quick_row(name, workers) if quick else (watch_row if watch_only else row)(name, workers, rounds)
