from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autotune_loader.integrations import transformers as integration
from autotune_loader.integrations.transformers import plain_loader, training_arguments, tune_trainer
from autotune_loader.values.config import LoaderConfig
from tests.support import SimulatedMachine, simulated_result

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.system


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "labels": torch.tensor([y for _, y in samples])}


def arguments(folder: Path, **fields: Any) -> Any:
    return transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=32, num_train_epochs=2, learning_rate=0.05, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False, logging_strategy="no", **fields,
    )  # fmt: skip


def test_a_trainer_is_tuned_with_its_own_parts_and_then_trains(tmp_path: Path, points: Any, quick: Any) -> None:
    # GIVEN a Trainer with a collator and a dataset
    trainer = transformers.Trainer(Model(), arguments(tmp_path), train_dataset=points, data_collator=collate)
    before = [parameter.clone() for parameter in trainer.model.parameters()]

    # WHEN it is tuned
    result = tune_trainer(trainer, **quick)

    # THEN its arguments are the tuned ones, its weights untouched, and it trains with them
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert trainer.args.dataloader_num_workers == result.best.num_workers
    assert trainer.get_train_dataloader().num_workers == result.best.num_workers
    assert result.batch_size.value == 32
    assert trainer.train().global_step == 2 * 8


def test_a_sampler_of_the_trainers_own_is_kept(tmp_path: Path, points: Any) -> None:
    class Ordered(transformers.Trainer):  # type: ignore[misc, name-defined]
        """As one that groups by length."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(points)

    for kind, sampler in ((transformers.Trainer, "RandomSampler"), (Ordered, "SequentialSampler")):
        trainer = kind(Model(), arguments(tmp_path), train_dataset=points, data_collator=collate)
        assert type(plain_loader(trainer).sampler).__name__ == sampler


def test_a_loss_and_a_precision_of_the_trainers_own_are_heeded(
    tmp_path: Path, points: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a Trainer with a loss of its own, in bf16
    class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            return model(**inputs)["loss"] * 2

    was_on: list[bool] = []

    def tuned(*_: Any, **__: Any) -> Any:
        was_on.append(torch.is_autocast_enabled("cpu"))
        return simulated_result(SimulatedMachine())

    monkeypatch.setattr(integration, "tune", tuned)
    trainer = Own(Model(), arguments(tmp_path, bf16=True), train_dataset=points, data_collator=collate)
    # WHEN it is tuned THEN bursts train in bf16, and what they leave out is said, unless a step was given
    assert any("own compute_loss; pass train_step=" in note for note in tune_trainer(trainer).warnings)
    assert not any("compute_loss" in note for note in tune_trainer(trainer, train_step=0.01).warnings)
    assert was_on == [True, True]


def test_the_fields_of_a_file_make_training_arguments(tmp_path: Path, points: Any) -> None:
    args = arguments(
        tmp_path, **training_arguments(LoaderConfig(num_workers=2, prefetch_factor=4, persistent_workers=True))
    )
    loader = transformers.Trainer(Model(), args, train_dataset=points, data_collator=collate).get_train_dataloader()

    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 4, True)
    assert training_arguments(LoaderConfig()) == {"dataloader_num_workers": 0, "dataloader_pin_memory": False}
