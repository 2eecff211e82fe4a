"""Is a short script ever slower with AutoLoader, or under `run`, than with DataLoader? One process for each, in turns.

    python -m studies.live.never_slower                    # twelve jobs, with 0 and with 2 workers asked; about 25 minutes
    python -m studies.live.never_slower waits text --rounds 1
    python -m studies.live.never_slower --slowed           # beside a busy process a core
    python -m studies.live.never_slower --halved           # each core half as fast; as root

The bar: the loop takes at most 1.02 x plain + 0.5 s; where samples wait and workers are allowed at most 0.6 x plain. Under
`watch` it takes at most 1.01 x plain + 0.1 s, and the whole script 0.2 s more.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune_loader.machine.limits import usable_cores
from studies.processes import busy_neighbours, halved_cores, last_line

HOWS = {"plain": (), "auto": (), "run": ("run", "--allow-workers"), "watch": ("watch",)}
"""The command of each, if it has one."""
MOST, MORE_S, WAITING = 1.02, 0.5, 0.6
WATCH_MOST, WATCH_MORE_S, WATCH_SCRIPT_S = 1.01, 0.1, 0.2


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


def job(name: str, workers: int, how: str) -> float:
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
    package = ["-m", "autotune_loader", *HOWS[how]] if HOWS[how] else []
    begun = time.perf_counter()
    loop_s = float(last_line(*package, str(Path(__file__)), "--job", name, str(workers), how))
    whole_s = time.perf_counter() - begun
    return loop_s, whole_s - loop_s


def rows_of(names: list[str], rounds: int) -> Iterator[str]:
    for name in names:
        for workers in (0, 2):
            if name == "tiny_epochs" and workers:
                continue  # plain torch takes minutes to start workers 5,000 times
            found: dict[str, list[tuple[float, float]]] = {how: [] for how in HOWS}
            for number in range(rounds):
                for how in sorted(HOWS, reverse=bool(number % 2)):
                    found[how].append(seconds(name, workers, how))
            loops = {how: statistics.median(loop_s for loop_s, _ in found[how]) for how in HOWS}
            plain, auto, run, watch = loops.values()
            both = zip(found["watch"], found["plain"], strict=True)
            more_s = watch - plain + statistics.median(own_s - its_s for (_, own_s), (_, its_s) in both)
            bar = WAITING * plain if name == "waits" and not workers else MOST * plain + MORE_S
            is_cheap = watch <= WATCH_MOST * plain + WATCH_MORE_S and more_s <= WATCH_SCRIPT_S + 0.01 * plain
            verdicts = ["yes" if kept else "NO" for kept in (max(auto, run) <= bar, is_cheap)]
            took = f"{plain:.2f} | {auto:.2f} | {run:.2f} | {auto / plain:.2f} | {run / plain:.2f} | {verdicts[0]}"
            yield f"| {name} | {workers} | {took} | {watch:.2f} | {more_s:+.2f} | {verdicts[1]} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    slow = parser.add_mutually_exclusive_group()
    slow.add_argument("--slowed", action="store_true", help="beside one busy process a core, in a session of its own")
    slow.add_argument("--halved", action="store_true", help="each core half as fast, for whoever uses it; as root")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(job(options.job[0], int(options.job[1]), options.job[2]))
        return 0
    print(
        "| job | workers asked | plain, s | AutoLoader, s | run, s | AutoLoader / plain | run / plain | within the bar | "
        "watch, s | whole script, s | within its bar |"
    )
    print(f"|{'---|' * 11}")
    beside = busy_neighbours(usable_cores().usable) if options.slowed else contextlib.nullcontext()
    with halved_cores() if options.halved else beside:
        for row in rows_of(options.names or list(jobs()), options.rounds):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
