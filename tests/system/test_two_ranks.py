"""Two ranks on gloo: an unchanged script, and one that calls Accelerate's integration."""

import json
from pathlib import Path

import pytest

from autotune_loader import TuningResult
from autotune_loader.machine.limits import usable_cores
from tests.support.bench import line_of

pytestmark = pytest.mark.system
EPOCHS, SIZE = 2, 256
ENVIRON = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
HEAD = f"""
import json, os, sys, time
import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler
from tests.support.data import Rows

def get(index):
    time.sleep(0.002 if os.environ["RANK"] == "1" else 0.001)  # one rank's storage is slower
    return torch.full((4,), index / {SIZE}), index % 2, index

def step(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

def trained(model, optimizer, loader, epochs, backward):
    seen = []
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            backward(step(model, batch))
            optimizer.step()
            seen += batch[2].tolist()
    return dict(seen=seen, weights=model.module.weight.flatten().tolist())

def say(**said):
    distributed.barrier()
    with open(f"rank-{{os.environ['RANK']}}.json", "w") as file:
        json.dump(said, file)
    # gloo's threads drop their last all-reduce under the GIL, and torch 2.13 aborts at exit then
    time.sleep(0.5)
    distributed.destroy_process_group()
"""
PLAIN = f"""{HEAD}
distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
data = Rows(get, {SIZE})
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))  # HERE
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
say(**trained(model, optimizer, loader, {EPOCHS}, lambda loss: loss.backward()))
"""
# Two ways to share out the loading, of which one is tuned; bursts are simulated, and counted.
PREPARED = f"""{HEAD}
import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from autotune_loader.integrations.accelerate import tune_before_prepare
from tests.support import SimulatedMachine, on_simulated_machines

probes = []
machine_of = lambda workload: probes.append(workload) or SimulatedMachine()
on_simulated_machines(pytest.MonkeyPatch(), machine_of)
accelerators = []
for dispatch in (True, False):
    AcceleratorState._reset_state()  # as in a script that has only this one
    GradientState._reset_state()
    sharing = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerators.append(Accelerator(cpu=True, dataloader_config=sharing))
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Rows(get, {SIZE}), batch_size=16)
how = dict(train_step=step, budget=4, max_workers=2, progress=False)
try:
    tune_before_prepare(accelerators[0], loader, model, **how)
except ValueError as error:
    refused = str(error)
loader, result = tune_before_prepare(accelerators[1], loader, model, **how)
cores = result.machine.usable_cores
told = dict(best=result.best.to_dict(), workers=loader.num_workers, cores=cores)
parts = accelerators[1].prepare(model, optimizer, loader)
say(refused=refused, probes=len(probes), **told, **trained(*parts, 1, accelerators[1].backward))
"""
# What `torchrun --standalone --nproc-per-node 2` does, but that its ranks are forked.
LAUNCHER = """
import atexit, sys, uuid
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from autotune_loader.cli import main

def rank(*arguments):
    sys.argv[1:] = arguments
    main()  # and returns nothing: the agent would send it
    atexit._run_exitfuncs()  # as a Python that ends

elastic_launch(LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, run_id=uuid.uuid4().hex,
    rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
), rank)(*sys.argv[1:])
"""


@pytest.fixture
def launch(preloaded, tmp_path):
    """Runs both ranks by a command, checks their halves of each epoch, returns what they say."""

    def launch(script, epochs, *options, before=""):
        (tmp_path / "job.py").write_text(script)
        given = {"folder": tmp_path, "environ": ENVIRON}
        output = preloaded.ran(before + LAUNCHER, *options, "job.py", **given)
        said = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
        assert said[0]["weights"] == pytest.approx(said[1]["weights"])
        half = SIZE // 2
        for epoch in range(epochs):
            halves = [each["seen"][half * epoch : half * (epoch + 1)] for each in said]
            assert len(halves[0]) == half
            assert sorted(halves[0] + halves[1]) == list(range(SIZE))
        return output, said

    return launch


@pytest.mark.smoke
def test_ranks_train_on_halves_rank_0_reports(launch, tmp_path):
    options = ("run", "--allow-workers", "--json", "report.json", "-o", "loader.json")
    output, _ = launch(PLAIN, EPOCHS, *options)
    # THEN there is one report, of rank 0's half, and one file
    assert output.count("autotune-loader run: 1 loader in") == 1
    report = json.loads((tmp_path / "report.json").read_text())
    (loader,) = report["loaders"]
    assert loader["name"] == f"job.py:{line_of(PLAIN, 'HERE')}"
    assert loader["batches"] == SIZE // 2 // 8 * EPOCHS
    assert report["notes"][0] == "These are the loaders of rank 0 of 2."
    assert TuningResult.load(tmp_path / "loader.json").found_by == "autoloader"


def test_accelerate_tunes_where_loading_is_done(launch):
    pytest.importorskip("accelerate")
    _, said = launch(PREPARED, 1, "watch", before="import accelerate.utils")
    # THEN where all ranks load they have tuned in lock-step, each with its share of the cores
    assert said[0]["best"] == said[1]["best"]
    share = usable_cores(environ={"LOCAL_WORLD_SIZE": "2"}).usable
    for each in said:
        assert each["workers"] == said[0]["best"]["num_workers"]
        assert each["cores"] == share
        assert each["probes"] == 1
        # AND where rank 0 loads for both, that is refused with what to try
        assert "dispatch_batches=False) with a sharded dataset." in each["refused"]
