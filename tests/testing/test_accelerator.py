"""The simulated accelerator is what CUDA is where tests rely on it.

It is asynchronous, and gives memory that is freed away at once.
"""

import os

import pytest
import torch

from autotune_loader.bursts.failures import failure_of, has_lost_device, is_of_user

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("simulated")]

AHEAD_S, WORK_S = 0.2, 0.03  # the device is behind the host, so that a late host changes nothing
BYTES = 1_000_000


def trained(device, num_workers):
    """Losses of a model that has what models have, from a loader that pins."""
    torch.manual_seed(0)
    samples, classes = torch.randn(48, 3, 8, 8), torch.arange(48) % 5
    nn = torch.nn
    seen = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*seen, nn.Linear(144, 5)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(samples, classes)
    # torch 2.6 pins for CUDA alone where it is not told
    pinning = {"pin_memory": True, "pin_memory_device": "sim"}
    loader = torch.utils.data.DataLoader(data, 16, num_workers=num_workers, **pinning)
    losses = []
    for _ in range(5):
        for batch, wanted in loader:
            assert batch.is_pinned()
            found = model(batch.to(device, non_blocking=True))
            loss = nn.functional.cross_entropy(found, wanted.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_a_model_trains_as_on_the_cpu(simulated):
    on_cpu, losses, hazards = simulated.call(
        lambda: (trained("cpu", 0), trained("sim", 1), torch.sim.hazards())
    )
    assert losses == pytest.approx(on_cpu, rel=1e-4)
    assert losses[-1] < losses[0] / 2
    assert hazards == []


def timed(launch, wait=lambda end: None):
    """Whether the host went on meanwhile, the device's milliseconds, and whether a wait waited."""
    begin, end = (torch.sim.Event(enable_timing=True, blocking=True) for _ in "01")
    torch.sim.work(AHEAD_S)
    begin.record(torch.sim.current_stream("sim"))
    launch()
    end.record()
    goes_on = not end.query()
    wait(end)
    has_waited = end.query()
    end.synchronize()
    return goes_on, begin.elapsed_time(end), has_waited


def waited():
    waits = {
        "event": lambda end: end.synchronize(),
        "device": lambda end: torch.sim.synchronize("sim:0"),
        "stream": lambda end: torch.sim.current_stream().synchronize(),
        "item": lambda end: torch.ones(1, device="sim").item(),
        "copy": lambda end: torch.ones(1, device="sim").cpu(),
    }
    return {name: timed(lambda: torch.sim.work(WORK_S), wait) for name, wait in waits.items()}


def test_the_host_goes_on_until_it_waits(simulated):
    for name, (goes_on, took_ms, has_waited) in simulated.call(waited).items():
        assert goes_on, name
        assert took_ms == pytest.approx(1e3 * WORK_S, rel=0.01), name
        assert has_waited, name


def copied(to_device, pinned, non_blocking):
    torch.sim.configure(bytes_per_s=BYTES / WORK_S, pageable_slower=2)
    here = torch.zeros(BYTES, dtype=torch.uint8, pin_memory=pinned)
    there = torch.zeros(BYTES, dtype=torch.uint8, device="sim")
    source, target = (here, there) if to_device else (there, here)
    torch.sim.synchronize()
    return timed(lambda: target.copy_(source, non_blocking=non_blocking))


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize(
    ("pinned", "non_blocking", "does_overlap", "times"),
    [(True, True, True, 1), (True, False, False, 1), (False, True, False, 2)],
)
def test_copies_overlap_from_pinned_memory_only(
    simulated, to_device, pinned, non_blocking, does_overlap, times
):
    goes_on, took_ms, _ = simulated.call(copied, to_device, pinned, non_blocking)
    assert goes_on == does_overlap
    assert took_ms >= 0.99e3 * WORK_S * times
    # a host that has waited lays the mark behind the copy as late as it is
    assert took_ms <= 1.01e3 * WORK_S * times or not goes_on


def prefetched(copy_s, left_out, reads):
    """Milliseconds of four batches that are copied on a stream of their own, and hazards."""
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

    return timed(steps)[1], torch.sim.hazards()


def one(moved): ...
def many(moved):
    torch.stack([moved, moved])


@pytest.mark.parametrize(
    ("copies_per_step", "left_out", "hazard", "reads"),
    [
        (1, None, None, one),
        (0.25, None, None, many),
        (2, "wait_event", "read before it is written", one),
        (2, "wait_event", "read before it is written", many),
        (0.25, "wait_stream", "written while in use", torch.sum),
    ],
)  # fmt: skip
def test_a_missing_wait_is_a_hazard(simulated, copies_per_step, left_out, hazard, reads):
    took_ms, hazards = simulated.call(prefetched, WORK_S * copies_per_step, left_out, reads)
    assert bool(hazards) is bool(hazard)
    assert all(hazard in each for each in hazards)
    if copies_per_step == 1:  # one copy comes before the first step; the others lie beside steps
        assert took_ms == pytest.approx(1e3 * WORK_S * 5, rel=0.01)


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
    """What calls say to a process that has lost the device, or is a fork of one that uses it."""
    tensor, event = torch.ones(1, device="sim"), torch.sim.current_stream().record_event()
    reader, writer = os.pipe()
    if is_lost:
        torch.sim.fail()
    elif os.fork():
        os.wait()
        return eval(os.read(reader, 10_000))
    said = {}
    for name, call in CALLS.items():
        try:
            call(tensor, event)
        except RuntimeError as error:
            is_of_device = has_lost_device(failure_of(error, "step"))
            said[name] = is_of_device, is_of_user(error), torch.sim._is_in_bad_fork()
    if is_lost:
        return said
    os.write(writer, repr(said).encode())
    os._exit(0)


@pytest.mark.parametrize("is_lost", [True, False], ids=["kernel failed", "forked"])
def test_a_lost_device_refuses_every_use(simulated, is_lost):
    expected = (True, True, False) if is_lost else (False, False, True)
    assert simulated.call(refused, is_lost) == dict.fromkeys(CALLS, expected)
