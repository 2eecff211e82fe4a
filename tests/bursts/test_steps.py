"""The training step: what it returns decides what is left to do, few forms are read from batch and model, the rest is asked."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune_loader.bursts.step import StepError, StepInferenceError, TrainingStep, build_step
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.errors import WorkloadError
from tests.support.bursts import measured, opened, workload

N, IN, CLASSES = 6, 4, 3
X, Y = torch.rand(N, IN), torch.randint(0, CLASSES, (N,))
IMAGES, MASKS = torch.rand(N, 2, 5, 5), torch.randint(0, CLASSES, (N, 5, 5))


def trained(batch: Any, runs: int = 3, **side: Any) -> TrainingStep:
    """A step that was run on a batch a few times, as the warm-up does."""
    step = build_step(TrainingSide(**side), batch)
    for _ in range(runs):
        step.run(batch)
    return step


def linear(out: int = CLASSES) -> nn.Linear:
    return nn.Linear(IN, out)


def own_step(body: str) -> Callable[..., Any]:
    """The step of a training loop that goes on so once it has a loss."""
    text = f"def step(model, optimizer, batch):\n    loss = cross_entropy(model(batch[0]), batch[1])\n    {body}"
    names = {"torch": torch, "cross_entropy": functional.cross_entropy}
    exec(text, names)
    return names["step"]


# A GradScaler whose first step overflows, as at first in half precision: it steps no optimizer.
SCALED = (
    "scaler = torch.amp.GradScaler('cpu', init_scale=1e38); optimizer.zero_grad(); scaler.scale(loss * 10).backward(); "
    "scaler.step(optimizer); scaler.update(); return loss"
)
LOOP = "optimizer.zero_grad(); loss.backward(); optimizer.step()"
COMPLETED = ", then backward and SGD.step()"


@pytest.mark.parametrize(
    ("body", "is_given", "says", "steps"),
    [
        ("return loss", True, COMPLETED, 3),
        ("return loss", False, COMPLETED, 0),  # at a rate of zero: the time of a step, and no change
        ("return {'loss': loss, 'log': 1}", True, COMPLETED, 3),
        ("return model(batch[0]), loss", True, COMPLETED, 3),
        (LOOP, False, "", 3),
        (f"{LOOP}; return loss", True, "", 3),
        (f"{LOOP}; return loss.item()", True, "", 3),
        (SCALED, True, "", 0),
        (SCALED, False, "", 0),
    ],
)
def test_a_train_step_is_done_once_and_completed_by_what_it_returns(
    body: str, is_given: bool, says: str, steps: int
) -> None:
    model, calls, stepped, run = linear(), list[int](), list[int](), own_step(body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))

    def train_step(model: Any, batch: Any) -> Any:
        calls.append(1)
        return run(model, optimizer, batch)

    # WHEN it is run three times, and perhaps its optimizer was given to tune() as well
    step = trained((X, Y), model=model, train_step=train_step, optimizer=optimizer if is_given else None)
    # THEN it was called once for each batch, also for the first, and the optimizer has stepped as often or never
    assert (len(calls), len(stepped)) == (3, steps)
    assert step.description == f"train_step(model, batch){says}"


class WithTargets(nn.Module):
    """As nanoGPT: logits and, where it is given targets, the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Any, targets: Any = None) -> Any:
        logits = self.layer(x)
        return logits, None if targets is None else functional.cross_entropy(logits, targets)


class WithLoss(WithTargets):
    """As of transformers: an object with the loss."""

    def forward(self, inputs: Any, labels: Any = None) -> Any:
        logits, loss = super().forward(inputs, labels)
        return type("Output", (dict,), {"loss": loss, "logits": logits})(logits=logits, loss=loss)


class Parts(nn.Module):
    def __init__(self, wrap: Callable[[Any], Any], body: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.wrap = body or linear(), wrap

    def forward(self, image: Any) -> Any:
        return self.wrap(self.body(image))


CONV = nn.Conv2d(2, CLASSES, 1)
SMOOTHED = functools.partial(functional.cross_entropy, label_smoothing=0.1)
CLASSES_OF, ONE_LOGIT = "cross_entropy(model(x), y)", "binary_cross_entropy_with_logits(model(x), y)"
OWN = (Parts(lambda o: (o, o)), (X, Y), lambda o, y: functional.cross_entropy(o[0], y), "<lambda>(model(x), y)")


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn", "says"),
    [
        pytest.param(linear(), (X, Y), None, CLASSES_OF, id="classes"),
        pytest.param(nn.DataParallel(linear()), (X, Y), None, CLASSES_OF, id="DataParallel"),
        pytest.param(linear(1), (X, Y > 1), None, ONE_LOGIT, id="one logit"),
        pytest.param(linear(1), (X, torch.rand(N).double()), None, "mse_loss(model(x), y)", id="regression"),
        pytest.param(CONV, (IMAGES, MASKS), None, CLASSES_OF, id="masks"),
        pytest.param(linear(), (torch.rand(N, 7, IN), torch.zeros(N, 7).long()), None, CLASSES_OF, id="tokens"),
        pytest.param(Parts(lambda o: (o, o)), [X, Y.byte()], None, CLASSES_OF, id="first of a tuple"),
        pytest.param(Parts(lambda o: {"out": o}, CONV), (IMAGES, MASKS), None, CLASSES_OF, id="logits in a dict"),
        pytest.param(linear(), (X, Y), SMOOTHED, CLASSES_OF, id="a loss with options"),
        pytest.param(*OWN, id="own loss"),
        pytest.param(WithTargets(), (X, Y), None, "model(x, y)", id="model(x, y)"),
        pytest.param(
            WithTargets(), (X, Y), nn.CrossEntropyLoss(), "CrossEntropyLoss(model(x), y)", id="loss of torch's"
        ),
        pytest.param(WithLoss(), {"inputs": X, "labels": Y}, None, "model(**batch).loss", id="dict with .loss"),
    ],
)
def test_a_customary_batch_and_model_are_trained_as_is_shown(model: Any, batch: Any, loss_fn: Any, says: str) -> None:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    step = trained(batch, model=model, loss_fn=loss_fn, optimizer=sgd)
    assert (step.description, step.notes) == (f"{says}{COMPLETED}", [])
    assert any(not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("model", "loss_fn", "batch"),
    [
        (linear(), None, object()),
        (linear(), None, (X, X, Y)),
        (nn.Bilinear(IN, IN, CLASSES), nn.CrossEntropyLoss(), (X, Y)),
        (nn.Linear(IN, IN), nn.MSELoss(), X),  # an autoencoder's, or of the output alone
        (linear(), None, {"image": X, "label": Y}),
        (WithLoss(), nn.CrossEntropyLoss(), {"inputs": X, "labels": Y}),
        (linear(), None, (X, torch.rand(N, 7))),
        (Parts(lambda o: {"a": o, "b": o}), None, (X, Y)),
        (nn.Linear(9, 2), None, (X, Y)),
    ],
)
def test_what_is_not_customary_is_asked_for_in_one_sentence(model: Any, loss_fn: Any, batch: Any) -> None:
    with pytest.raises(StepInferenceError, match=r"^[^\n]*pass train_step=lambda model, batch: \.\.\.[^\n]*$"):
        trained(batch, model=model, loss_fn=loss_fn)


def test_a_step_without_a_gradient_is_said() -> None:
    frozen = trained((X, Y), model=linear().requires_grad_(False))
    assert "nothing is trained" in frozen.notes[0]


@pytest.mark.parametrize(
    ("act", "raised"),
    [
        (lambda: 1 / 0, StepError),
        (lambda: sys.exit(2), StepError),
        (lambda: torch.empty(1 << 60), RuntimeError),  # a lack of memory is no fault of the step
    ],
)
def test_an_error_of_the_users_own_step_is_told_from_a_lack_of_memory(act: Any, raised: type[Exception]) -> None:
    with pytest.raises(raised):
        trained((X, Y), model=linear(), train_step=lambda model, batch: act())


def test_a_train_step_gets_the_batch_as_the_loader_gives_it() -> None:
    seen: list[Any] = []
    own = build_step(TrainingSide(train_step=lambda model, batch: seen.append(batch), device="meta"), X)
    own.run(X)
    assert seen[0] is X
    moved = build_step(TrainingSide(model=linear(), device="meta"), (X, Y))
    assert (own.moves, moved.moves) == (False, True)
    assert moved.move((X, Y))[0].device.type == "meta"


@pytest.mark.process
def test_a_step_that_raises_later_ends_the_run_as_training_would() -> None:
    done = {"steps": 0}

    def step(model: Any, batch: Any) -> None:
        done["steps"] += 1
        if done["steps"] == 30:
            raise IndexError("Target 99 is out of bounds.")

    says = pytest.raises(WorkloadError, match="IndexError: Target 99 is out of bounds")
    with opened(workload([X[0]] * 64, training=TrainingSide(train_step=step))) as probe, says:
        for _ in range(9):
            measured(probe.probe)
