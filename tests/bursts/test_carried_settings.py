"""What a script has set in its process: bursts run with it, the result lists it, and nothing of it
is changed here."""

import re
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

from autotune_loader.bursts import settings
from autotune_loader.bursts.settings import (
    MOST_BYTES,
    MOST_ITEMS,
    Settings,
    read_entries,
    read_torch,
    read_values,
    set_torch,
)
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values import WorkloadError
from tests.support.bursts import ALONE, ONE_WORKER, run, workload


@pytest.fixture(autouse=True)
def as_it_was():
    before = read_torch()
    yield
    set_torch(before)
    assert read_torch() == before


SETTINGS = {
    "float32_matmul_precision": "high", "deterministic_debug_mode": 1,
    "default_dtype": torch.float64, "default_device": torch.device("meta"),
    "sharing_strategy": "file_system", "cudnn.benchmark": True, "cudnn.allow_tf32": False,
    "grad_mode": False, "cv2.threads": 0, "detect_anomaly": True, "autocast_cache": False,
    "autocast.cpu": torch.float16, "autocast.cuda": torch.bfloat16,
    "cuda.flash_sdp_enabled": False, "cuda.matmul.allow_bf16_reduced_precision_reduction": False,
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SETTINGS.items(), ids=SETTINGS)
def test_each_setting_is_read_set_and_listed(name, value, monkeypatch):
    class OpenCV:
        threads = 8

        def getNumThreads(self):  # noqa: N802
            return self.threads

        def setNumThreads(self, count):  # noqa: N802
            self.threads = count

    monkeypatch.setitem(sys.modules, "cv2", OpenCV())
    assert set_torch(read_torch()) == []
    assert set_torch({name: value}) == [f"{name}={value}"]
    assert read_torch()[name] == value


MODULE = """
from collections import OrderedDict
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

class AttrDict(dict):
    __setattr__ = dict.__setitem__
    def __getattr__(self, name):
        if name not in self: raise AttributeError(name)  # Python 3.10 pickles it only then
        return self[name]

class Frozen(dict):
    def __setitem__(self, key, value):
        if hasattr(self, "frozen"): raise AttributeError("frozen")
        super().__setitem__(key, value)

class Config:
    SIZE = 1
    class Inner: SIZE = 1

@dataclass(slots=True)
class Slots:
    SIZE: int = 1

class Holding:
    def __init__(self): self.SIZE, self.names = 1, {"a", "b", "c"}

attributes, frozen, space = AttrDict(SIZE=1), Frozen(SIZE=1), SimpleNamespace(SIZE=1)
frozen.frozen = True
slots, held, ordered, random = Slots(), Holding(), OrderedDict(SIZE=1), Random(1)
nested, registry = {"inner": SimpleNamespace(SIZE=1)}, {}
functions = {"one": lambda: limit}

ROOT, limit, names, table, _private = "/default", 10, ["a"], {"x": 1}, 0
class Rows:
    def __len__(self): return 8
    def __getitem__(self, index):
        import sys, torch
        if limit == 10: return torch.zeros(2)
        raise RuntimeError(f"seen: {ROOT} {limit} {names} {sorted(table.items())} {_private} "
                           f"{sys.argv[1:]} {torch.get_float32_matmul_precision()}")

def kept(objects=(attributes, frozen, space, held, ordered)): return objects
class Seen(Rows):
    def __getitem__(self, index):
        sizes = attributes.SIZE, frozen["SIZE"], space.SIZE, held.SIZE, ordered["SIZE"], slots.SIZE
        inner = nested["inner"].SIZE, Config.SIZE, Config.Inner.SIZE, registry["mine"](2)
        now = attributes, frozen, space, held, ordered
        is_in_place = all(one is other for one, other in zip(now, kept(), strict=True))
        raise RuntimeError(f"{sizes} {inner} {random.random()} {is_in_place}")

class Growing(Rows):
    def __getitem__(self, index):
        import torch
        most = globals().setdefault("__most", [len(names)])
        if len(names) < most[0]: raise RuntimeError("what a batch has changed was set once more")
        names.append("b")
        most[0] = len(names)
        return torch.zeros(2)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's that is on the path of this process only, and its dataset."""
    (tmp_path / "settings_of_a_job.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    # Modules of other tests in this process may have been changed, too.
    ours = "settings_of_a_job", "__main__"
    monkeypatch.setattr(settings, "is_users", lambda name: name in ours)
    import settings_of_a_job

    yield settings_of_a_job
    del sys.modules["settings_of_a_job"]


@pytest.fixture
def lock():
    """What cannot be pickled."""
    return threading.Lock()


def told_of(name, job):
    """What notes say of something; others of the tests may have random values of their own."""
    return [note for note in run(job)[0].notes if name in note]


def with_step(module, step, **side):
    return workload(module.Rows(), training=TrainingSide(train_step=step, **side))


def script_of(code, **names):
    """What code has defined in a script's own module, which no other process has."""
    script = {"__name__": "__main__", **names}
    exec(code, script)
    return SimpleNamespace(**script)


WITH, WITHOUT = "The trials run with {}", "The trials run without {}"


@pytest.mark.process
def test_values_of_modules_arrive_and_are_listed(module, monkeypatch):
    module.ROOT = "/data"
    (note,) = told_of("settings_of_a_job", workload(module.Rows()))
    values = "values that this process set in modules: settings_of_a_job.ROOT='/data'"
    assert note.startswith(WITH.format(values))
    # AND arguments of the script, and settings of torch
    monkeypatch.setattr(sys, "argv", ["train.py", "--patch", "32"])
    set_torch({"float32_matmul_precision": "high"})
    vars(module).update(limit=3, _private=7, names=["a", "b"], table={"x": 1, "y": 2})
    seen = "seen: /data 3 ['a', 'b'] [('x', 1), ('y', 2)] 7 ['--patch', '32'] high"
    with pytest.raises(WorkloadError, match=re.escape(seen)):
        run(workload(module.Rows(), multiprocessing_context="fork"))  # others import it anew


@pytest.mark.process
def test_objects_and_classes_are_changed_in_place(module, lock):
    # GIVEN no change THEN none is told of
    assert told_of("settings_of_a_job", workload(module.Rows())) == []
    changed = module.attributes, module.space, module.held, module.slots, module.Config
    for each in (*changed, module.nested["inner"]):
        each.SIZE = 2
    dict.update(module.frozen, SIZE=2)
    module.ordered["SIZE"], module.Config.Inner.SIZE = 2, 3
    module.registry["mine"] = lambda size: size * 2
    module.random.seed(5)
    drawn = module.random.random()
    module.random.seed(5)
    seen = f"{(2,) * 6} {(2, 2, 3, 4)} {drawn} True"
    with pytest.raises(WorkloadError, match=re.escape(seen)):
        run(workload(module.Seen()))
    # THEN those that are replaced are told of, too, and what cannot be known is
    module.space, module.attributes.lock, module.limit = SimpleNamespace(SIZE=9), lock, 10
    with_values, without = told_of("settings_of_a_job", workload(module.Rows()))
    assert "settings_of_a_job.space" in with_values
    not_sent = "what this process may have set in: settings_of_a_job.attributes."
    assert without == WITHOUT.format(not_sent)


def test_a_fresh_module_is_made_alike(module, lock):
    def told(*names):
        return ", ".join(f"settings_of_a_job.{name}" for name in names)

    vars(module).update(ROOT="s3://data", limit=3, names=["a", "b"], table={"x": 1, "y": 2})
    for each in (module.space, module.held, module.slots):
        each.SIZE = 2
    del module.held.names
    dict.update(module.frozen, SIZE=2)
    module.ordered["SIZE"], module.Config.Inner.SIZE, module.attributes.lock = 2, 3, lock
    script = script_of("def rows(self): return 12\ndef locked(self): return lock", lock=lock)
    module.Rows.__len__, module.Rows.locked = script.rows, script.locked
    read = Settings.read(workload(module.Rows()))
    del sys.modules["settings_of_a_job"]
    import settings_of_a_job as fresh

    names, table = fresh.names, fresh.table
    values, without, put, not_put = read.set_modules()
    plain = "ROOT='s3://data'", "limit=3", "names=['a', 'b']", "table={'x': 1, 'y': 2}"
    first = told(*plain, "Config.Inner.SIZE=3", "frozen")
    assert values == WITH.format(f"values that this process set in modules: {first} and 4 more.")
    not_known = f"what this process may have set in: {told('attributes')}."
    assert without == WITHOUT.format(not_known)
    replaced = "functions that this process replaced: {}."
    assert put == WITH.format(replaced.format(told("Rows.__len__")))
    assert not_put == WITHOUT.format(replaced.format(told("Rows.locked")))
    # THEN what others may have imported has changed
    assert names == fresh.names == ["a", "b"]
    assert table == fresh.table == {"x": 1, "y": 2}
    _, frozen, space, held, ordered = fresh.kept()
    assert frozen["SIZE"] == ordered["SIZE"] == space.SIZE == fresh.slots.SIZE == 2
    assert vars(held) == {"SIZE": 2}
    assert fresh.Config.Inner.SIZE == 3
    assert len(fresh.Rows()) == 12
    # AND nothing is set twice, nor in what shall stay
    assert read.set_modules() == [without, put, not_put]
    fresh.limit = 10
    assert read.set_modules(but=["settings_of_a_job"]) == []
    assert fresh.limit == 10


def carried(module):
    """Names of the objects of a module that would travel, and whether they can."""
    found = Settings.read(workload(module.Rows())).objects
    return {key: bool(data) for places, data in found for _, key in places}


def test_what_is_large_or_cannot_travel_stays(module, monkeypatch, lock):
    class Raising:
        __file__ = "/home/me/lazy.py"

        def __getattribute__(self, name):
            raise RuntimeError(name)

    monkeypatch.setitem(sys.modules, "lazy_module", Raising())
    module.lazy, module.lock, module.big = Raising(), lock, [torch.zeros(MOST_BYTES)]
    module.table, module.file, module.held.lock = {"lock": lock}, sys.stdout, lock
    module.space.lock = module.attributes.lock = lock  # of these it is told, as they are settings
    travel = ("frozen", "slots", "ordered", "random", "nested", "functions")
    assert carried(module) == dict.fromkeys(travel, True) | {"space": False, "attributes": False}


class Client:
    """Gives away what it has when it is pickled, as the usual wrapper of LMDB does."""

    connection = "open"

    def __getstate__(self):
        self.connection = None
        return vars(self)


def test_live_objects_are_neither_pickled_nor_changed(module, tmp_path):
    (tmp_path / "lines").write_text("one")
    client, rows = Client(), iter(range(9))
    with (tmp_path / "lines").open() as lines:
        objects = {"client": client, "lines": lines, "rows": rows, "inner": [client]}
        vars(module).update(objects)
        assert not carried(module).keys() & {*objects}
        assert lines.tell() == 0
    assert next(rows) == 0
    assert client.connection == "open"


LIBRARY = """
registry = {}
class Registry:
    def __init__(self): self._entries = {}
MODELS = Registry()
def checked(model=None, batch=None):
    if set(registry) | set(MODELS._entries) != {"rows", "pair", "kind"}:
        raise LookupError("not registered")
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """One with registries."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_registry.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    import a_registry

    yield a_registry
    del sys.modules["a_registry"]


def test_what_is_registered_with_a_library_is_found(module, library):
    script = script_of("def rows(): return 12\nclass Kind: pass")
    own = {"rows": script.rows, "pair": (script.rows, None), "kind": script.Kind}
    library.registry.update(own, built_in=len, pairs=(len, 1), none=None)
    library.MODELS._entries.update(dict.fromkeys(range(MOST_ITEMS - 1)), kind=script.Kind)
    places = {(place, key) for place, key, _ in read_entries() if place.startswith("a_registry")}
    registry = {("a_registry:registry", key) for key in own}
    assert places == registry | {("a_registry:MODELS._entries", "kind")}
    # AND a larger table is left alone
    library.MODELS._entries["one more"] = script.Kind
    assert {place for place, *_ in read_entries() if place.startswith("a_")} == {
        "a_registry:registry"
    }


@pytest.mark.process
def test_what_is_registered_with_a_library_arrives(module, library, lock):
    code = "def rows(): return 12\nclass Kind: pass\ndef locked(): return lock"
    script = script_of(code, lock=lock)
    library.registry.update(rows=script.rows, pair=(script.rows, None))
    library.MODELS._entries["kind"] = script.Kind

    def step(model, batch):
        import a_registry

        a_registry.checked()

    (note,) = told_of("registered", with_step(module, step))
    assert note.startswith(WITH.format("functions that this process registered: a_registry."))

    # WHEN one cannot be carried, and a fork fails in its way, THEN the failure says so
    def fail(model, batch):
        step(model, batch)
        raise LookupError("in a fork")

    library.MODELS._entries["kind"] = script.locked
    lacks = "without functions that this process registered"
    says = rf"not registered.*{lacks}: .*'kind'.*in a fresh process"
    with pytest.raises(WorkloadError, match=says):
        run(with_step(module, fail))


@pytest.mark.process
def test_what_batches_change_stays(module):
    """Though the step is made after them."""
    step = TrainingSide(train_step=lambda model, batch: None)
    run(workload(module.Growing(), training=step), ALONE, ALONE)


@pytest.mark.process
@pytest.mark.parametrize(("put", "said"), [("rows", WITH), ("locked", WITHOUT)])
def test_functions_in_place_of_others_are_told(put, said, module, monkeypatch, lock):
    code = "def rows(self): return 12\ndef locked(self): return lock and 13"
    function = vars(script_of(code, lock=lock))[put]
    monkeypatch.setattr(module.Rows, "__len__", function)
    monkeypatch.setattr(torch.nn.Linear, "extra_repr", function)
    job = with_step(module, lambda model, batch: model(batch).sum(), model=torch.nn.Linear(2, 2))
    (note,) = told_of("functions that", job)
    assert note.startswith(said.format("functions that this process replaced: "))
    assert "settings_of_a_job.Rows.__len__" in note
    assert "torch.nn.modules.linear.Linear.extra_repr" in note


class Held(list):
    """Rows, and what cannot be pickled."""


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_forked", [False, True])
def test_steps_run_in_the_autocast_of_this_process(is_forked, lock):
    def step(model, batch):
        assert model(batch).dtype is torch.bfloat16
        return model(batch).sum()

    rows = Held([torch.ones(4)] * 64)
    rows.lock = lock if is_forked else None
    own = TrainingSide(model=torch.nn.Linear(4, 4), train_step=step)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        probe, _ = run(workload(rows, training=own), ALONE)
    assert ("autocast.cpu=torch.bfloat16" in " ".join(probe.notes)) is not is_forked


def test_of_libraries_only_constants_are_carried(module, monkeypatch, lock):
    library = ModuleType("a_library")
    names = {"LOAD_TRUNCATED_IMAGES": True, "cache": {}, "_LIMIT": 1, "LOCK": lock}
    vars(library).update(__file__="/usr/lib/site-packages/a_library.py", **names)
    monkeypatch.setitem(sys.modules, "a_library", library)
    module.huge, module.nan, module.made = list(range(200_000)), float("nan"), [object()]
    found = read_values()
    assert found["a_library"] == {"LOAD_TRUNCATED_IMAGES": True}
    # AND of all modules only plain values
    assert found["settings_of_a_job:Config"] == {"SIZE": 1}
    plain = {"ROOT", "limit", "names", "table", "_private", "registry"}
    assert set(found["settings_of_a_job"]) == plain
    assert not found.keys() & {"json", "torch", "numpy", "autotune_loader.bursts.settings"}


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_what_a_fresh_process_lacks_runs_forked(module, lock):
    module.run = SimpleNamespace(rows=[], lock=lock)

    def step(model, batch):
        import settings_of_a_job

        settings_of_a_job.run.rows.append(1)

    probe, _ = run(with_step(module, step), ALONE, ONE_WORKER)
    # THEN it works there, that is said, and the run has the rows that it had
    said = "in forks of this process.*has no attribute 'run'"
    assert re.search(said, " ".join(probe.notes))
    assert module.run.rows == []


def test_a_module_without_use_stays_out(module, tmp_path, monkeypatch):
    # GIVEN a module of the script's with an object whose pickle imports it
    code = "class Config: pass\nconfig, LIMIT = {'a': Config()}, 1\n"
    (tmp_path / "unused_by_a_job.py").write_text(code)
    monkeypatch.setattr(settings, "is_users", lambda name: name == "unused_by_a_job")
    import unused_by_a_job

    unused_by_a_job.config["b"] = unused_by_a_job.Config()
    read = Settings.read(workload(module.Rows()))
    assert any(("unused_by_a_job", "config") in places for places, _ in read.objects)
    monkeypatch.delitem(sys.modules, "unused_by_a_job")
    assert read.set_modules() == []
    assert "unused_by_a_job" not in sys.modules
