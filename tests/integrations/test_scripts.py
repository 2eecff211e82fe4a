"""Training with the real libraries, watched or tuned: each loader bears the user's line."""

import contextlib
import inspect
import re

import pytest
import torch
from torch.utils.data import DataLoader

from autotune_loader import enable
from tests.integrations.job import Classifier, Waiting, collate

pytestmark = [
    pytest.mark.system,
    pytest.mark.smoke,
    pytest.mark.xdist_group("frameworks"),
    pytest.mark.timeout(300),  # the import takes most of it on a busy machine
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
    pytest.mark.filterwarnings("ignore:'set_vital':UserWarning"),  # of torchdata
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]
TRAIN, TEST = Waiting(64, 0.0), Waiting(24, 0.0)


def weights(model):
    return [parameter.tolist() for parameter in model.parameters()]


def with_lightning(folder):
    parts = pytest.importorskip("tests.integrations.lightning_parts")
    module = parts.Module()
    train = DataLoader(TRAIN, batch_size=8, shuffle=True)  # HERE Waiting
    test = DataLoader(TEST, batch_size=8)  # HERE Waiting
    quiet = {**parts.QUIET, "logger": False, "default_root_dir": folder}
    parts.lightning.Trainer(max_epochs=2, **quiet).fit(module, train, test)
    return weights(module.model)


def with_a_trainer(folder):
    parts = pytest.importorskip("tests.integrations.transformers_parts")
    fields = {**parts.QUIET, "eval_strategy": "epoch", "num_train_epochs": 2}
    arguments = parts.transformers.TrainingArguments(str(folder), **fields)
    model, data = Classifier(), {"train_dataset": TRAIN, "eval_dataset": TEST}
    trainer = parts.Trainer(model, arguments, data_collator=collate, **data)
    trainer.train()  # HERE Waiting Waiting Waiting
    return weights(model)


def with_a_stateful_loader(_):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader = stateful(TRAIN, 8, shuffle=True, num_workers=1)  # HERE Waiting
    epochs = [batch for _ in range(2) for batch in loader]
    return [(index.tolist(), sorted(loader.state_dict())) for *_, index in epochs]


def with_datasets(_):
    datasets = pytest.importorskip("datasets")
    rows = {"x": [[float(index)] * 4 for index in range(64)], "index": list(range(64))}
    data = datasets.Dataset.from_dict(rows).with_format("torch")
    loader = DataLoader(data, 8, shuffle=True, num_workers=1)  # HERE Dataset
    epochs = [batch for _ in range(2) for batch in loader]
    return [(batch["index"].tolist(), batch["x"].tolist()) for batch in epochs]


@pytest.mark.parametrize(
    "train", [with_lightning, with_a_trainer, with_a_stateful_loader, with_datasets]
)
def test_frameworks_loaders_are_found_nothing_else_changes(train, tmp_path, capsys):
    # GIVEN the lines that make loaders, and what these contain
    lines, first = inspect.getsourcelines(train)
    marked = [(n, line.partition("# HERE ")[2].split()) for n, line in enumerate(lines, first)]
    wanted = [(str(n), contents) for n, every in marked for contents in every]
    # WHEN it trains, as it is, watched and tuned
    trained = {}
    for verb in ("", "watch", "run"):
        torch.manual_seed(0)
        with enable(verb) if verb else contextlib.nullcontext():
            weights = train(tmp_path)
        trained[verb] = weights, torch.rand(1).item()
        # THEN these loaders are told of
        report = capsys.readouterr().err
        found = re.findall(r"test_scripts\.py:(\d+)(?: .*)?  (\w+)[\[,]", report)
        assert sorted(found) == (wanted if verb else []), report
    # AND the weights and the random numbers are those of a training without us
    assert trained["watch"] == trained[""]
    assert trained["run"] == trained[""]
