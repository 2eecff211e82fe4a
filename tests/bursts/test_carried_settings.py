"""What a script has set in its process: bursts run with it, the result lists it, and nothing of it is changed here."""

import re
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

from autotune_loader.bursts.settings import MOST_BYTES, Settings, read_entries, read_torch, read_values, set_torch
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
    cv2 = SimpleNamespace(getNumThreads=lambda: threads[0], setNumThreads=lambda count: threads.__setitem__(0, count))
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
    def __setitem__(self, key, value): raise AttributeError("frozen")

class Config:
    SIZE = 1
    class Inner: SIZE = 1

@dataclass(slots=True)
class Slots:
    SIZE: int = 1

class Holding:
    def __init__(self): self.SIZE, self.names = 1, {"a", "b", "c"}

attributes, frozen, space, slots, held = AttrDict(SIZE=1), Frozen(SIZE=1), SimpleNamespace(SIZE=1), Slots(), Holding()
ordered, random, nested, registry = OrderedDict(SIZE=1), Random(1), {"inner": SimpleNamespace(SIZE=1)}, {}

ROOT, limit, names, table, _private = "/default", 10, ["a"], {"x": 1}, 0
class Rows:
    def __len__(self): return 8
    def __getitem__(self, index):
        import sys, torch
        if limit == 10: return torch.zeros(2)
        raise RuntimeError(f"seen: {ROOT} {limit} {names} {sorted(table.items())} {_private} {sys.argv[1:]} "
                           f"{torch.get_num_threads()} {torch.get_float32_matmul_precision()}")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's that is on the path of this process only, and its dataset."""
    (tmp_path / "settings_of_a_job.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import settings_of_a_job

    yield settings_of_a_job
    del sys.modules["settings_of_a_job"]


@pytest.mark.process
def test_a_fresh_process_has_arguments_path_and_values_of_modules_and_the_result_lists_them(module, monkeypatch):
    module.ROOT = "/data"
    listed = "The trials run with values that this process set in modules: settings_of_a_job.ROOT='/data'."
    assert [note for note in run(workload(module.Rows()))[0].notes if "process set" in note] == [listed]
    monkeypatch.setattr(sys, "argv", ["train.py", "--patch", "32"])
    set_torch({"float32_matmul_precision": "high"})
    vars(module).update(limit=3, _private=7, names=["a", "b"], table={"x": 1, "y": 2})
    seen = f"seen: /data 3 ['a', 'b'] [('x', 1), ('y', 2)] 7 ['--patch', '32'] {torch.get_num_threads()} high"
    with pytest.raises(WorkloadError, match=re.escape(seen)):
        run(workload(module.Rows()))


@pytest.mark.process
def test_functions_that_the_script_has_put_in_the_place_of_others_are_carried_or_missed_in_words(module, monkeypatch):
    script = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def rows(self): return 12\ndef locked(self): return lock and 13", script)
    places = "settings_of_a_job.Rows.__len__", "torch.nn.modules.linear.Linear.extra_repr"
    for put, words in (("rows", "with"), ("locked", "without")):
        monkeypatch.setattr(module.Rows, "__len__", script[put])
        monkeypatch.setattr(torch.nn.Linear, "extra_repr", script[put])
        step = TrainingSide(model=torch.nn.Linear(2, 2), train_step=lambda model, batch: model(batch).sum())
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
    assert set(found["settings_of_a_job"]) == {"ROOT", "limit", "names", "table", "_private"}
    assert not found.keys() & {"json", "torch", "numpy", "autotune_loader.bursts.settings"}


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_what_a_fresh_process_lacks_is_run_in_a_fork(module):
    module.run, names = SimpleNamespace(rows=[]), {}
    exec("def step(model, batch):\n    import settings_of_a_job\n    settings_of_a_job.run.rows.append(1)", names)
    probe, _ = run(workload(module.Rows(), training=TrainingSide(train_step=names["step"])), ALONE, ONE_WORKER)
    # THEN it works there, that is said, and the run has the rows that it had
    assert re.search("in forks of this process.*has no attribute 'run'", " ".join(probe.notes))
    assert module.run.rows == []
