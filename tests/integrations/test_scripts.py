"""Scripts that use the real libraries, unchanged: who makes the loader does not matter, it bears the user's line."""

import re

import pytest

from tests.support.bench import HARD_DEADLINE_S, Bench

pytestmark = [pytest.mark.system, pytest.mark.timeout(HARD_DEADLINE_S + 20)]
COMMON = """
import torch
from torch.utils.data import DataLoader
from tests.integrations.job import Classifier, Waiting, collate

train, test = Waiting(64, 0.0), Waiting(24, 0.0)

def say(model):
    weights = [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()]
    print("SAID", weights, torch.rand(1).item())
"""
LIGHTNING = """
import lightning.pytorch as pl
from tests.integrations.lightning_parts import Module

if __name__ == "__main__":
    pl.seed_everything(0)
    module = Module()
    train = DataLoader(train, batch_size=8, shuffle=True)  # HERE 64
    test = DataLoader(test, batch_size=8)  # HERE 24
    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    pl.Trainer(max_epochs=2, accelerator="cpu", **quiet).fit(module, train, test)
    say(module.model)
"""
TRAINER = """
from transformers import Trainer, TrainingArguments

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Classifier()
    arguments = TrainingArguments(
        "out", num_train_epochs=2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        eval_strategy="epoch", logging_strategy="no", remove_unused_columns=False,
    )
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=test, data_collator=collate)
    trainer.train()  # HERE 64 24
    say(model)
"""
STATEFUL = """
from torchdata.stateful_dataloader import StatefulDataLoader

if __name__ == "__main__":
    torch.manual_seed(0)
    loader = StatefulDataLoader(train, batch_size=8, shuffle=True, num_workers=1)  # HERE 64
    print("SAID", [(index.tolist(), sorted(loader.state_dict())) for _ in range(2) for *_, index in loader], torch.rand(1))
"""


@pytest.mark.parametrize(
    "body", [LIGHTNING, TRAINER, STATEFUL], ids=["lightning", "trainer", "stateful"]
)
def test_loaders_of_frameworks_are_found_and_nothing_else_changes(
    preloaded_frameworks, tmp_path, body
):
    bench = Bench(preloaded_frameworks, tmp_path, COMMON)
    text = bench.write(body)
    code, plain = bench.run("train.py")
    assert code == 0, plain
    lines = [
        line.split("# HERE")[1].split() if "# HERE" in line else [] for line in text.splitlines()
    ]
    wanted = {
        (f"Waiting[{size}]", f"train.py:{number}")
        for number, sizes in enumerate(lines, 1)
        for size in sizes
    }
    for verb in ("watch", "run"):
        printed, told = bench.told(verb, "train.py")
        assert (
            re.findall("^SAID.*", printed, re.MULTILINE)
            == re.findall("^SAID.*", plain, re.MULTILINE)
            != []
        )
        found = {
            (each["contents"].split(",")[0], each["name"].split(" ")[0]) for each in told["loaders"]
        }
        # How many samples there are is known where an epoch has ended: nobody asks the dataset.
        of_any_size = {(contents.split("[")[0], line) for contents, line in wanted}
        assert {(contents.split("[")[0], line) for contents, line in found} == of_any_size
        assert {each for each in found if "[" in each[0]} <= wanted
        assert all(each["batches"] for each in told["loaders"])
