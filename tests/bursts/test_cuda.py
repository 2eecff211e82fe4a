"""Bursts and tuning on a real GPU: what only a device can say. `sh studies/gpu/run.sh` runs these.

The logic is tested on any machine by a fake device (test_loop.py) and a simulated one
(tests/system/test_accelerated.py).
"""

import pytest
import torch

from autotune_loader import tune
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values import BurstPlan, LoaderConfig, WorkloadError
from tests.support.bursts import ALONE, measured, opened, workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

PLAN = BurstPlan(max_s=0.5, min_s=0.2, relative_error=0.05, deadline_s=60.0)
PINNED = LoaderConfig(num_workers=2, pin_memory=True)
STEP_CYCLES = 15_000_000  # about 10 ms on a GPU of 1 to 2 GHz
ROWS = [torch.arange(16, dtype=torch.float32)] * 256


def train(model, batch):
    return model(batch.to("cuda", non_blocking=True)).square().mean()


def on_gpu(dataset=ROWS, **training):
    side = TrainingSide(**{"device": "cuda", "train_step": train, **training})
    return opened(workload(dataset, 8, side))


def test_a_burst_has_the_devices_times_and_memory():
    # GIVEN a step of which the host sees only the launch
    def slow_loss(output, target):
        torch.cuda._sleep(STEP_CYCLES)
        return (output - target).square().mean()

    pairs = [(row, row[:4]) for row in ROWS]
    with on_gpu(pairs, model=torch.nn.Linear(16, 4), train_step=None, loss_fn=slow_loss) as probe:
        ceiling = probe.probe.step_ceiling(PLAN)
        burst = measured(probe.probe, PINNED, PLAN)
    # THEN ceiling and burst have the device's time
    assert burst.step_s > 0.002
    assert burst.step_s == pytest.approx(ceiling.step_s, rel=0.2)
    assert burst.gpu_memory_bytes is not None
    # THEN it knows what NVML tells, which is of all processes, or one sentence says why not
    is_told = (burst.gpu_used_bytes or 0) > burst.gpu_memory_bytes
    assert is_told or any("NVML" in note for note in probe.notes)
    assert burst.gpu_utilization is None or 0 < burst.gpu_utilization <= 1
    # THEN the device was at work for the share of its step in its cycle
    assert burst.gpu_busy_share == pytest.approx(1 - burst.wait_share, abs=0.05)


def out_of_memory():
    torch.empty(1 << 42, device="cuda")


def failing_kernel():
    """After it every CUDA call of the process fails."""
    index = torch.full((4,), 99, device="cuda")
    torch.zeros(4, device="cuda")[index].sum().item()


@pytest.mark.parametrize(
    ("trouble", "says"), [(out_of_memory, "smaller batch"), (failing_kernel, "side assert")]
)
def test_trouble_costs_one_burst_and_its_process(trouble, says, tmp_path):
    demand = tmp_path / "demand"

    def step(model, batch):
        if demand.exists():
            trouble()
        return train(model, batch)

    with on_gpu(model=torch.nn.Linear(16, 4), train_step=step) as probe:
        demand.touch()
        try:
            failed = probe.probe.burst(PINNED, PLAN)
        except WorkloadError as error:  # a kernel that fails is the step's own error
            failed = error
        assert says in failed.message
        demand.unlink()
        measured(probe.probe, PINNED, PLAN)


def test_a_compiled_model_is_warm_before_bursts():
    def in_half(model, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return train(model, batch)

    layers = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    with on_gpu(model=torch.compile(torch.nn.Sequential(*layers)), train_step=in_half) as probe:
        assert max(trace.step_s for trace in measured(probe.probe, ALONE, PLAN).traces) < 1.0


def test_tune_searches_the_roads_to_the_device():
    options = {"max_workers": 1, "allow": ("device_prefetch",), "budget": 20, "progress": False}
    result = tune(ROWS, torch.nn.Linear(16, 4).cuda(), train_step=train, batch_size=8, **options)
    assert result.machine.gpu == torch.cuda.get_device_name()
    assert any(trial.config.pin_memory for trial in result.trials)
    taken = [trial.measurement for trial in result.trials if trial.measurement is not None]
    assert all(each.gpu_memory_bytes for each in taken)
    assert next(iter(result.make_loader(ROWS, device="cuda"))).shape == (8, 16)
