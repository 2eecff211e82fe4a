"""AutoLoader inside the real libraries: each shows a change of workers in the midst of training."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

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
SIZE, BATCH, EPOCHS = 960, 16, 3


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
    assert any(change.config.num_workers != 2 for change in changes)  # at an epoch's start it would be an "epoch"
    assert [sorted(seen[first : first + SIZE]) for first in range(0, len(seen), SIZE)] == [list(range(SIZE))] * EPOCHS


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
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, loader)

    assert trainer.train_dataloader is loader
    assert_changed(loader, module.model.seen)


def test_a_trainer_of_hugging_face_trains_with_what_accelerate_has_prepared(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class LiveTrainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return tune_live(super().get_train_dataloader())

    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, use_cpu=True, save_strategy="no",
        report_to=[], disable_tqdm=True, remove_unused_columns=False, logging_strategy="no",
    )  # fmt: skip
    model = Classifier()
    trainer = LiveTrainer(model, args, train_dataset=Waiting())
    trainer.train()

    assert_changed(trainer.callback_handler.train_dataloader.base_dataloader, model.seen)


def test_who_has_a_stateful_dataloader_resumes_with_one_after_a_change() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    plain = stateful.StatefulDataLoader(Waiting(), batch_size=BATCH, shuffle=True)
    first, second = AutoLoader(plain, num_workers=2), AutoLoader(plain)
    seen = [index for _ in range(EPOCHS) for batch in first for index in batch["index"].tolist()]
    assert_changed(first, seen)

    half: list[int] = []
    for batch in first:
        half += batch["index"].tolist()
        if len(half) == SIZE // 2:
            break
    second.load_state_dict(first.state_dict())
    assert second.config.num_workers == 0  # as asked; what was learnt is tried once workers are proven
    rest = [index for batch in second for index in batch["index"].tolist()]

    assert sorted(half + rest) == list(range(SIZE))
