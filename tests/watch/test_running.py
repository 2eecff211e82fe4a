"""`run`: a script's loaders are AutoLoaders, with the same samples in the same order, and workers where they are allowed."""

import pytest

from autotune_loader import LoaderConfig, TuningResult
from tests.support.bench import line_of

pytestmark = pytest.mark.process
WAITING = """
import atexit
atexit.register(print, "cleaned up")

if __name__ == "__main__":
    torch.manual_seed(0)
    seen = []
    kept = DataLoader(Waiting(800), batch_size=8, shuffle=True)  # KEPT
    for epoch in range(int(sys.argv[1])):
        for x in kept if sys.argv[2:] else DataLoader(Waiting(800), batch_size=8, shuffle=True):  # ANEW
            seen += x.tolist()
    print(seen)
"""
OWN_KINDS = """
class Own(DataLoader):
    def __iter__(self):
        yield from super().__iter__()
if __name__ == "__main__":
    torch.manual_seed(0); random.seed(0); np.random.seed(0)
    for kind, data in ((DataLoader, Stream()), (Own, Numbers())):
        print([x.tolist() for x in kind(data, batch_size=8)])
"""
DROPPED = """
import gc, weakref
class Trainer:
    def __init__(self):
        self.loader = DataLoader(Numbers(200), batch_size=8, shuffle=True, collate_fn=self.collate)
    def collate(self, samples):
        return torch.stack(samples)
def trial():
    trainer = Trainer()
    assert len(list(trainer.loader)) == 25
    return weakref.ref(trainer)
if __name__ == "__main__":
    print([(trial(), gc.collect())[0]() for _ in range(3)])
"""


@pytest.mark.parametrize(("kind", "more"), [("KEPT", ["kept"]), ("ANEW", [])])
def test_loaders_get_workers_where_it_is_said_that_they_may_and_what_these_bring_is_measured(bench, kind, more):
    text, script = bench.write(WAITING), ["train.py", "6", *more]
    _, plain = bench.run(*script, FETCH_S="0")
    printed, told = bench.told("run", "--workers", "--max-workers", "4", "-o", "loader.json", *script)
    assert printed == plain
    (loader,) = told["loaders"]
    assert (loader["name"], loader["epochs"], loader["batches"]) == (f"train.py:{line_of(text, kind)}", 6, 600)
    assert 0 < loader["settings_now"]["num_workers"] <= 4
    assert loader["speedup"]["low"] > 1
    assert TuningResult.load(bench.folder / "loader.json").best.num_workers > 0


def test_loaders_that_ask_for_no_workers_get_none_and_the_command_that_allows_them_is_named(bench):
    bench.write(WAITING)
    _, plain = bench.run("train.py", "1", FETCH_S="0")
    printed, told = bench.told("run", "train.py", "1")
    (loader,) = told["loaders"]
    assert printed == plain
    assert (loader["settings_now"]["num_workers"], loader["kept"]["kind"]) == (0, "no_consent")
    assert "autotune-loader run --workers train.py" in loader["advice"][0]["sentence"]


def test_start_with_begins_with_what_a_file_says(bench):
    bench.write(WAITING)
    found = LoaderConfig(num_workers=2, prefetch_factor=3)
    TuningResult(best=found, status="complete").save(bench.folder / "loader.json")
    _, told = bench.told("run", "--start-with", "loader.json", "train.py", "1", FETCH_S="0")
    (loader,) = told["loaders"]
    assert (loader["settings"]["num_workers"], loader["settings_now"]) == (0, found.to_kwargs())


def test_what_cannot_be_an_autoloader_is_watched_with_the_reason(bench):
    bench.write(OWN_KINDS)
    _, plain = bench.run("train.py")
    printed, told = bench.told("run", "--workers", "train.py")
    assert printed == plain
    kept = {each["contents"].partition("[")[0]: each["kept"]["kind"] for each in told["loaders"]}
    assert kept == {"Stream, batches of 8": "iterable", "Numbers": "own_iterator"}


def test_what_the_script_has_dropped_is_gone(bench):
    bench.write(DROPPED)
    for options in ((), ("--workers",)):
        printed, told = bench.told("run", *options, "train.py")
        assert (printed, [each["batches"] for each in told["loaders"]]) == ("[None, None, None]\n", [75])
