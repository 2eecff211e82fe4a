"""Attempts with frameworks that have a loop or a loader of their own, whose libraries this package's tests install, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from studies.libraries.attempt import Attempts, Job
from studies.libraries.structures import BATCH, CLASSES, ROWS, WIDTH, dataset, folder, loader, net, rows

ATTEMPTS = Attempts()


class Labelled(torch.nn.Module):
    """A model that takes labels and returns its loss, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.net(x)
        loss = {} if labels is None else {"loss": functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def plain(**config: Any) -> Any:
    return DataLoader(rows(), BATCH, shuffle=True, **config)


@ATTEMPTS.of("torchdata", "`StatefulDataLoader(ds)`")
def stateful() -> Job:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return loader(lambda **config: StatefulDataLoader(rows(), batch_size=BATCH, shuffle=True, **config))


@ATTEMPTS.of("torchdata", "`nodes.Loader(...)`")
def nodes() -> Job:
    from torchdata import nodes

    root = nodes.Batcher(nodes.SamplerWrapper(torch.utils.data.RandomSampler(range(ROWS))), BATCH)
    return Job(given=nodes.Loader(nodes.ParallelMapper(root, torch.tensor, 2)))


def hf_dataset() -> Any:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    return Dataset.from_dict(
        {"x": torch.rand(ROWS, WIDTH).tolist(), "label": [index % CLASSES for index in range(ROWS)]}
    )


@ATTEMPTS.of("datasets", "`ds.with_format('torch')`, `batch_size=16`")
def with_format() -> Job:
    return dataset(hf_dataset().with_format("torch"), Labelled())


@ATTEMPTS.of("datasets", "the same, and a model that knows neither key")
def with_other_keys() -> Job:
    data = hf_dataset().rename_columns({"x": "signal_a"}).add_column("signal_b", [0.0] * ROWS).with_format("torch")
    return Job(given=data, model=net(), options={"batch_size": BATCH})


@ATTEMPTS.of("datasets", "`ds.to_iterable_dataset(num_shards=4).with_format('torch')`")
def shards() -> Job:
    return dataset(hf_dataset().to_iterable_dataset(num_shards=4).with_format("torch"), Labelled(), shuffle=False)


@ATTEMPTS.of("datasets", "`DataLoader(iterable.batch(16), batch_size=None)`")
def own_batches() -> Job:
    data = hf_dataset().to_iterable_dataset(num_shards=4).with_format("torch").batch(BATCH)
    return loader(lambda **config: DataLoader(data, batch_size=None, **config), Labelled())


@ATTEMPTS.of("datasets", "a `DatasetDict`")
def dataset_dict() -> Job:
    from datasets import DatasetDict

    return Job(given=DatasetDict(train=hf_dataset(), test=hf_dataset()), model=Labelled())


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        num_labels=CLASSES,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def tokens() -> Any:
    from datasets import Dataset

    ids = [[1 + index % 60] * (4 + index % 8) for index in range(ROWS)]
    return Dataset.from_dict({"input_ids": ids, "label": [index % CLASSES for index in range(ROWS)]})


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(each["input_ids"]) for each in samples]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = torch.tensor([each["label"] for each in samples])
    return {"input_ids": padded, "attention_mask": padded > 0, "labels": labels}


@ATTEMPTS.of("transformers", "a dataset, a `BertForSequenceClassification` and `collate_fn=`")
def transformer() -> Job:
    return dataset(tokens(), bert(), collate_fn=collate)


def trainer(**arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    made = TrainingArguments(
        folder(), per_device_train_batch_size=BATCH, num_train_epochs=1, use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, **arguments,
    )  # fmt: skip
    return Trainer(bert(), made, train_dataset=tokens(), data_collator=collate)


@ATTEMPTS.of("transformers", "`Trainer`")
def hf_trainer() -> Job:
    return Job(given=trainer())


@ATTEMPTS.of("transformers", "`plain_loader(trainer)`, as `tune_trainer(trainer)` does it")
def hf_trainer_tuned() -> Job:
    from autotune_loader.integrations.transformers import plain_loader, training_arguments

    own = trainer()

    def epoch(result: Any) -> Iterator[Any]:
        trained = trainer(**training_arguments(result.best)).train()
        assert trained.global_step == ROWS // BATCH
        yield trained

    return Job(given=plain_loader(own), model=own.model, batch=BATCH, epoch=epoch)


def accelerated(own: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(own)


@ATTEMPTS.of("accelerate", "the loader before `prepare()`")
def before_prepare() -> Job:
    from autotune_loader.pipeline.build import rebuild

    own = plain()
    return Job(given=own, model=net(), batch=BATCH, epoch=lambda result: accelerated(rebuild(own, result.best)))


@ATTEMPTS.of("accelerate", "the loader that `prepare()` returned")
def prepared() -> Job:
    job = loader(lambda **config: accelerated(plain(**config)))
    return replace(job, after=lambda: list(job.given))


def lightning_module() -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Module()


def lightning_trainer() -> Any:
    import lightning.pytorch as pl

    return pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def data_module() -> Any:
    import lightning.pytorch as pl

    class Data(pl.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> Any:
            return plain()

    return Data()


@ATTEMPTS.of("lightning", "`tune(loader, lightning_module)`")
def module() -> Job:
    def epoch(result: Any) -> Iterator[Any]:
        loop = lightning_trainer()
        loop.fit(lightning_module(), plain(**result.best.to_kwargs()))
        yield from range(loop.global_step)

    return Job(given=plain(), model=lightning_module(), batch=BATCH, epoch=epoch)


@ATTEMPTS.of("lightning", "`Trainer`")
def pl_trainer() -> Job:
    return Job(given=lightning_trainer(), model=lightning_module())


@ATTEMPTS.of("lightning", "`LightningDataModule`")
def pl_data_module() -> Job:
    return Job(given=data_module(), model=lightning_module())


@ATTEMPTS.of("lightning", "`datamodule.train_dataloader()`, and `tuned(model, datamodule, config=...)` to fit")
def pl_tuned() -> Job:
    def epoch(result: Any) -> Iterator[Any]:
        from autotune_loader.integrations.lightning import tuned

        loop, model = lightning_trainer(), lightning_module()
        loop.fit(model, datamodule=tuned(model, data_module(), config=result.best))
        yield from range(loop.global_step)

    return Job(given=data_module().train_dataloader(), model=lightning_module(), batch=BATCH, epoch=epoch)


def combined_of(names: str, **config: Any) -> Any:
    from lightning.pytorch.utilities import CombinedLoader

    return CombinedLoader({name: plain(**config) for name in names})


@ATTEMPTS.of("lightning", "`CombinedLoader({'a': loader, 'b': loader})`")
def combined() -> Job:
    return Job(given=combined_of("ab"), model=net())


@ATTEMPTS.of("lightning", "`CombinedLoader(loader)`")
def combined_one() -> Job:
    return loader(lambda **config: combined_of("a", **config))
