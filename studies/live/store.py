"""On a simulated object store (20 ms a request): AutoLoader, of which nothing was asked, beside the best DataLoader.

python -m studies.live.store                # three minutes

AutoLoader trains for 60 s, of which the second half counts; DataLoader with 16, 32 and 48 persistent workers for 20 s each, the
first epoch left out. The job is that of `autotune-loader demo`: 1,200 JPEG files over HTTP, a small CNN. Bar: 1.16 of the best.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from autotune_loader import AutoLoader, demo

WORKERS, FIXED_S, ALL_S, BAR = (16, 32, 48), 20.0, 60.0, 1.16


def rate(loader: Any, model: Any, seconds: float, begin_s: float) -> float:
    """Samples/s of the training after its first seconds and its first epoch."""
    optimizer, begun = torch.optim.SGD(model.parameters(), lr=0.01), time.monotonic()
    samples, since, epoch = 0, 0.0, 0
    while time.monotonic() - begun < seconds:
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            now = time.monotonic()
            if epoch and now - begun >= begin_s:
                samples, since = (samples + len(x), since) if since else (0, now)
            if now - begun >= seconds:
                return samples / (now - since)
        epoch += 1
    return samples / (time.monotonic() - since)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    given, model = demo.job()
    data, size = given.dataset, given.batch_size
    fixed = {}
    for workers in WORKERS:
        loader = DataLoader(data, batch_size=size, shuffle=True, num_workers=workers, persistent_workers=True)
        fixed[workers] = rate(loader, model, FIXED_S, 0.0)
        print(f"DataLoader, {workers} workers: {fixed[workers]:,.0f} samples/s", flush=True)
        del loader
    loader = AutoLoader(data, batch_size=size, shuffle=True, persistent_workers=True)
    own, best = rate(loader, model, ALL_S, ALL_S / 2), max(fixed.values())
    print(f"AutoLoader, {loader.best}: {own:,.0f} samples/s, {own / best:.2f} of the best (bar {BAR})")
    return 0 if own >= BAR * best else 1


if __name__ == "__main__":
    sys.exit(main())
