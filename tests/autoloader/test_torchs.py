"""Private names of torch that AutoLoader and `run` stand on; a failure here names what a new torch has changed."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from autotune_loader.autoloader import torchs
from tests.support.schedules import Numbers

T = TypeVar("T")
Batch = TypeVar("Batch")
ATTRIBUTES = (
    "_auto_collation", "_base_seed", "_collate_fn", "_dataset", "_dataset_kind", "_index_queues", "_index_sampler",
    "_num_workers", "_num_yielded", "_persistent_workers", "_pin_memory", "_profile_name", "_rcvd_idx", "_sampler_iter",
    "_send_idx", "_shared_seed", "_shutdown", "_task_info", "_tasks_outstanding", "_timeout", "_worker_init_fn",
    "_worker_pids_set", "_worker_result_queue", "_workers", "_workers_done_event", "_workers_status",
)  # fmt: skip
METHODS = {
    "_next_data": (), "_next_index": (), "_shutdown_workers": (), "_try_put_index": (), "_try_get_data": ("timeout",),
    "_reset": ("loader", "first_iter"), "_mark_worker_as_unavailable": ("worker_id", "shutdown"), "_get_data": (),
}  # fmt: skip
WORKER_LOOP = (
    "index_queue",
    "data_queue",
    "worker_id",
    "num_workers",
    "collate_fn",
    "init_fn",
    "base_seed",
)
READ_OF_LOADER = (
    "_auto_collation", "_dataset_kind", "_index_sampler", "collate_fn", "dataset", "drop_last", "generator", "in_order",
    "multiprocessing_context", "num_workers", "persistent_workers", "pin_memory", "prefetch_factor", "timeout",
    "worker_init_fn",
)  # fmt: skip


@pytest.mark.process
def test_torchs_iterator_has_the_attributes_that_its_subclass_uses() -> None:
    iterator: Any = iter(DataLoader(Numbers(8), num_workers=1))
    missing = [name for name in ATTRIBUTES if not hasattr(iterator, name)]
    assert not missing, f"torch {torch.__version__} has no {missing} of its iterator"
    assert iterator._task_info == {0: (0,), 1: (0,)}
    assert [type(each) for each in (iterator._rcvd_idx, iterator._send_idx)] == [int, int]
    iterator._shutdown_workers()


@pytest.mark.parametrize("name", METHODS)
def test_torchs_methods_take_what_their_replacements_take(name: str) -> None:
    parameters = tuple(inspect.signature(getattr(torchs.WorkersIter, name)).parameters)[1:]
    assert parameters == METHODS[name], f"torch {torch.__version__}: {name}{parameters}"


def test_torchs_worker_loop_takes_what_is_replaced_by_name() -> None:
    parameters = inspect.signature(torchs.worker_loop).parameters
    missing = [name for name in WORKER_LOOP if name not in parameters]
    assert not missing, f"torch {torch.__version__}: its worker loop takes no {missing}"
    assert ("dataset" in parameters) != ("dataset_holder" in parameters)


def test_torchs_loader_has_what_its_iterators_read() -> None:
    loader = DataLoader(Numbers(8))
    assert not [name for name in READ_OF_LOADER if not hasattr(loader, name)]
    assert inspect.signature(DataLoader._get_iterator).parameters.keys() == {"self"}


def test_a_name_that_torch_has_changed_is_found_and_one_that_it_lost_is_named() -> None:
    module: Any = ModuleType("torch.utils.data._utils.worker")
    module._process_worker_loop = newer = object()
    assert torchs.named(module, "_worker_loop", "_process_worker_loop") is newer
    with pytest.raises(
        ImportError,
        match=r"has no _a and no _b in torch\.utils\.data\._utils\.worker, .* would work",
    ):
        torchs.named(module, "_a", "_b")


class OfSamples(Generic[T]):
    """DataLoader up to torch 2.14."""


class OfSamplesAndBatches(Generic[T, Batch]):
    """DataLoader after pytorch#179707."""


@pytest.mark.parametrize("loader", [DataLoader, OfSamples, OfSamplesAndBatches])
def test_a_loader_of_samples_is_one_whether_or_not_torchs_has_a_parameter_for_batches(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a torch of either kind
    monkeypatch.setattr(torchs, "DataLoader", loader)
    # WHEN a class is made of its loader
    written = "class Own(torchs.LoaderOf[T]): ...\nclass Image(Own[int]): ..."
    exec(written, made := {"torchs": torchs, "T": T, "__name__": __name__})
    # THEN it is one, has the parameter for samples, and can be derived from
    assert issubclass(made["Own"], loader)
    assert (made["Own"].__parameters__, made["Image"].__parameters__) == ((T,), ())
    assert made["Own"][str].__origin__ is made["Own"]


def test_torchs_collate_function_asks_for_shared_memory_by_the_name_that_is_replaced() -> None:
    assert "_new_shared" in inspect.getsource(torch.utils.data._utils.collate.collate_tensor_fn)
    assert callable(torch.UntypedStorage._new_shared.__func__)  # type: ignore[attr-defined]
    assert torch.equal(default_collate([torch.ones(2), torch.ones(2)]), torch.ones(2, 2))
    assert isinstance(torchs.signals._SIGCHLD_handler_set, bool)
    assert callable(torchs.signals._remove_worker_pids)
