"""What a script has set in its process: bursts run with it, the result lists it, and nothing of it is changed here."""

import re
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

from autotune_loader.bursts import settings
from autotune_loader.bursts.settings import (
    MOST_BYTES,
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
    "float32_matmul_precision": "high", "deterministic_debug_mode": 1, "default_dtype": torch.float64,
    "default_device": torch.device("meta"), "sharing_strategy": "file_system", "cudnn.benchmark": True,
    "cudnn.allow_tf32": False, "grad_mode": False, "cv2.threads": 0, "detect_anomaly": True, "autocast_cache": False,
    "autocast.cpu": torch.float16, "autocast.cuda": torch.bfloat16, "cuda.flash_sdp_enabled": False,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": False,
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SETTINGS.items(), ids=SETTINGS)
def test_each_setting_of_torch_and_opencv_is_read_set_and_listed(name, value, monkeypatch):
    threads = [8]
    cv2 = SimpleNamespace(
        getNumThreads=lambda: threads[0], setNumThreads=lambda count: threads.__setitem__(0, count)
    )
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    before = read_torch()
    assert [set_torch(each) for each in (before, {name: value})] == [[], [f"{name}={value}"]]
    assert read_torch()[name] == value


class Held(list):
    """Rows, and what cannot be pickled."""


MODULE = """
from collections import OrderedDict
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

class AttrDict(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__

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

attributes, frozen, space, slots, held = AttrDict(SIZE=1), Frozen(SIZE=1), SimpleNamespace(SIZE=1), Slots(), Holding()
frozen.frozen = True
ordered, random, nested, registry = OrderedDict(SIZE=1), Random(1), {"inner": SimpleNamespace(SIZE=1)}, {}
functions = {"one": lambda: limit}

ROOT, limit, names, table, _private = "/default", 10, ["a"], {"x": 1}, 0
class Rows:
    def __len__(self): return 8
    def __getitem__(self, index):
        import sys, torch
        if limit == 10: return torch.zeros(2)
        raise RuntimeError(f"seen: {ROOT} {limit} {names} {sorted(table.items())} {_private} {sys.argv[1:]} "
                           f"{torch.get_num_threads()} {torch.get_float32_matmul_precision()}")

def kept(objects=(attributes, frozen, space, held, ordered)): return objects
class Seen(Rows):
    def __getitem__(self, index):
        inner = nested["inner"].SIZE, Config.SIZE, Config.Inner.SIZE, slots.SIZE, registry["mine"](2), random.random()
        raise RuntimeError(f"{attributes.SIZE} {frozen['SIZE']} {space.SIZE} {held.SIZE} {ordered['SIZE']} {inner} "
                           f"{all(map(lambda one, other: one is other, [attributes, frozen, space, held, ordered], kept()))}")
"""


MODULE += """
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
    monkeypatch.setattr(
        settings, "is_users", lambda name: name in ("settings_of_a_job", "__main__")
    )
    import settings_of_a_job

    yield settings_of_a_job
    del sys.modules["settings_of_a_job"]


def told_of(module, name):
    """What notes say of a module; others of the tests may have random values of their own."""
    return [note for note in run(workload(module.Rows()))[0].notes if name in note]


@pytest.mark.process
def test_a_fresh_process_has_arguments_path_and_values_of_modules_and_the_result_lists_them(
    module, monkeypatch
):
    module.ROOT = "/data"
    (note,) = told_of(module, "settings_of_a_job")
    assert note.startswith(
        "The trials run with values that this process set in modules: settings_of_a_job.ROOT='/data'"
    )
    monkeypatch.setattr(sys, "argv", ["train.py", "--patch", "32"])
    set_torch({"float32_matmul_precision": "high"})
    vars(module).update(limit=3, _private=7, names=["a", "b"], table={"x": 1, "y": 2})
    seen = f"seen: /data 3 ['a', 'b'] [('x', 1), ('y', 2)] 7 ['--patch', '32'] {torch.get_num_threads()} high"
    with pytest.raises(WorkloadError, match=re.escape(seen)):
        run(workload(module.Rows()))


@pytest.mark.process
def test_objects_of_settings_and_classes_are_changed_in_place_as_the_script_has_changed_them(
    module,
):
    # GIVEN no change THEN none is told of
    assert told_of(module, "settings_of_a_job") == []
    for each in (
        module.attributes,
        module.space,
        module.held,
        module.slots,
        module.nested["inner"],
        module.Config,
    ):
        each.SIZE = 2
    dict.update(module.frozen, SIZE=2)
    module.ordered["SIZE"], module.registry["mine"], module.Config.Inner.SIZE = (
        2,
        lambda size: size * 2,
        3,
    )
    module.random.seed(5)
    expected = module.random.random()
    module.random.seed(5)
    with pytest.raises(
        WorkloadError, match=re.escape(f"2 2 2 2 2 {(2, 2, 3, 2, 4, expected)} True")
    ):
        run(workload(module.Seen()))
    # THEN those that are replaced are told of, too, and what cannot be known is
    module.space, module.attributes.lock = SimpleNamespace(SIZE=9), threading.Lock()
    module.limit = 10
    (with_values, without) = told_of(module, "settings_of_a_job")
    assert "settings_of_a_job.space" in with_values
    assert (
        without
        == "The trials run without what this process may have set in: settings_of_a_job.attributes."
    )


def test_objects_that_are_large_or_hold_what_cannot_travel_are_left_out_and_nothing_raises(
    module, monkeypatch
):
    class Raising:
        __file__ = "/home/me/lazy.py"

        def __getattribute__(self, name):
            raise RuntimeError(name)

    monkeypatch.setitem(sys.modules, "lazy_module", Raising())
    module.lazy, module.lock, module.big = Raising(), threading.Lock(), [torch.zeros(MOST_BYTES)]
    module.table, module.file = {"lock": threading.Lock()}, sys.stdout
    read = Settings.read(workload(module.Rows()))
    names = {key for places, _ in read.objects for _, key in places}
    assert {"attributes", "space", "slots", "random"} <= names
    assert not names & {"lazy", "lock", "big", "table", "file"}
    assert all(data for _, data in read.objects)


class Client:
    """Gives away what it has when it is pickled, as the usual wrapper of LMDB does."""

    def __getstate__(self):
        self.connection = None
        return vars(self)


def test_live_objects_of_the_script_are_neither_pickled_nor_changed(module, tmp_path):
    (tmp_path / "lines").write_text("one")
    client = Client()
    client.connection = "open"
    with (tmp_path / "lines").open() as lines:
        objects = {
            "client": client,
            "lines": lines,
            "rows": iter(range(9)),
            "inner": SimpleNamespace(client=client),
        }
        vars(module).update(objects)
        read = Settings.read(workload(module.Rows()))
        assert (lines.tell(), next(objects["rows"])) == (0, 0)
    names = {key for places, data in read.objects for _, key in places if data}
    assert not names & {*objects}
    assert client.connection == "open"


LIBRARY = """
registry = {}
class Registry:
    def __init__(self): self._entries = {}
MODELS = Registry()
def checked():
    if set(registry) | set(MODELS._entries) != {"rows", "pair", "kind"}: raise LookupError("not registered")
"""


@pytest.mark.process
def test_what_the_script_registers_with_a_library_is_in_the_process_of_the_bursts(
    module, tmp_path, monkeypatch, request
):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_registry.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    import a_registry

    request.addfinalizer(lambda: sys.modules.pop("a_registry"))
    script = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def rows(): return 12\nclass Kind: pass\ndef locked(): return lock", script)
    a_registry.registry.update(rows=script["rows"], pair=(script["rows"], None), built_in=len)
    a_registry.MODELS._entries["kind"] = script["Kind"]
    places = {(place, key) for place, key, _ in read_entries() if place.startswith("a_registry")}
    assert places == {
        ("a_registry:registry", "rows"),
        ("a_registry:registry", "pair"),
        ("a_registry:MODELS._entries", "kind"),
    }
    del a_registry.registry["built_in"]

    def step(model, batch):
        import a_registry

        a_registry.checked()

    training = TrainingSide(train_step=step)
    (note,) = [
        each
        for each in run(workload(module.Rows(), training=training))[0].notes
        if "registered" in each
    ]
    assert note.startswith(
        "The trials run with functions that this process registered: a_registry."
    )
    # WHEN one cannot be carried, and a fork fails in its way, THEN the failure says so
    a_registry.MODELS._entries["kind"] = script["locked"]

    def fail(model, batch):
        step(model, batch)
        raise LookupError("in a fork")

    with pytest.raises(
        WorkloadError,
        match=r"not registered.*without functions that this process registered: .*'kind'.*in a fresh process",
    ):
        run(workload(module.Rows(), training=TrainingSide(train_step=fail)))


@pytest.mark.process
def test_what_batches_change_stays_though_the_step_is_made_after_them(module):
    run(
        workload(module.Growing(), training=TrainingSide(train_step=lambda model, batch: None)),
        ALONE,
        ALONE,
    )


@pytest.mark.process
def test_functions_that_the_script_has_put_in_the_place_of_others_are_carried_or_missed_in_words(
    module, monkeypatch
):
    script = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def rows(self): return 12\ndef locked(self): return lock and 13", script)
    places = "settings_of_a_job.Rows.__len__", "torch.nn.modules.linear.Linear.extra_repr"
    for put, words in (("rows", "with"), ("locked", "without")):
        monkeypatch.setattr(module.Rows, "__len__", script[put])
        monkeypatch.setattr(torch.nn.Linear, "extra_repr", script[put])
        step = TrainingSide(
            model=torch.nn.Linear(2, 2), train_step=lambda model, batch: model(batch).sum()
        )
        probe, _ = run(workload(module.Rows(), training=step))
        said = f"The trials run {words} functions that this process replaced: "
        (note,) = [each for each in probe.notes if "functions that" in each]
        assert note.startswith(said)
        assert all(place in note for place in places)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_forked", [False, True])
def test_steps_run_in_the_autocast_of_this_process(is_forked):
    def step(model, batch):
        assert model(batch).dtype is torch.bfloat16
        return model(batch).sum()

    rows = Held([torch.ones(4)] * 64)
    rows.lock = threading.Lock() if is_forked else None
    own = TrainingSide(model=torch.nn.Linear(4, 4), train_step=step)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        probe, _ = run(workload(rows, training=own), ALONE)
    assert ("autocast.cpu=torch.bfloat16" in " ".join(probe.notes)) is not is_forked


def test_of_libraries_only_constants_are_carried_and_of_all_only_plain_values(module, monkeypatch):
    library = ModuleType("a_library")
    names = {"LOAD_TRUNCATED_IMAGES": True, "cache": {}, "_LIMIT": 1, "LOCK": threading.Lock()}
    vars(library).update(__file__="/usr/lib/site-packages/a_library.py", **names)
    monkeypatch.setitem(sys.modules, "a_library", library)
    module.huge, module.nan, module.made = list(range(200_000)), float("nan"), [object()]
    found = read_values()
    assert found["a_library"] == {"LOAD_TRUNCATED_IMAGES": True}
    assert found["settings_of_a_job:Config"] == {"SIZE": 1}
    assert set(found["settings_of_a_job"]) == {
        "ROOT",
        "limit",
        "names",
        "table",
        "_private",
        "registry",
    }
    assert not found.keys() & {"json", "torch", "numpy", "autotune_loader.bursts.settings"}


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_what_a_fresh_process_lacks_is_run_in_a_fork(module):
    module.run, names = SimpleNamespace(rows=[], lock=threading.Lock()), {}
    exec(
        "def step(model, batch):\n    import settings_of_a_job\n    settings_of_a_job.run.rows.append(1)",
        names,
    )
    probe, _ = run(
        workload(module.Rows(), training=TrainingSide(train_step=names["step"])), ALONE, ONE_WORKER
    )
    # THEN it works there, that is said, and the run has the rows that it had
    assert re.search("in forks of this process.*has no attribute 'run'", " ".join(probe.notes))
    assert module.run.rows == []


def test_a_module_that_trials_do_not_use_stays_out(module, tmp_path, monkeypatch):
    # GIVEN a module of the script's with an object whose pickle imports it
    (tmp_path / "unused_by_a_job.py").write_text("class Config: pass\nconfig = {'a': Config()}\n")
    monkeypatch.setattr(settings, "is_users", lambda name: name == "unused_by_a_job")
    import unused_by_a_job

    unused_by_a_job.config["b"] = unused_by_a_job.Config()
    read = Settings.read(workload(module.Rows()))
    assert any(("unused_by_a_job", "config") in places for places, _ in read.objects)
    monkeypatch.delitem(sys.modules, "unused_by_a_job")
    assert read.set_modules() == []
    assert "unused_by_a_job" not in sys.modules
