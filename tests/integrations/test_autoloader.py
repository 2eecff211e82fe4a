"""AutoLoader inside the real libraries: each shows a change of workers in the midst of training."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from autotune_loader import AutoLoader
from autotune_loader.integrations.accelerate import tune_live

pytestmark = [
    pytest.mark.timeout(300),  # the frameworks' imports take most of it on a busy machine
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*set_vital.*"),
]
SIZE, BATCH = 960, 16


class Waiting(Dataset[Any]):
    """Samples that are waited for, so that more than two workers are worth it."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        return {"x": torch.full((4,), index / SIZE), "labels": index % 2, "index": index}


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, index: torch.Tensor | None = None) -> Any:
        if index is not None:
            self.seen += index.tolist()
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def assert_changed(loader: AutoLoader[Any], seen: list[int]) -> None:
    """It changed its workers between two batches of an epoch, and every sample came once an epoch."""
    changes = [change for change in loader.traces.changes if change.reason == "change"]
    assert changes  # at an epoch's start it would be an "epoch"
    epochs = len(seen) // SIZE
    assert all(sorted(seen[e * SIZE : (e + 1) * SIZE]) == list(range(SIZE)) for e in range(epochs))
    assert any(change.config.num_workers != 2 for change in changes)


def test_lightning_trains_with_one(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Classifier()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, loader = Module(), AutoLoader(Waiting(), batch_size=BATCH, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, loader)

    assert trainer.train_dataloader is loader
    assert len(module.model.seen) == 3 * SIZE
    assert_changed(loader, module.model.seen)


def test_a_trainer_of_hugging_face_trains_with_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class LiveTrainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return tune_live(super().get_train_dataloader())

    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=BATCH, num_train_epochs=3, use_cpu=True, save_strategy="no",
        report_to=[], disable_tqdm=True, remove_unused_columns=False, logging_strategy="no",
    )  # fmt: skip
    trainer, model = None, Classifier()
    trainer = LiveTrainer(model, args, train_dataset=Waiting())
    trainer.train()

    assert len(model.seen) == 3 * SIZE
    assert_changed(trainer.callback_handler.train_dataloader.base_dataloader, model.seen)


def test_accelerate_prepares_and_then_trains_with_one() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator, model = accelerate.Accelerator(cpu=True), Classifier()
    prepared = accelerator.prepare(DataLoader(Waiting(), batch_size=BATCH, shuffle=True))
    loader = tune_live(prepared)
    for _ in range(3):
        for batch in loader:
            model(**batch)

    assert_changed(loader.base_dataloader, model.seen)


def test_who_has_a_stateful_dataloader_resumes_with_one_after_a_change() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    plain = stateful.StatefulDataLoader(Waiting(), batch_size=BATCH, shuffle=True)

    torch.manual_seed(7)
    first, model = AutoLoader(plain, num_workers=2), Classifier()
    epoch: list[int] = []
    for _ in range(3):
        epoch = []
        for batch in first:
            epoch += batch["index"].tolist()
            model(**batch)
    assert_changed(first, model.seen)

    half: list[int] = []
    for batch in first:
        half += batch["index"].tolist()
        if len(half) == SIZE // 2:
            break
    state = first.state_dict()
    second = AutoLoader(plain)
    second.load_state_dict(state)
    assert second.config.key() == first.best.key()
    rest = [index for batch in second for index in batch["index"].tolist()]

    assert sorted(half + rest) == list(range(SIZE))
