"""Private names of torch that AutoLoader and `run` stand on: a failure names what has changed."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from autotune_loader.autoloader import births, iterator, live, torchs
from autotune_loader.autoloader.iterator import ElasticIter
from autotune_loader.autoloader.worker import OF_A_WORKER, OF_AN_EPOCH
from tests.support.schedules import Numbers

T = TypeVar("T")
Batch = TypeVar("Batch")


def attributes_of(name: str, tree: ast.AST) -> list[ast.Attribute]:
    attributes = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
    return [each for each in attributes if ast.unparse(each.value) == name]


def read_of_torchs_iterator() -> set[str]:
    """What ElasticIter reads of itself and does not set; what it declares and says nothing of."""
    (tree,) = ast.parse(inspect.getsource(ElasticIter)).body
    assert isinstance(tree, ast.ClassDef)
    own = attributes_of("self", tree)
    changed = [each.target for each in ast.walk(tree) if isinstance(each, ast.AugAssign)]
    is_set = {each.attr for each in own if isinstance(each.ctx, ast.Store) and each not in changed}
    declared = [each for each in tree.body if isinstance(each, ast.AnnAssign)]
    described = [
        one
        for one, other in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(one, ast.AnnAssign) and (one.value is not None or isinstance(other, ast.Expr))
    ]
    silent = {ast.unparse(each.target) for each in declared if each not in described}
    methods = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    named = {ast.unparse(each.target) for each in described}
    forgotten = attributes_of("iterator", ast.parse(inspect.getsource(torchs.forget_processes)))
    read = {each.attr for each in own} - is_set - methods - named
    return read | silent | {each.attr for each in forgotten}


@pytest.mark.process
def test_torchs_iterator_has_what_its_subclass_reads() -> None:
    its: Any = iter(DataLoader(Numbers(8), num_workers=1))
    names = read_of_torchs_iterator()
    assert {"_rcvd_idx", "_send_idx", "_task_info", "_num_yielded", "_worker_pids_set"} <= names
    assert not {each for each in names if not hasattr(its, each)}, f"torch {torch.__version__}"
    assert its._task_info == {0: (0,), 1: (0,)}
    its._shutdown_workers()


# `_process_data` has got a parameter.
@pytest.mark.parametrize("name", sorted({*vars(ElasticIter)} & {*dir(torchs.WorkersIter)}))
def test_torchs_methods_take_what_their_replacements_take(name: str) -> None:
    own, theirs = (getattr(each, name) for each in (ElasticIter, torchs.WorkersIter))
    if inspect.isfunction(own) and name not in ("__init__", "_shutdown_workers", "_process_data"):
        assert [*inspect.signature(own).parameters] == [*inspect.signature(theirs).parameters]


def test_torch_has_the_methods_that_are_extended() -> None:
    extended = attributes_of("super()", ast.parse(inspect.getsource(ElasticIter)))
    assert len(extended) > 5
    assert not [each.attr for each in extended if not hasattr(torchs.WorkersIter, each.attr)]


def test_torchs_worker_loop_takes_the_replaced_names() -> None:
    parameters = inspect.signature(torchs.worker_loop).parameters
    names = {*OF_A_WORKER, *OF_AN_EPOCH, "collate_fn"}
    assert not names - {*parameters}, f"torch {torch.__version__}"
    assert ("dataset" in parameters) != ("dataset_holder" in parameters)


def test_torchs_loader_has_what_is_read_of_it() -> None:
    trees = [ast.parse(inspect.getsource(each)) for each in (births, iterator, live)]
    names = {each.attr for tree in trees for each in attributes_of("loader", tree)}
    assert {"_index_sampler", "dataset"} <= names
    assert not [each for each in names if not hasattr(DataLoader(Numbers(8)), each)]
    assert inspect.signature(DataLoader._get_iterator).parameters.keys() == {"self"}


def test_a_name_that_torch_has_changed_is_found() -> None:
    module: Any = ModuleType("torch.utils.data._utils.worker")
    module._process_worker_loop = newer = object()
    assert torchs.named(module, "_worker_loop", "_process_worker_loop") is newer
    says = r"has no _a and no _b in torch\.utils\.data\._utils\.worker, .*Try another version"
    with pytest.raises(ImportError, match=says):
        torchs.named(module, "_a", "_b")


class OfSamples(Generic[T]):
    """DataLoader up to torch 2.14."""


class OfSamplesAndBatches(Generic[T, Batch]):
    """DataLoader after pytorch#179707."""


@pytest.mark.parametrize("loader", [DataLoader, OfSamples, OfSamplesAndBatches])
def test_a_loader_class_works_with_either_torch(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchs, "DataLoader", loader)
    written = "class Own(torchs.LoaderOf[T]): ...\nclass Image(Own[int]): ..."
    exec(written, made := {"torchs": torchs, "T": T, "__name__": __name__})
    assert issubclass(made["Own"], loader)
    assert made["Own"].__parameters__ == (T,)
    assert made["Image"].__parameters__ == ()
    assert made["Own"][str].__origin__ is made["Own"]


def test_torchs_collate_asks_by_the_replaced_name() -> None:
    assert "_new_shared" in inspect.getsource(torch.utils.data._utils.collate.collate_tensor_fn)
    assert callable(torch.UntypedStorage._new_shared.__func__)  # type: ignore[attr-defined]
    assert torch.equal(default_collate([torch.ones(2), torch.ones(2)]), torch.ones(2, 2))
    assert isinstance(torchs.signals._SIGCHLD_handler_set, bool)
    assert callable(torchs.signals._remove_worker_pids)


def test_the_dataset_may_come_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN torch 2.14's worker loop, which takes the dataset out of a list
    monkeypatch.setattr(torchs, "worker_loop", lambda dataset_holder, collate_fn: None)
    dataset = range(8)
    given = torchs.with_dataset({"dataset_holder": [dataset], "collate_fn": list})
    assert given == {"dataset": dataset, "collate_fn": list}
    assert torchs.as_taken(given) == {"dataset_holder": [dataset], "collate_fn": list}
    # AND the one before
    monkeypatch.setattr(torchs, "worker_loop", lambda dataset, collate_fn: None)
    assert torchs.as_taken(torchs.with_dataset(given)) == given
