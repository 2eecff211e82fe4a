"""The blocks of docs/frameworks.md that have a title, each in a script that checks what comes of it.

What a title names with a version is too large for the dev extra: `python -m studies libraries.attempts --recipes` runs those blocks.
"""

import importlib.metadata
import re
import textwrap
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
]  # its import takes most of it on a busy machine
PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r'^```python title="(\S+) ?(\S*)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
CONFIG = re.search(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]
MODULES = {"LightningCLI": "jsonargparse", "LightningModule": "lightning"}
COMMON = """
import torch
from torch.utils.data import DataLoader, DistributedSampler
from autotune_loader import AutoLoader, LoaderConfig, TuningResult, load_config, tune
from tests.integrations.job import FEW as dataset, QUICK

KEYS = {"data_time", "data_wait_share", "samples_per_sec", "num_workers"}
alone = {"accelerator": "cpu", "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
"""
SCRIPTS = {
    "LightningCLI": """
from lightning.pytorch.cli import LightningCLI
from autotune_loader.integrations import lightning
from tests.integrations.lightning_parts import Module, Points

class Data(Points):
    def __init__(self):
        super().__init__(dataset)

tuned = lambda data, model, budget: lightning.tuned(data, model, config=LoaderConfig(num_workers=2))
# BLOCK
cli = CLI(Module, Data, trainer_defaults={**alone, "max_epochs": 1, "logger": False}, args=["fit"])
assert cli.trainer.train_dataloader.num_workers == 2
""",
    "LightningModule": """
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from tests.integrations import lightning_parts

class Module(lightning_parts.Module):
    # BLOCK

logger = CSVLogger(".")
Trainer(max_epochs=1, logger=logger, **alone).fit(Module(), AutoLoader(dataset, batch_size=16))
assert set(logger.experiment.metrics_keys) >= KEYS
""",
    "wandb": """
from pathlib import Path
import wandb

loader = AutoLoader(dataset, batch_size=16)
list(loader)
run = wandb.init(mode="offline", settings=wandb.Settings(console="off"))
# BLOCK
assert {name for name in run.summary.keys() if not name.startswith("_")} == KEYS
run.finish()
(written,) = Path().rglob("*.wandb")
assert {name for name in KEYS if name.encode() in written.read_bytes()} == KEYS
""",
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

loader, step = AutoLoader(dataset, batch_size=16), 16
list(loader)
with SummaryWriter("out") as writer:
    # BLOCK
written = EventAccumulator("out").Reload()
assert {name: written.Scalars(name)[0].step for name in written.Tags()["scalars"]} == {f"loader/{name}": 16 for name in KEYS}
""",
    "hydra": """
from hydra.utils import instantiate
from omegaconf import OmegaConf

config = LoaderConfig(num_workers=2, prefetch_factor=4)
TuningResult(best=config, status="complete").save("loader.json")
cfg = OmegaConf.load("hydra.yaml")
# BLOCK
assert (loader.dataset is dataset, loader.batch_size, LoaderConfig.from_loader(loader)) == (True, 64, config)
""",
    "ray": """
import ray.train.torch
from ray.train.torch import prepare_data_loader

def train_func():
    # BLOCK
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen += [index for batch in prepared for index in batch[2].tolist()]
    assert (len(seen), len({*seen[:128]}), set(loader.metrics())) == (256, 128, KEYS)  # half of the dataset, twice
    pairs = torch.utils.data.TensorDataset(torch.rand(128, 4), torch.randint(0, 2, (128,)))
    found = tune(DataLoader(pairs, 16, sampler=DistributedSampler(pairs)), torch.nn.Linear(4, 2), **QUICK)
    ranks = [None, None]
    torch.distributed.all_gather_object(ranks, found.best)
    assert ranks[0] == ranks[1]

ray.train.torch.TorchTrainer(train_func, scaling_config=ray.train.ScalingConfig(num_workers=2)).fit()
""",
    "submitit": """
from functools import partial
import submitit

jobs, auto = [], submitit.AutoExecutor  # in this process, where there is no SLURM
dataset, model = torch.utils.data.TensorDataset(torch.rand(256, 4), torch.randint(0, 2, (256,))), torch.nn.Linear(4, 2)
submit, quick = auto.submit, {**QUICK, "budget": 1}
auto.submit = lambda *given, **options: jobs.append(submit(*given, **{**options, **quick}))
submitit.AutoExecutor = partial(auto, cluster="debug")
# BLOCK
assert [job.result().best for job in jobs] == [load_config(f"{node}.json") for node in ("v100", "a100")]
""",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "version", "block"), [pytest.param(*block, id=block[0]) for block in BLOCKS]
)
def test_a_recipe_does_what_it_says(name, version, block, preloaded_frameworks, tmp_path):
    pytest.importorskip(MODULES.get(name, name))
    assert not version or version == importlib.metadata.version(name)
    (tmp_path / "hydra.yaml").write_text(CONFIG)
    script = re.sub(
        "^( *)# BLOCK\n",
        lambda found: textwrap.indent(block, found[1]),
        SCRIPTS[name],
        flags=re.MULTILINE,
    )
    (tmp_path / "recipe.py").write_text(COMMON + script)
    run = preloaded_frameworks.start("recipe.py", folder=tmp_path)
    assert run.wait(timeout=200) == 0, run.output
