"""Scripts under `watch` and `run`: they do and draw what they do without, and are told of."""

import json
import re
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
        inner = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
        model = torch.nn.Sequential(*inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        how = {"batch_size": 4, "num_workers": workers}
        kept = DataLoader(Numbers(48), shuffle=True, persistent_workers=workers > 0, **how)  # KEPT
        for epoch in range(2):
            train(DataLoader(Numbers(16), **how), model, optimizer)  # ANEW
            train(kept, model, optimizer)
            train(DataLoader(Stream(), **how), model, optimizer)  # STREAM
        print([value.hex() for each in model.parameters() for value in each.flatten().tolist()])
        print(random.random(), np.random.rand(), torch.rand(1).item())
    """
WAITS = """
    import multiprocessing
    if __name__ == "__main__":
        multiprocessing.set_start_method("fork")  # the start of its workers takes no time
        os.chdir("/")
        for x in DataLoader(Waiting(480), batch_size=8, num_workers=int(sys.argv[1])):  # MAIN
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
    def work(*_):
        for x in DataLoader(Waiting(80), batch_size=8):  # CHILD
            pass
    if __name__ == "__main__":
        if sys.argv[1] == "pool":
            with mp.get_context("fork").Pool(2) as pool:
                pool.map(work, range(2), chunksize=1)
        elif sys.argv[1] == "script":
            subprocess.run([sys.executable, "train.py", "work"], check=True)
        elif sys.argv[1] == "work":
            work()
        else:
            both = [mp.get_context("fork").Process(target=work) for _ in range(2)]
            [each.start() for each in both]
            [each.join() for each in both]
    """
ENDED = """
    import signal
    sys.stdout.reconfigure(line_buffering=False, write_through=False)
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
    def told_amid(*told, **how):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        say(*told, **how)
    report.say = told_amid
    if __name__ == "__main__":
        list(DataLoader(Numbers(), batch_size=8))
    """
FORKED = """
    from autotune_loader import AutoLoader
    if __name__ == "__main__":
        weight = torch.ones(1, device="sim")
        loader = {"DataLoader": DataLoader, "AutoLoader": AutoLoader}[sys.argv[1]](
            Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork"
        )
        assert len(list(loader)) == 12
        print(getattr(loader, "report", str)())
    """
SHARDS = """
    class Shards(IterableDataset):
        def __iter__(self):
            return iter(range(200 if get_worker_info().id < 3 else 0))
    if __name__ == "__main__":
        list(DataLoader(Shards(), batch_size=8, num_workers=4))
    """
FOUND = """
    import signal
    if __name__ == "__main__":
        loader, until = DataLoader(Waiting(800), batch_size=8, shuffle=True), time.time() + 40
        while time.time() < until:
            for x in loader:
                if os.path.exists("o.json"):
                    os.kill(os.getpid(), int(sys.argv[1]))
    """
WAITING = """
    if __name__ == "__main__":
        torch.manual_seed(0)
        print(torch.cat(list(DataLoader(Waiting(240), batch_size=8, shuffle=True))).tolist())
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
STATEFUL = """
    import warnings
    warnings.simplefilter("ignore")  # torchdata imports all of torch
    from torchdata.stateful_dataloader import StatefulDataLoader
    if __name__ == "__main__":
        torch.manual_seed(0)
        state = None
        for first in (0, 5):
            loader = StatefulDataLoader(Waiting(96), batch_size=8, shuffle=True, num_workers=2)
            loader.load_state_dict(state) if first else None
            for n, x in enumerate(loader, first):
                print(n, x.tolist())
                state = loader.state_dict() if n == 4 else state
    """
DROPPED = """
    import gc, weakref
    class Trainer:
        def __init__(self):
            data = Numbers(200)
            self.loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=self.collate)
        def collate(self, samples):
            return torch.stack(samples)
    def trial():
        trainer = Trainer()
        assert len(list(trainer.loader)) == 25
        return weakref.ref(trainer)
    if __name__ == "__main__":
        print([(trial(), gc.collect())[0]() for _ in range(3)])
    """


TRACED = """
    import multiprocessing
    def work(rank):
        for n, x in enumerate(DataLoader(Waiting(80), batch_size=8, num_workers=2)):  # CHILD
            if n == 4:
                list(DataLoader(Numbers(8), batch_size=4))
                torch.save(x, "x.pt")
    if __name__ == "__main__":
        if sys.argv[1] == "here":
            work(0)
        else:
            process = multiprocessing.get_context("fork").Process(target=work, args=(0,))
            process.start()
            process.join()
    """


ENDS_AT_ONCE = """
    if __name__ == "__main__":
        list(DataLoader(Waiting(40), batch_size=8))
        os._exit(3)
    """
LATE = """
    import gc
    class Late(Exception):
        pass
    def raises(*_):
        raise Late
    if __name__ == "__main__":
        next(iter(DataLoader(Numbers(8))))
        held = [[number] for number in range(1_000_000)]
        signal.signal(signal.SIGALRM, raises)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            for _ in range(100):
                gc.collect()
        except Late:
            print("came")
    """
STACKS = """
    import faulthandler
    faulthandler.register(signal.SIGTERM, chain=sys.argv[1] == "chain")
    if __name__ == "__main__":
        for n, x in enumerate(DataLoader(Waiting(240), batch_size=8)):
            if n == 20:
                os.kill(os.getpid(), signal.SIGTERM)
        print("went on")
    """


def loaders_in(path):
    return json.loads(path.read_text())["loaders"]


@pytest.mark.parametrize(("how", "processes"), [("fork", 2), ("pool", 2), ("script", 1)])
def test_the_command_tells_what_its_processes_saw(bench, how, processes):
    line, temporary = f"train.py:{line_of(bench.write(CHILDREN), 'CHILD')}", bench.folder / "tmp"
    temporary.mkdir()
    asked = ("watch", "-o", "loader.json", "--json", "report.json", "--fail-if-wait", "10%")
    ended = bench.command(*asked, "train.py", how, TMPDIR=str(temporary))
    assert ended.code == 4
    assert ended.printed == ""
    assert ended.report.count("batches of 8") == 1
    assert "--fail-if-wait allows 10%" in ended.report
    (loader,) = loaders_in(bench.folder / "report.json")
    assert (loader["name"], loader["batches"], loader["processes"]) == (line, 10, processes)
    assert TuningResult.load(bench.folder / "loader.json").loaders == {line: loader["settings"]}
    assert [path.name for path in temporary.iterdir() if path.name.startswith("autotune")] == []


@pytest.mark.parametrize("where", ["here", "process"])
def test_a_trace_shows_each_batch_of_its_loops(bench, where):
    line = f"train.py:{line_of(bench.write(TRACED), 'CHILD')}"
    ended = bench.command("watch", "--trace", "trace.json", "--json", "r.json", "train.py", where)
    assert ended.code == 0
    assert "\nWritten to " in ended.report
    events = json.loads((bench.folder / "trace.json").read_text())["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert line in names.values()
    main = [each for each in events if names[each["pid"]] == line and each["ph"] == "X"]
    seen = {
        name: sum(each["name"] == name for each in main) for name in {each["name"] for each in main}
    }
    assert {name: seen.get(name) for name in ("wait", "step", "fetch", "collate")} == {
        "wait": 10, "step": 10, "fetch": 10, "collate": 10
    }  # fmt: skip
    assert {name for name in seen if name not in ("wait", "step", "fetch", "collate")} == {
        "epoch 1", "evaluation", "checkpoint"
    }  # fmt: skip
    # AND the report has no trace, and tells the same seconds apart
    report = json.loads((bench.folder / "r.json").read_text())
    assert "traces" not in report
    (loader,) = [each for each in report["loaders"] if each["name"] == line]
    assert loader["time"]["evaluation"] > 0
    assert loader["time"]["checkpoints"] > 0


def test_reports_have_one_schema(bench):
    """Of each verb, with and without workers: the same keys, whatever there is to tell."""
    bench.write(WAITS)
    schemas = []
    for verb, workers in (("watch", "0"), ("watch", "2"), ("run", "2")):
        _, told = bench.told(verb, "train.py", workers, FETCH_S="0.001")
        assert told["schema_version"] == 1
        for loader in told["loaders"]:
            schemas.append([[*told], [*loader], [*loader["time"]]])
            wall, *parts = loader["time"].values()
            assert sum(parts) == pytest.approx(wall)
    assert schemas == [schemas[0]] * 6


@pytest.mark.parametrize(
    ("verb", "arguments", "code", "printed"),
    [
        # As Python, which prints no more after it.
        pytest.param("watch", "0", -signal.SIGTERM, "True\n", marks=pytest.mark.system),
        ("watch", "2", -signal.SIGTERM, "True\n"),
        ("run", "2", -signal.SIGTERM, "True\n"),
        ("watch", "0 own", 7, "False\nheld back\n"),
        ("watch", "2 kill", -signal.SIGKILL, "True\n"),
        pytest.param("run", "2 kill", -signal.SIGKILL, "True\n", marks=pytest.mark.system),
    ],
)
def test_a_signal_ends_a_script_as_without_us(bench, verb, arguments, code, printed):
    bench.write(ENDED)
    asked = (verb, "-o", "o.json", "--json", "r.json", "train.py", *arguments.split())
    ended = bench.command(*asked, FETCH_S="0.001")
    assert ended.code == code
    assert ended.printed == printed
    # AND what was seen is told, where a process can tell anything
    if code == -signal.SIGKILL:
        assert ended.report == ""
        return
    (loader,) = loaders_in(bench.folder / "r.json")
    assert loader["batches"] == 31
    assert "31 batches" in ended.report
    assert TuningResult.load(bench.folder / "o.json").best.num_workers == int(arguments[0])


def test_what_os_exit_ends_is_told(bench):
    bench.write(ENDS_AT_ONCE)
    ended = bench.command("watch", "-o", "o.json", "--json", "r.json", "train.py")
    assert ended.code == 3
    assert "5 batches" in ended.report
    assert [each["batches"] for each in loaders_in(bench.folder / "r.json")] == [5]
    assert TuningResult.load(bench.folder / "o.json").status == "partial"


def test_what_handlers_raise_amid_collections_comes(bench):
    """It is not lost in a callback of the collector."""
    bench.write(LATE)
    ended = bench.command("watch", "train.py")
    assert ended.printed == "came\n"


@pytest.mark.parametrize(
    ("how", "code", "printed"), [("chain", -signal.SIGTERM, ""), ("alone", 0, "went on\n")]
)
def test_handlers_of_faulthandler_stay(how, code, printed, bench):
    bench.write(STACKS)
    ended = bench.command("watch", "train.py", how, FETCH_S="0")
    assert ended.code == code
    assert ended.printed.endswith(printed)
    assert "most recent call first" in ended.printed
    assert ("30 batches" in ended.report) == (how == "alone")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_run_writes_what_it_finds_in_mid_run(bench, number):
    # GIVEN a script that is ended as soon as the file is there
    bench.write(FOUND)
    asked = ("run", "--allow-workers", "--max-workers", "4", "-o", "o.json", "--json", "r.json")
    ended = bench.command(*asked, "train.py", str(int(number)), FETCH_S="0.006")
    # THEN it has what was found, and so has the report, where there is one
    assert ended.code == -number
    result = TuningResult.load(bench.folder / "o.json")
    assert 0 < result.best.num_workers <= 4
    assert result.best.to_kwargs() in result.loaders.values()
    if number == signal.SIGTERM:
        (loader,) = told_alike(bench, ended.report)
        assert loader["settings"]["num_workers"] == 0


def test_sigterm_waits_until_the_report_is_told(bench):
    bench.write(AMID)
    ended = bench.command("watch", "train.py")
    assert ended.code == -signal.SIGTERM
    assert ended.report.count("12 batches") == 1


def test_workers_without_a_shard_are_told(bench):
    bench.write(SHARDS)
    _, found = bench.told("watch", "train.py")
    (loader,) = found["loaders"]
    assert loader["delivered"] == [25, 25, 25, 0]
    assert loader["idle_workers"]["sentence"] == "1 of 4 workers delivered no batch."
    assert "spread_shards" in [each["kind"] for each in loader["advice"]]


@pytest.mark.parametrize(
    ("kind", "advised"), [("DataLoader", "forkserver_by_autoloader"), ("AutoLoader", "forkserver")]
)
def test_a_fork_with_an_accelerator_is_told(kind, advised, bench, simulated):
    bench.python = simulated
    bench.write(FORKED)
    printed, found = bench.told("watch", "train.py", kind)
    (loader,) = found["loaders"]
    (advice,) = (each for each in loader["advice"] if "fork" in each["kind"])
    assert advice["kind"] == advised
    assert "initialized SIM: they may crash" in advice["sentence"]
    assert ("initialized SIM" in " ".join(printed.split())) == (kind == "AutoLoader")


def told_alike(bench, report):
    """The loaders in `r.json`, of which `o.json` and the terminal say the same."""
    loaders, block = loaders_in(bench.folder / "r.json"), " ".join(report.split())
    result, loader = TuningResult.load(bench.folder / "o.json"), loaders[0]
    assert result.bottleneck.sentence == loader["bottleneck"]["sentence"]
    assert result.bottleneck.sentence in block
    assert [*map(str, result.advice)] == [each["sentence"] for each in loader["advice"]]
    assert result.best.to_kwargs() == loader["settings_now"] == result.loaders[loader["name"]]
    assert result.wait_share == pytest.approx(loader["wait_share"])
    assert f"waits for data {loader['wait_share'] * 100:.0f}% of the time" in block
    return loaders


@pytest.mark.parametrize("workers", [0, 2])
def test_watch_changes_no_bit(bench, workers):
    text = bench.write(TRAIN)
    _, plain = bench.run("train.py", str(workers))
    ended = bench.command("watch", "train.py", str(workers))
    assert ended.code == 0
    assert ended.printed == plain
    for mark, batches in (("KEPT", 24), ("ANEW", 8), ("STREAM", 20)):
        block = ended.report.partition(f"train.py:{line_of(text, mark)}  ")[2].partition("\n\n")[0]
        assert f"{batches} batches in 2 epochs" in block, mark
        assert f"num_workers={workers}" in block


@pytest.mark.parametrize(
    ("workers", "command"), [(0, "run --allow-workers train.py"), (1, "run train.py")]
)
def test_a_loop_that_waits_gets_a_next_step(bench, workers, command):
    line = f"train.py:{line_of(bench.write(WAITS), 'MAIN')}"
    written = ("-o", "o.json", "--json", "r.json", "--fail-if-wait", "10%")
    ended = bench.command("watch", *written, "train.py", str(workers))
    (first,) = bench.first_lines
    assert first.startswith(f"{line}: the training loop waits ")
    assert ended.report.startswith("watch: 2 loaders in ")
    # AND the loader with most time comes first, with what it waits for and what that costs
    loader, other = told_alike(bench, ended.report)
    assert (loader["name"], loader["bottleneck"]["kind"]) == (line, "storage")
    wait = loader["wait_share"]
    assert 0.5 < wait < 1
    assert loader["bottleneck"]["gain"] == pytest.approx(wait / (1 - wait))
    assert f"autotune-loader {command}" in loader["advice"][0]["sentence"]
    assert other["bottleneck"]["kind"] == "too_short"
    assert ended.code == 4
    result = TuningResult.load(bench.folder / "o.json")
    assert (result.found_by, result.best.num_workers) == ("watch", workers)
    assert sorted(each["num_workers"] for each in result.loaders.values()) == [workers, 1]


@pytest.mark.parametrize("verb", ["watch", "run"])
def test_a_dataset_error_comes_after_the_report(bench, verb):
    bench.write(TRAIN)
    ended = bench.command(verb, "-o", "o.json", "train.py", "2", BAD="20")
    assert ended.code == 1
    assert 'raise ValueError(f"no sample {index}")' in ended.printed
    assert ended.printed.rstrip().splitlines()[-1].startswith("ValueError: ")
    assert "train.py:" in ended.report
    assert TuningResult.load(bench.folder / "o.json").best.num_workers == 2


def test_of_ranks_rank_0_tells(bench):
    block = f"train.py:{line_of(bench.write(AUTO), 'AUTO')}  Numbers[96], batches of 8\n"
    first, second = (
        bench.command("watch", "train.py", RANK=rank, WORLD_SIZE="2").report for rank in "01"
    )
    assert block in first  # also an AutoLoader's
    assert "\n  12 batches, " in first
    assert first.endswith("\nThese are the loaders of rank 0 of 2.\n")
    assert second == ""


def test_loaders_without_workers_get_none_unasked(bench):
    bench.write(WAITING)
    _, plain = bench.run("train.py", FETCH_S="0")
    for script in (["train.py", "a b"], ["-m", "train", "a b"]):
        printed, told = bench.told("run", *script, FETCH_S="0.002")
        (loader,) = told["loaders"]
        assert printed == plain
        assert loader["settings_now"]["num_workers"] == 0
        assert loader["kept"]["kind"] == "no_consent"
        # AND the command that allows them is named
        named = f"`autotune-loader run --allow-workers {shlex.join(script)}`"
        assert named in loader["advice"][0]["sentence"]


def test_start_with_begins_with_what_a_file_says(bench):
    bench.write(WAITING)
    _, plain = bench.run("train.py", FETCH_S="0")
    found = LoaderConfig(num_workers=2, prefetch_factor=3)
    TuningResult(best=found, status="complete").save(bench.folder / "loader.json")
    printed, told = bench.told("run", "--start-with", "loader.json", "train.py", FETCH_S="0")
    (loader,) = told["loaders"]
    assert printed == plain
    assert loader["settings"]["num_workers"] == 0
    assert loader["settings_now"] == found.to_kwargs()


@pytest.mark.parametrize(
    ("script", "kept"),
    [
        (OWN_KINDS, {"Stream": "iterable", "Numbers": "own_iterator"}),
        (STATEFUL, {"Waiting": "own_iterator"}),  # its state, and where it goes on, are its own
    ],
    ids=["own kinds", "StatefulDataLoader"],
)
def test_what_cannot_be_tuned_has_a_reason(bench, script, kept):
    if script is STATEFUL:
        pytest.importorskip("torchdata")
    bench.write(script)
    code, plain = bench.run("train.py")
    assert code == 0, plain
    printed, told = bench.told("run", "--allow-workers", "train.py")
    assert printed == plain
    loaders = {re.split(r"[\[,]", each["contents"])[0]: each["kept"] for each in told["loaders"]}
    assert {name: each["kind"] for name, each in loaders.items()} == kept


@pytest.mark.parametrize("options", [(), ("--allow-workers",)])
def test_what_the_script_has_dropped_is_gone(bench, options):
    bench.write(DROPPED)
    printed, told = bench.told("run", *options, "train.py", FETCH_S="0")
    assert printed == "[None, None, None]\n"
    assert [each["batches"] for each in told["loaders"]] == [75]
