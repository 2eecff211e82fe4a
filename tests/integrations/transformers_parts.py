"""Trainers and a model for them; the import takes seconds: tests do it when they run."""

import torch
import transformers
from transformers.modeling_layers import GradientCheckpointingLayer

from autotune_loader.integrations.accelerate import tune_live
from tests.integrations.job import Classifier, collate

QUIET = {
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "remove_unused_columns": False,
}
Trainer = transformers.Trainer


def trainer_in(folder, dataset, kind="Trainer", *, model=None, size=32, **fields):
    """A Trainer of a class of this file, with a collator and arguments of one's own."""
    fields = {"per_device_train_batch_size": size, "num_train_epochs": 2, **QUIET, **fields}
    arguments = transformers.TrainingArguments(str(folder), **fields)
    data = {"train_dataset": dataset, "data_collator": collate}
    return globals()[kind](model or Classifier(), arguments, **data)


class Own(Trainer):
    """Has a loss of its own, and its own order, as one that groups by length."""

    def compute_loss(self, model, inputs, **_):
        return model(**inputs)["loss"] * 2

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Bucketed(Trainer):
    """Makes its own batches, and heeds one argument."""

    def get_train_dataloader(self):
        options = {"num_workers": self.args.dataloader_num_workers}
        loader = torch.utils.data.DataLoader(
            self.train_dataset, batch_sampler=[[0, 1, 2], [3]], **options
        )
        return self.accelerator.prepare(loader)


class Stepping(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class Doubled(Trainer):
    """Its loss is twice the usual, and it logs that."""

    def compute_loss(self, model, inputs, *_, **__):
        self.log({"twice": 2.0})
        return 2 * super().compute_loss(model, inputs)


class Live(Trainer):
    def get_train_dataloader(self):
        return tune_live(super().get_train_dataloader())


class Layer(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = torch.nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class Net(transformers.PreTrainedModel):
    """Reads tokens, and notes how often its layer computes and what its embeddings were."""

    config_class = transformers.PretrainedConfig
    supports_gradient_checkpointing = True
    main_input_name = "x"

    def __init__(self, config=None):
        super().__init__(config or transformers.PretrainedConfig())
        self.embeddings = torch.nn.Embedding(10, 8)
        self.layer = Layer()
        self.head = torch.nn.Linear(8, 2)
        self.embedded = []
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings

    def _init_weights(self, module):
        pass

    def forward(self, x, labels=None):
        embedded = self.embeddings(x)
        self.embedded.append(embedded.detach())
        logits = self.head(self.layer(embedded).mean(1))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)
