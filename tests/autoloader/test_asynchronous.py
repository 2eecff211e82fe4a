"""Loops that launch their steps on an accelerator: what the device waits for data counts."""

import json
import sys
import threading

import pytest

from autotune_loader.autoloader import tuner
from tests.support.bench import Bench

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("simulated")]
HEAD = """
import json, sys, time
import torch
from torch.utils.data import DataLoader
BATCH, WARM_UP_S = 4, 0.3

class Slow(torch.utils.data.Dataset):
    def __init__(self, batches, fetch_s):
        self.size, self.sleep_s = BATCH * batches, fetch_s / BATCH
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        time.sleep(self.sleep_s)
        return torch.tensor(index)

def trained(loader, step_s, sync_every):
    \"""Indices of all samples, and the share of the time in which the device had nothing to do.\"""
    weight, seen, begun = torch.ones(1, device="sim"), [], time.monotonic()
    torch.sim.work(WARM_UP_S, weight)  # so that the start of workers costs nothing
    for number, batch in enumerate(loader, 1):
        seen += batch.tolist()
        torch.sim.work(step_s, weight)
        if sync_every and number % sync_every == 0:
            weight.item()
    torch.sim.synchronize()
    return seen, 1 - number * step_s / (time.monotonic() - begun - WARM_UP_S)
"""
WATCHED = """
if __name__ == "__main__":
    workers, fetch_s, step_s, sync_every, batches = json.loads(sys.argv[1])
    forked = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(Slow(batches, fetch_s), batch_size=BATCH, **forked)
    print(trained(loader, step_s, sync_every)[1])
"""


@pytest.mark.parametrize(
    ("workers", "fetch_s", "step_s", "sync_every", "batches", "bottleneck"),
    [(2, 0.02, 0.02, 50, 60, "step"), (0, 0.03, 0.02, 50, 51, "storage")],
)
def test_watch_tells_what_the_device_waits(
    workers, fetch_s, step_s, sync_every, batches, bottleneck, simulated, tmp_path
):
    bench = Bench(simulated, tmp_path, HEAD)
    bench.write(WATCHED)
    printed, told = bench.told(
        "watch", "train.py", json.dumps([workers, fetch_s, step_s, sync_every, batches])
    )
    (loader,) = told["loaders"]
    assert loader["bottleneck"]["kind"] in (bottleneck, "cores")  # which others may take
    assert loader["batches"] == batches
    assert loader["wait_share"] == pytest.approx(float(printed), abs=0.1)


def tuned(head, fetch_s, step_s, sync_every, batches):
    names, tuner.GATE_S = {}, 0.3
    exec(head, names)
    from autotune_loader import AutoLoader

    loader = AutoLoader(names["Slow"](batches, fetch_s), batch_size=names["BATCH"], num_workers=2)
    seen, _ = names["trained"](loader, step_s, sync_every)
    return seen, loader.best.num_workers, loader.found.result.bottleneck.kind


# How many, and how fast, is told by test_deciding.
@pytest.mark.parametrize(
    ("fetch_s", "step_s", "sync_every", "batches", "workers", "bottlenecks"),
    [
        (0.02, 0.02, 0, 60, {2}, {"step"}),
        (0.04, 0.01, 50, 300, {*range(3, 33)}, {"step", "storage"}),
    ],
)
def test_workers_are_found_by_what_the_device_waits(
    fetch_s, step_s, sync_every, batches, workers, bottlenecks, simulated
):
    how = (fetch_s, step_s, sync_every, batches)
    seen, found, bottleneck = simulated.call(tuned, HEAD, *how)
    assert seen == list(range(4 * batches))
    assert found in workers
    assert bottleneck in bottlenecks


def asked_by_a_thread(head, batches):
    names = {}
    exec(head, names)
    from autotune_loader import AutoLoader

    sys.setswitchinterval(1e-5)
    loader = AutoLoader(names["Slow"](batches, 0), batch_size=names["BATCH"])
    stop = threading.Event()
    thread = threading.Thread(target=lambda: [loader.metrics() for _ in iter(stop.is_set, True)])
    thread.start()
    seen, _ = names["trained"](loader, 5e-5, 0)
    stop.set()
    thread.join()
    return len(seen), loader.log.totals.samples


def test_figures_may_be_asked_for_by_another_thread(simulated):
    seen, noted = simulated.call(asked_by_a_thread, HEAD, 500)
    assert seen == 2000
    assert noted == 2000
