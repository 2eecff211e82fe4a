"""The blocks of docs/frameworks.md that have a title, each in a script that checks it.

What a title names with a version is too large for the dev extra:
`python -m studies libraries.attempts --recipes` runs those blocks.
"""

import importlib.metadata
import re
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]  # imports, on a busy machine
PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r'^```python title="(\S+) ?(\S*)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
CONFIG = re.search(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]
MODULES = {"LightningCLI": "jsonargparse", "LoaderMetrics": "lightning"}
COMMON = """
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from autotune_loader import AutoLoader, LoaderConfig, TuningResult, load_config, tune
from tests.integrations.job import FEW as dataset, QUICK

KEYS = {f"loader/{name}" for name in ("wait_s", "wait_share", "samples_per_s", "num_workers")}
def pairs(count):
    return TensorDataset(torch.rand(count, 4), torch.randint(0, 2, (count,)))
"""
SCRIPTS = {
    "LightningCLI": """
from lightning.pytorch.cli import LightningCLI
from autotune_loader.integrations import lightning
from tests.integrations.lightning_parts import QUIET, Module, Points

class Data(Points):
    def __init__(self):
        super().__init__(dataset)

def tuned(data, model, budget):
    return lightning.tuned(data, model, config=LoaderConfig(num_workers=2))
# BLOCK
quiet = {**QUIET, "max_epochs": 1, "logger": False}
cli = CLI(Module, Data, trainer_defaults=quiet, args=["fit"])
assert cli.trainer.train_dataloader.num_workers == 2
""",
    "LoaderMetrics": """
from functools import partial
from lightning import pytorch
from lightning.pytorch.loggers import CSVLogger
from tests.integrations.lightning_parts import QUIET, Module

Trainer = partial(pytorch.Trainer, logger=CSVLogger("."), max_epochs=1, **QUIET)
# BLOCK
trainer.fit(Module(), AutoLoader(dataset, batch_size=4))
assert set(trainer.logger.experiment.metrics_keys) >= KEYS
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
steps = {name: written.Scalars(name)[0].step for name in written.Tags()["scalars"]}
assert steps == dict.fromkeys(KEYS, 16)
""",
    "hydra": """
from hydra.utils import instantiate
from omegaconf import OmegaConf

config = LoaderConfig(num_workers=2, prefetch_factor=4)
TuningResult(best=config, status="complete").save("loader.json")
cfg = OmegaConf.load("hydra.yaml")
# BLOCK
assert loader.dataset is dataset
assert loader.batch_size == 64
assert LoaderConfig.from_loader(loader) == config
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
    assert len(seen) == 256  # half of the dataset, twice
    assert len({*seen[:128]}) == 128
    assert set(loader.metrics("loader/")) == KEYS
    data = pairs(128)
    own = DataLoader(data, 16, sampler=DistributedSampler(data))
    found = tune(own, torch.nn.Linear(4, 2), **QUICK)
    ranks = [None, None]
    torch.distributed.all_gather_object(ranks, found.best)
    assert ranks[0] == ranks[1]

scaling = ray.train.ScalingConfig(num_workers=2)
ray.train.torch.TorchTrainer(train_func, scaling_config=scaling).fit()
""",
    "submitit": """
from functools import partial
import submitit

jobs, auto = [], submitit.AutoExecutor  # in this process, where there is no SLURM
dataset, model = pairs(256), torch.nn.Linear(4, 2)
submit, quick = auto.submit, {**QUICK, "budget": 1}
auto.submit = lambda *given, **options: jobs.append(submit(*given, **{**options, **quick}))
submitit.AutoExecutor = partial(auto, cluster="debug")
# BLOCK
found = [job.result().best for job in jobs]
assert found == [load_config(f"{node}.json") for node in ("v100", "a100")]
""",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "version", "block"), [pytest.param(*block, id=block[0]) for block in BLOCKS]
)
def test_a_recipe_does_what_it_says(name, version, block, preloaded, tmp_path):
    pytest.importorskip(MODULES.get(name, name))
    assert not version or version == importlib.metadata.version(name)
    (tmp_path / "hydra.yaml").write_text(CONFIG)
    mark = re.compile("^( *)# BLOCK\n", re.MULTILINE)
    script = mark.sub(lambda found: textwrap.indent(block, found[1]), SCRIPTS[name])
    preloaded.ran(COMMON + script, folder=tmp_path, timeout=200, probes=True)
