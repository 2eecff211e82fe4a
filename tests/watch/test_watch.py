"""Scripts do and draw under `watch` and `run` what they do without; each loader is told of by its line, or has workers."""

import json
import math
import shlex
import signal

import pytest

from autotune_loader import LoaderConfig, TuningResult
from tests.support.bench import line_of

pytestmark = pytest.mark.process
TRAIN = """
    def train(loader, model, optimizer):
        batches = iter(loader)
        noise = torch.randn(4)
        for x in batches:
            loss = (model(x.float() + noise) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    if __name__ == "__main__":
        torch.manual_seed(0); random.seed(0); np.random.seed(0)
        workers = int(sys.argv[1])
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        kept = DataLoader(Numbers(), batch_size=8, shuffle=True, num_workers=workers, persistent_workers=workers > 0)  # KEPT
        for epoch in range(3):
            train(kept, model, optimizer)
            train(DataLoader(Numbers(32), batch_size=8, num_workers=workers), model, optimizer)  # ANEW
            train(DataLoader(Stream(), batch_size=4, num_workers=workers), model, optimizer)  # STREAM
        weights = [value.hex() for each in model.parameters() for value in each.flatten().tolist()]
        print(weights, random.random(), np.random.rand(), torch.rand(1).item())
    """
WAITS = """
    import multiprocessing
    if __name__ == "__main__":
        multiprocessing.set_start_method("fork")  # by which workers take no part of so short a script to start
        os.chdir("/")
        for x in DataLoader(Waiting(800), batch_size=8, num_workers=int(sys.argv[1])):  # MAIN
            time.sleep(0.004)
        for x in DataLoader(Numbers(8), batch_size=8, num_workers=1):
            pass
    """
AUTO = """
    from autotune_loader import AutoLoader
    if __name__ == "__main__":
        list(AutoLoader(Numbers(), batch_size=8))  # AUTO
    """
CHILDREN = """
    import subprocess
    import torch.multiprocessing as mp
    def work(rank, *_):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2") if sys.argv[1] == "spawn" else None
        for x in DataLoader(Waiting(80), batch_size=8):  # CHILD
            pass
    if __name__ == "__main__":
        if sys.argv[1] == "spawn":
            mp.spawn(work, nprocs=2)
        elif sys.argv[1] == "pool":
            with mp.get_context("fork").Pool(2) as pool:
                pool.map(work, range(2), chunksize=1)
        elif sys.argv[1] == "script":
            subprocess.run([sys.executable, "train.py", "work"], check=True)
        elif sys.argv[1] == "work":
            work(0)
        else:
            both = [mp.get_context(sys.argv[1]).Process(target=work, args=(n,)) for n in range(2)]
            [each.start() for each in both]
            [each.join() for each in both]
    """
ENDED = """
    import signal
    if __name__ == "__main__":
        if "own" in sys.argv:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        for n, x in enumerate(DataLoader(Waiting(800), batch_size=8, num_workers=int(sys.argv[1]))):
            time.sleep(0.002)
            if n == 30:
                print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
                print("held back")
                os.kill(os.getpid(), signal.SIGTERM if "kill" not in sys.argv else signal.SIGKILL)
    """
AMID = """
    import signal
    from autotune_loader.watch import report
    say = report.say
    report.say = lambda *told, **how: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.01), say(*told, **how))
    if __name__ == "__main__":
        list(DataLoader(Numbers(), batch_size=8))
    """
FORKED = """
    from autotune_loader import AutoLoader
    if __name__ == "__main__":
        method, kind = sys.argv[1:]
        weight = torch.ones(1, device="sim")
        how = {"batch_size": 8, "num_workers": 2, "multiprocessing_context": method}
        loader = DataLoader(Numbers(), **how) if kind == "DataLoader" else AutoLoader(Numbers(), **how)
        assert len(list(loader)) == 12
        print(getattr(loader, "report", str)())
    """
SHARDS = """
    class Shards(IterableDataset):
        def __iter__(self):
            return iter(range(200 if get_worker_info().id < int(sys.argv[2]) else 0))
    if __name__ == "__main__":
        for x in DataLoader(Shards(), batch_size=8, num_workers=int(sys.argv[1])):
            pass
    """


@pytest.mark.parametrize(
    ("how", "processes"), [("spawn", 1), ("fork", 2), ("pool", 2), ("script", 1)]
)
def test_what_processes_of_the_script_saw_is_told_and_judged_by_the_command(bench, how, processes):
    line, temporary = f"train.py:{line_of(bench.write(CHILDREN), 'CHILD')}", bench.folder / "tmp"
    temporary.mkdir()
    asked = ("watch", "-o", "loader.json", "--json", "report.json", "--fail-if-wait", "10%")
    code, printed, report = bench.command(*asked, "train.py", how, TMPDIR=str(temporary))
    (loader,) = json.loads((bench.folder / "report.json").read_text())["loaders"]
    assert (code, printed, report.count("batches of 8"), "--fail-if-wait allows 10%" in report) == (
        4,
        "",
        1,
        True,
    )
    assert (loader["name"], loader["batches"], loader["processes"]) == (line, 10, processes)
    assert TuningResult.load(bench.folder / "loader.json").loaders == {line: loader["settings"]}
    assert [path.name for path in temporary.iterdir() if path.name.startswith("autotune")] == []


@pytest.mark.parametrize("arguments", ["0", "2", "0 own", "2 kill"])
def test_a_script_that_is_ended_ends_as_without_us_and_what_was_seen_is_told(bench, arguments):
    bench.write(ENDED)
    plain = bench.run("train.py", *arguments.split())
    code, printed, report = bench.command(
        "watch", "-o", "o.json", "--json", "r.json", "train.py", *arguments.split()
    )
    assert (code, printed) == plain
    if "kill" in arguments:
        return
    (loader,) = json.loads((bench.folder / "r.json").read_text())["loaders"]
    assert (loader["batches"], "31 batches" in report) == (31, True)
    assert TuningResult.load(bench.folder / "o.json").best.num_workers == int(arguments[0])


def test_sigterm_while_the_report_is_told_waits_for_its_end(bench):
    bench.write(AMID)
    code, _, report = bench.command("watch", "train.py")
    assert (code, report.count("12 batches")) == (-signal.SIGTERM, 1)


@pytest.mark.parametrize(
    ("workers", "shards", "told"), [(4, 3, "1 of 4 workers delivered no batch."), (2, 2, None)]
)
def test_workers_of_a_stream_that_have_nothing_to_deliver_are_told(bench, workers, shards, told):
    bench.write(SHARDS)
    _, found = bench.told("watch", "train.py", str(workers), str(shards))
    (loader,) = found["loaders"]
    assert loader["delivered"] == [25] * shards + [0] * (workers - shards)
    assert (loader["idle_workers"] or {}).get("sentence") == told
    assert any(each["kind"] == "spread_shards" for each in loader["advice"]) == (told is not None)


@pytest.mark.parametrize(
    ("verb", "method", "kind", "advised"),
    [
        ("watch", "fork", "DataLoader", "forkserver_by_autoloader"),
        ("watch", "fork", "AutoLoader", "forkserver"),
        ("run", "fork", "DataLoader", "forkserver"),
        ("watch", "spawn", "DataLoader", None),
        ("run", "spawn", "DataLoader", None),
    ],
)
def test_workers_that_are_forked_from_a_process_with_an_accelerator_are_told(
    verb, method, kind, advised, bench, simulated
):
    bench.python = simulated
    bench.write(FORKED)
    printed, found = bench.told(verb, "train.py", method, kind)
    (loader,) = found["loaders"]
    assert [each["kind"] for each in loader["advice"] if "fork" in each["kind"]] == (
        [advised] if advised else []
    )
    assert advised is None or "initialized SIM: they may crash" in loader["advice"][-1]["sentence"]
    assert ("initialized SIM" in " ".join(printed.split())) == (kind == "AutoLoader")


def told_alike(bench, report):
    """What `r.json` has of the loaders, and the result in `o.json`: the terminal and both files say the same."""
    told, result = (
        json.loads((bench.folder / "r.json").read_text()),
        TuningResult.load(bench.folder / "o.json"),
    )
    loader, block = told["loaders"][0], " ".join(report.split())
    assert result.bottleneck.sentence == loader["bottleneck"]["sentence"] in block
    assert [each.sentence for each in result.advice] == [
        each["sentence"] for each in loader["advice"]
    ]
    assert result.best.arguments() == loader["settings_now"] == result.loaders[loader["name"]]
    assert result.wait_share == pytest.approx(loader["wait_share"])
    assert f"waits for data {loader['wait_share'] * 100:.0f}% of the time" in block
    ratios = [each for each in (result.speedup, result.rate) if each is not None]
    assert all(each.low >= 0 or each.low == -math.inf for each in ratios)
    return told["loaders"], result


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_and_random_states_are_the_same_bit_for_bit(bench, workers):
    text = bench.write(TRAIN)
    _, plain = bench.run("train.py", str(workers))
    code, printed, report = bench.command("watch", "train.py", str(workers))
    assert (code, printed) == (0, plain)
    for mark, batches in (("KEPT", 36), ("ANEW", 12), ("STREAM", 30)):
        block = report.partition(f"train.py:{line_of(text, mark)}  ")[2].partition("\n\n")[0]
        assert f"{batches} batches in 3 epochs" in block, mark
        assert f"num_workers={workers}" in block


@pytest.mark.parametrize(
    ("workers", "command"), [(0, "run --allow-workers train.py"), (1, "run train.py")]
)
def test_what_a_loop_waits_for_is_told_with_a_step_to_take(bench, workers, command):
    line = f"train.py:{line_of(bench.write(WAITS), 'MAIN')}"
    written = ("-o", "o.json", "--json", "r.json", "--fail-if-wait", "10%")
    code, _, report = bench.command("watch", *written, "train.py", str(workers))
    assert [first.partition(" the training loop waits ")[0] for first in bench.first_lines] == [
        f"{line}:"
    ]
    assert report.startswith("watch: 2 loaders in ")
    # AND the loader with most time comes first, with what it waits for and at most gains, and a command
    (loader, other), result = told_alike(bench, report)
    assert (loader["name"], loader["bottleneck"]["kind"]) == (line, "storage")
    assert 0.6 < loader["wait_share"] < 0.95
    assert loader["bottleneck"]["gain"] == pytest.approx(
        loader["wait_share"] / (1 - loader["wait_share"])
    )
    assert f"autotune-loader {command}" in loader["advice"][0]["sentence"]
    assert "1 batch: too few to report a bottleneck" in other["bottleneck"]["sentence"]
    assert (code, "--fail-if-wait allows 10%" in report) == (4, True)
    assert (result.found_by, result.best.num_workers) == ("watch", workers)
    assert sorted(each["num_workers"] for each in result.loaders.values()) == [workers, 1]


@pytest.mark.parametrize(("verb", "workers"), [("watch", 0), ("watch", 2), ("run", 2)])
def test_an_error_of_the_dataset_ends_the_script_and_the_report_comes_all_the_same(
    bench, verb, workers
):
    bench.write(TRAIN)
    code, printed, report = bench.command(verb, "train.py", str(workers), BAD="20")
    assert (code, "train.py:" in report) == (1, True)
    assert 'raise ValueError(f"no sample {index}")' in printed
    assert printed.rstrip().splitlines()[-1].startswith("ValueError: ")


def test_autoloaders_of_the_script_are_told_of_and_of_ranks_rank_0_tells(bench):
    line = f"train.py:{line_of(bench.write(AUTO), 'AUTO')}"
    for rank, told in (("0", ["These are the loaders of rank 0 of 2."]), ("1", [])):
        _, _, report = bench.command("watch", "train.py", RANK=rank, WORLD_SIZE="2")
        assert [each for each in report.splitlines() if "rank" in each] == told
        assert (
            (f"{line}  Numbers[96], batches of 8\n  12 batches" in report)
            == bool(report)
            == (rank == "0")
        )


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
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
class Own(DataLoader):
    def _get_iterator(self):
        return _SingleProcessDataLoaderIter(self)
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


@pytest.mark.parametrize(
    ("kind", "more", "fetch_s"), [("KEPT", ["kept"], "0.004"), ("ANEW", [], "0")]
)
def test_loaders_get_workers_where_it_is_said_that_they_may_and_what_these_bring_is_measured(
    bench, kind, more, fetch_s
):
    text, script = bench.write(WAITING), ["train.py", "6", *more]
    _, plain = bench.run(*script, FETCH_S="0")
    asked = ("run", "--allow-workers", "--max-workers", "4", "-o", "o.json", "--json", "r.json")
    code, printed, report = bench.command(*asked, *script, FETCH_S=fetch_s)
    assert (code, printed) == (0, plain)
    (loader,), result = told_alike(bench, report)
    assert (loader["name"], loader["epochs"], loader["batches"]) == (
        f"train.py:{line_of(text, kind)}",
        6,
        600,
    )
    assert result.best.num_workers == loader["settings_now"]["num_workers"] <= 4
    if kind == "KEPT":  # one that is made anew knows nothing of those before it
        assert (result.best.num_workers > 0, loader["speedup"]["value"] > 1.15) == (True, True)


def test_loaders_that_ask_for_no_workers_get_none_and_the_command_that_allows_them_is_named(bench):
    bench.write(WAITING)
    _, plain = bench.run("train.py", "1", FETCH_S="0")
    for script in (["train.py", "1", "a b"], ["-m", "train", "1", "a b"]):
        printed, told = bench.told("run", *script, FETCH_S="0.002")
        (loader,) = told["loaders"]
        assert printed == plain
        assert (loader["settings_now"]["num_workers"], loader["kept"]["kind"]) == (0, "no_consent")
        assert (
            f"`autotune-loader run --allow-workers {shlex.join(script)}`"
            in loader["advice"][0]["sentence"]
        )


def test_start_with_begins_with_what_a_file_says(bench):
    bench.write(WAITING)
    found = LoaderConfig(num_workers=2, prefetch_factor=3)
    TuningResult(best=found, status="complete").save(bench.folder / "loader.json")
    _, told = bench.told("run", "--start-with", "loader.json", "train.py", "1", FETCH_S="0")
    (loader,) = told["loaders"]
    assert (loader["settings"]["num_workers"], loader["settings_now"]) == (0, found.arguments())


def test_what_cannot_be_an_autoloader_is_watched_with_the_reason(bench):
    bench.write(OWN_KINDS)
    _, plain = bench.run("train.py")
    printed, told = bench.told("run", "--allow-workers", "train.py")
    assert printed == plain
    kept = {each["contents"].partition("[")[0]: each["kept"]["kind"] for each in told["loaders"]}
    assert kept == {"Stream": "iterable", "Numbers": "own_iterator"}


def test_what_the_script_has_dropped_is_gone(bench):
    bench.write(DROPPED)
    for options in ((), ("--allow-workers",)):
        printed, told = bench.told("run", *options, "train.py")
        assert (printed, [each["batches"] for each in told["loaders"]]) == (
            "[None, None, None]\n",
            [75],
        )
