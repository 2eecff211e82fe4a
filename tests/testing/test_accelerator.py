"""The simulated accelerator is what CUDA is where tests rely on it: asynchronous, with memory that is given away at once."""

import os
import subprocess
import sys

import pytest
import torch

from autotune_loader.bursts.failures import failure_of, has_lost_device, is_of_user

pytestmark = pytest.mark.process

WORK_S = 0.05
BYTES = 1_000_000


def trained(device, num_workers):
    """Losses of a model that has what models have, from a loader that pins, and what the device saw."""
    torch.manual_seed(0)
    samples, classes = torch.randn(48, 3, 8, 8), torch.arange(48) % 5
    layers = (
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(144, 5),
    )
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(samples, classes)
    pinning = {
        "pin_memory": True,
        "pin_memory_device": "sim",
    }  # torch 2.6 pins for CUDA alone where it is not told
    losses = []
    for _ in range(5):
        for batch, wanted in torch.utils.data.DataLoader(
            data, 16, num_workers=num_workers, **pinning
        ):
            assert batch.is_pinned()
            found = model(batch.to(device, non_blocking=True))
            loss = torch.nn.functional.cross_entropy(found, wanted.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, torch.sim.hazards()


def test_a_model_trains_and_computes_what_it_computes_on_the_cpu(simulated):
    on_cpu, _ = simulated.call(trained, "cpu", 0)
    losses, hazards = simulated.call(trained, "sim", 1)
    assert losses == pytest.approx(on_cpu, rel=1e-4)
    assert losses[-1] < losses[0] / 2
    assert hazards == []


def timed(launch, wait):
    """Whether the host went on while the device worked, milliseconds of the device, and whether it had done after the wait."""
    begin, end = (torch.sim.Event(enable_timing=True, blocking=True) for _ in "01")
    torch.sim.work(
        WORK_S
    )  # the device is behind the host from here on, so that a busy machine changes nothing
    begin.record(torch.sim.current_stream("sim"))
    launch()
    end.record()
    goes_on = not end.query()
    wait(end)
    passed = end.query()
    end.synchronize()
    return goes_on, begin.elapsed_time(end), passed


WAITS = {
    "event": lambda end: end.synchronize(),
    "device": lambda end: torch.sim.synchronize("sim:0"),
    "stream": lambda end: torch.sim.current_stream().synchronize(),
    "item": lambda end: torch.ones(1, device="sim").item(),
    "copy": lambda end: torch.ones(1, device="sim").cpu(),
}


def waited(name):
    return timed(lambda: torch.sim.work(WORK_S), WAITS[name])


@pytest.mark.parametrize("wait", WAITS)
def test_work_takes_its_time_and_the_host_goes_on_until_it_waits(simulated, wait):
    assert simulated.call(waited, wait) == (True, pytest.approx(1e3 * WORK_S, rel=0.05), True)


def copied(to_device, pinned, non_blocking):
    torch.sim.configure(bytes_per_s=BYTES / WORK_S, pageable_slower=2)
    here = torch.zeros(BYTES, dtype=torch.uint8, pin_memory=pinned)
    there = torch.zeros(BYTES, dtype=torch.uint8, device="sim")
    source, target = (here, there) if to_device else (there, here)
    torch.sim.synchronize()
    return timed(lambda: target.copy_(source, non_blocking=non_blocking), lambda end: None)[:2]


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize(
    ("pinned", "non_blocking", "goes_on", "times"),
    [(True, True, True, 1), (True, False, False, 1), (False, True, False, 2)],
)
def test_copies_overlap_from_pinned_memory_only(
    simulated, to_device, pinned, non_blocking, goes_on, times
):
    took_ms = pytest.approx(1e3 * WORK_S * times, rel=0.05)
    assert simulated.call(copied, to_device, pinned, non_blocking) == (goes_on, took_ms)


def prefetched(copy_s, left_out, reads):
    """Milliseconds of four batches that are copied beside the step before them, on a stream of their own."""
    torch.sim.configure(bytes_per_s=BYTES / copy_s)
    lane, training = torch.sim.Stream("sim"), torch.sim.current_stream()
    batches = [torch.zeros(BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(5)]

    def send(batch):
        if left_out != "wait_stream":
            lane.wait_stream(training)
        with torch.sim.stream(lane):
            return batch.to("sim", non_blocking=True), lane.record_event()

    def steps():
        ahead = send(batches[0])
        for batch in batches[1:]:
            moved, done = ahead
            ahead = send(batch)
            if left_out != "wait_event":
                training.wait_event(done)
            reads(moved)
            torch.sim.work(WORK_S, moved)
            del moved

    return timed(steps, lambda end: None)[1], torch.sim.hazards()


WORK, KERNEL, LIST = (
    (lambda moved: None),
    (lambda moved: moved.sum()),
    (lambda moved: torch.stack([moved, moved])),
)


@pytest.mark.parametrize(
    ("copies_per_step", "left_out", "hazard", "reads"),
    [
        (1, None, None, WORK),
        (2, None, None, KERNEL),
        (0.25, None, None, LIST),
        *((2, "wait_event", "read before it is written", each) for each in (WORK, KERNEL, LIST)),
        (0.25, "wait_stream", "written while in use", KERNEL),
    ],
)
def test_a_wait_that_is_left_out_is_a_hazard(simulated, copies_per_step, left_out, hazard, reads):
    took_ms, hazards = simulated.call(prefetched, WORK_S * copies_per_step, left_out, reads)
    assert [each for each in hazards if hazard is None or hazard not in each] == []
    assert bool(hazards) is bool(hazard)
    if copies_per_step == 1:  # one copy comes before the first step; the others lie beside steps
        assert took_ms == pytest.approx(1e3 * WORK_S * 5, rel=0.05)


CALLS = {
    "launch": lambda tensor, event: torch.sim.work(0.1),
    "kernel": lambda tensor, event: tensor + 1,
    "copy": lambda tensor, event: tensor.cpu(),
    "item": lambda tensor, event: tensor.item(),
    "record": lambda tensor, event: event.record(),
    "query": lambda tensor, event: event.query(),
    "event": lambda tensor, event: event.synchronize(),
    "device": lambda tensor, event: torch.sim.synchronize(),
    "stream": lambda tensor, event: torch.sim.current_stream().synchronize(),
    "wait": lambda tensor, event: torch.sim.current_stream().wait_event(event),
    "pin": lambda tensor, event: torch.ones(1).pin_memory(),
    "allocate": lambda tensor, event: torch.empty(1, device="sim"),
}


def refused(is_lost):
    """What each call says to a process that has lost the device, or is a fork of one that uses it."""
    tensor, event = torch.ones(1, device="sim"), torch.sim.current_stream().record_event()
    said = {}
    reader, writer = os.pipe()
    if is_lost or os.fork() == 0:
        if is_lost:
            torch.sim.fail()
        for name, call in CALLS.items():
            try:
                call(tensor, event)
            except RuntimeError as error:
                failed = has_lost_device(failure_of(error, "step")), is_of_user(error)
                said[name] = (*failed, torch.sim._is_in_bad_fork())
        if is_lost:
            return said
        os.write(writer, repr(said).encode())
        os._exit(0)
    os.wait()
    return eval(os.read(reader, 10_000))


@pytest.mark.parametrize("is_lost", [True, False], ids=["kernel failed", "forked"])
def test_a_failed_kernel_and_a_fork_end_every_use_of_the_device(simulated, is_lost):
    expected = (True, True, False) if is_lost else (False, False, True)
    assert simulated.call(refused, is_lost) == dict.fromkeys(CALLS, expected)


def test_any_python_has_the_device_that_has_its_folder(simulated):
    code = "import torch; print(torch.ones(3, device='sim').sum().item(), torch.get_device_module('sim').get_device_name())"
    environ = {**os.environ, "PYTHONPATH": str(simulated.folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert done.stdout.split(" ", 1) == ["3.0", "Simulated accelerator\n"], done.stderr
