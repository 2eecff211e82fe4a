"""`run` and `tune`: a script's loaders are tuned, and it gets the same samples in the same order."""

from __future__ import annotations

import re

import pytest

from autotune_loader import LoaderConfig, TuningResult
from tests.support.bench import Bench, line_of

pytestmark = pytest.mark.process
WAITING = """
import atexit
atexit.register(print, "cleaned up")

class Waiting(Numbers):
    def __getitem__(self, index):
        time.sleep(float(os.environ.get("FETCH_S", 0.002)))
        return torch.tensor(index)

if __name__ == "__main__":
    torch.manual_seed(0)
    seen = []
    for epoch in range(int(sys.argv[1])):
        loader = DataLoader(Waiting(800), batch_size=8, shuffle=True)  # ANEW
        for x in loader:
            seen += x.tolist()
            time.sleep(0.001)
    print(seen)
"""


def test_what_was_learnt_stays_where_a_loader_is_made_for_each_epoch(bench: Bench) -> None:
    text = bench.write(WAITING)
    _, plain = bench.run("train.py", "6", FETCH_S="0")

    code, printed, report = bench.command("run", "--max-workers", "4", "-o", "loader.json", "train.py", "6")

    assert (code, printed) == (0, plain)
    assert f"train.py:{line_of(text, 'ANEW')} " in report
    assert "600 batches in 6 epochs" in report
    assert TuningResult.load(bench.folder / "loader.json").best.num_workers > 0


CAUGHT = """
def saving(loader, caught=[]):
    try:
        yield from loader
    except KeyboardInterrupt:
        if caught:
            raise
        caught.append(True)

"""


def test_apply_begins_with_what_a_file_says(bench: Bench) -> None:
    bench.write(WAITING)
    found = LoaderConfig(num_workers=2, prefetch_factor=3)
    TuningResult(best=found, status="complete", baseline=LoaderConfig()).save(bench.folder / "loader.json")

    _, told = bench.told("run", "--apply", "loader.json", "train.py", "1", FETCH_S="0")

    assert told["loaders"][0]["settings"]["num_workers"] == 0
    assert told["loaders"][0]["settings_now"] == found.to_kwargs()


def test_what_may_not_be_changed_is_watched_with_the_reason(bench: Bench) -> None:
    bench.write("""
        class Epochs(Numbers):
            epoch = 0
        class Own(DataLoader):
            def __iter__(self):
                yield from super().__iter__()
        if __name__ == "__main__":
            torch.manual_seed(0); random.seed(0); np.random.seed(0)
            for kind, data in ((DataLoader, Stream()), (DataLoader, Epochs()), (Own, Numbers())):
                print([x.tolist() for x in kind(data, batch_size=8)])
        """)
    _, plain = bench.run("train.py")

    code, printed, report = bench.command("run", "train.py")

    assert (code, printed) == (0, plain)
    reasons = " ".join(re.findall("not changed: (.*)", report))
    for why in ("IterableDataset", "knows the epoch", "Own makes iterators of its own"):
        assert why in reasons
