"""What libraries hand out in place of a dataset or a DataLoader: unwrapped where a DataLoader is in it, else answered with a
call that works.

Nothing here knows a library: a wrapper is told by the DataLoader that it holds, anything else by what it can do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from autotune_loader.pipeline.workload import is_iterable_dataset
from autotune_loader.values.errors import WorkloadError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_Part = TypeVar("_Part")
# How deep in attributes, lists and dicts of a wrapper a DataLoader is looked for, and in how many of them.
SEARCH_DEPTH, MOST_PARTS = 3, 64
# Characters of a value in an error; of a longer one its class is named.
LONGEST_SHOWN = 60
STEP_FOR_REST = "pass a train_step that takes"
# Classes with an `__iter__` of their own that yields what torch's would; Accelerate's bring it to the device, as the step does.
AS_TORCH = ("StatefulDataLoader", "DataLoaderShard")
# What an object that is neither can do, and the call for it; the first that it can do decides.
ANSWERS = (
    ("get_train_dataloader", "autotune_loader.integrations.transformers.tune_trainer(trainer)"),
    (
        "fit_loop",
        "trainer.fit(model, datamodule=autotune_loader.integrations.lightning.tuned(model, datamodule or loader))",
    ),
    (
        "train_dataloader",
        "tune(datamodule.train_dataloader(), model), or inside of Lightning "
        "trainer.fit(model, datamodule=autotune_loader.integrations.lightning.tuned(model, datamodule))",
    ),
    ("do_item", "tune(AsDataset(dl), model, batch_size=dl.bs, collate_fn=dl.do_batch), where AsDataset is a map-style dataset "
     "with `__len__` = dl.n and `__getitem__` = dl.do_item,"),
)  # fmt: skip


def unwrapped(given: Any) -> tuple[Any, list[str]]:
    """A DataLoader or dataset as it is, or the DataLoader that a wrapper holds, with a note on what is left out.

    Raises:
        TypeError: it is neither, and holds no DataLoader or several; the message names a call that would work.
    """
    from torch.utils.data import DataLoader

    if (answer := _answer_by_ability(given)) is not None:
        raise neither(given, answer)
    is_group = isinstance(given, (list, tuple, Mapping))
    if isinstance(given, DataLoader) or (
        hasattr(given, "__getitem__") and not is_group and not is_iterable_dataset(given)
    ):
        return given, []
    name, depth = type(given).__name__, 1 if is_group else SEARCH_DEPTH
    by_identity = {id(each): (path, each) for path, each in parts_of_type(given, DataLoader, depth=depth)}
    found = dict(by_identity.values())
    if len(found) == 1:
        ((path, loader),) = found.items()
        return loader, [
            f"dataset_or_loader={name} holds a DataLoader ({path}), which is what was tuned: give the configuration to "
            f"that. What {name} itself does to batches is no part of the measurement; {STEP_FOR_REST} them without"
        ]
    if is_iterable_dataset(given) or (not found and (is_group or isinstance(given, Iterator))):
        return given, []
    if found:
        raise TypeError(
            f"dataset_or_loader={name} holds {len(found)} DataLoaders ({', '.join(found)}); one at a time would work: "
            "tune(loader, model)"
        )
    raise neither(given)


def neither(given: Any, answer: str | None = None) -> TypeError:
    """An object is no dataset and no loader: the error, with the call, or the kind of argument, that would work."""
    if answer is None and hasattr(getattr(given, "dataset", None), "__getitem__"):
        answer = f"its dataset, tune({type(given).__name__.lower()}.dataset, model, batch_size=..., collate_fn=...),"
    elif answer is None:
        answer = "the dataset that it reads, in a DataLoader," if hasattr(given, "__iter__") else "a list of samples"
    text = repr(given)
    shown = text if len(text) < LONGEST_SHOWN else type(given).__name__
    return TypeError(
        f"dataset_or_loader={shown} is neither a DataLoader, nor an IterableDataset, nor a map-style dataset with "
        f"__getitem__ and __len__; {answer} would work"
    )


@contextlib.contextmanager
def told_beside_errors(notes: list[str]) -> Iterator[None]:
    """What the bursts leave out of a loader is most likely why a step fails on its very first batch."""
    try:
        yield
    except WorkloadError as error:
        left_out = [note for note in notes if STEP_FOR_REST in note]
        if not left_out:
            raise
        raise WorkloadError("; ".join([error.message, *left_out]), error.user_traceback) from error


def own_iteration_notes(loader: DataLoader[Any]) -> list[str]:
    """A note where the loader's class does something of its own with batches, which the bursts do not run."""
    own = next(cls for cls in type(loader).__mro__ if "__iter__" in vars(cls) or "_get_iterator" in vars(cls))
    if own.__module__.startswith("torch.") or own.__name__ in AS_TORCH:
        return []
    return [
        f"{own.__name__} has an __iter__ of its own, which the bursts leave out: the step gets what the workers make; "
        f"{STEP_FOR_REST} those, or let the workers do all of it (PyTorch Geometric: filter_per_worker=True)"
    ]


def makes_batches(dataset: Any) -> bool:
    """Whether an iterable dataset is a pipeline of stages (webdataset) of which the last that is about batches makes them."""
    stages = getattr(dataset, "pipeline", None)
    names = [_name_of_stage(stage) for stage in stages] if isinstance(stages, list) else []
    batching = [name for name in names if "batch" in name]
    return bool(batching) and not batching[-1].startswith("un")


def _name_of_stage(stage: Any) -> str:
    function = getattr(stage, "f", stage)
    return str(getattr(function, "__name__", type(function).__name__)).strip("_").lower()


def _answer_by_ability(given: Any) -> str | None:
    train = None
    with contextlib.suppress(Exception):  # an object that looks attributes up elsewhere may raise anything
        train = getattr(given, "train", None)
    for what in (given, train):
        for ability, answer in ANSWERS:
            if hasattr(type(what), ability) or ability in getattr(what, "__dict__", {}):
                return answer if what is given else answer.replace("dl", "dls.train")
    return None


def parts_of_type(
    value: Any, kind: type[_Part], path: str = "", depth: int = SEARCH_DEPTH
) -> Iterator[tuple[str, _Part]]:
    """What an object holds of a kind, in attributes, lists and dicts, with its path."""
    if isinstance(value, kind):
        yield path, value
    elif depth:
        for name, part in islice(_parts_of(value), MOST_PARTS):
            joined = f"{path}{name}" if name.startswith("[") or not path else f"{path}.{name}"
            yield from parts_of_type(part, kind, joined, depth - 1)


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    else:
        yield from dict(getattr(value, "__dict__", {})).items()
