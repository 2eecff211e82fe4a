"""The training step: what it returns decides what is left to do, few forms are read from batch and model, the rest is asked."""

from __future__ import annotations

import functools
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


@pytest.mark.parametrize(
    ("body", "is_given", "says", "steps"),
    [
        ("return loss", True, ", then backward and SGD.step()", 3),
        (
            "return loss",
            False,
            ", then backward and SGD.step()",
            0,
        ),  # at a rate of zero: the time of a step, and no change
        ("return {'loss': loss, 'log': 1}", True, ", then backward and SGD.step()", 3),
        ("return model(batch[0]), loss", True, ", then backward and SGD.step()", 3),
        (LOOP, False, "", 3),
        (LOOP, True, "", 3),
        (f"{LOOP}; return loss", True, "", 3),
        (f"{LOOP}; return loss.item()", True, "", 3),
        (f"{LOOP}; return loss.detach()", True, "", 3),
        (SCALED, True, "", 0),
        (SCALED, False, "", 0),
        ("return loss.item()", True, "", 0),
    ],
)
def test_a_train_step_is_done_once_and_completed_by_what_it_returns(
    body: str, is_given: bool, says: str, steps: int
) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped: list[int] = []
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    run = own_step(body)

    def train_step(model: Any, batch: Any) -> Any:
        calls.append(1)
        return run(model, optimizer, batch)

    # WHEN it is run three times, and perhaps its optimizer was given to tune() as well
    step = trained((X, Y), model=model, train_step=train_step, optimizer=optimizer if is_given else None)
    # THEN it was called once for each batch, also for the first, and the optimizer has stepped as often or never
    assert len(calls) == 3
    assert len(stepped) == steps
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


class Detector(nn.Module):
    """As of torchvision: a list of images, and in training a dict of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, images: Any, targets: Any = None) -> Any:
        boxes = torch.stack([self.layer(image.flatten()[:IN]) for image in images])
        return {"loss_box": boxes.abs().mean(), "loss_class": boxes.square().mean()}


BOXES = ([IMAGES[0], IMAGES[1]], [{"boxes": torch.rand(1, 4)}, {"boxes": torch.rand(2, 4)}])
CONV = nn.Conv2d(2, CLASSES, 1)
SMOOTHED = functools.partial(functional.cross_entropy, label_smoothing=0.1)
ONE_LOGIT = "binary_cross_entropy_with_logits(model(x), y)"
# fmt: off
FORMS: list[tuple[str, Any, Any, Any, str]] = [
    ("classes", linear(), (X, Y), None, "cross_entropy(model(x), y)"),
    ("DataParallel", nn.DataParallel(linear()), (X, Y), None, "cross_entropy(model(x), y)"),
    ("uint8 classes", linear(), [X, Y.byte()], None, "cross_entropy(model(x), y)"),
    ("classes (N, 1)", linear(), (X, Y[:, None]), None, "cross_entropy(model(x), y)"),
    ("one logit", linear(1), (X, Y > 1), None, ONE_LOGIT),
    ("regression", linear(), (X, torch.rand(N, CLASSES)), None, "mse_loss(model(x), y)"),
    ("regression (N,)", linear(1), (X, torch.rand(N, dtype=torch.float64)), None, "mse_loss(model(x), y)"),
    ("masks", CONV, (IMAGES, MASKS), None, "cross_entropy(model(x), y)"),
    ("one-logit masks", nn.Conv2d(2, 1, 1), (IMAGES, MASKS > 0), None, ONE_LOGIT),
    ("tokens", linear(), (torch.rand(N, 7, IN), torch.zeros(N, 7).long()), None, "cross_entropy(model(x), y)"),
    ("first of a tuple", Parts(lambda o: (o, o)), (X, Y), None, "cross_entropy(model(x), y)"),
    ("logits in a dict", Parts(lambda o: {"out": o, "aux": o}, CONV), (IMAGES, MASKS), None,
     "cross_entropy(model(x), y)"),
    ("a loss with options", linear(), (X, Y), SMOOTHED, "cross_entropy(model(x), y)"),
    ("a loss of torch's", Parts(lambda o: (o, o)), (X, Y), nn.CrossEntropyLoss(), "CrossEntropyLoss(model(x), y)"),
    ("an own loss", Parts(lambda o: (o, o)), (X, Y), lambda o, y: functional.cross_entropy(o[0], y),
     "<lambda>(model(x), y)"),
    ("model(x, y)", WithTargets(), (X, Y), None, "model(x, y)"),
    ("model(x, y), own loss", WithTargets(), (X, Y), nn.CrossEntropyLoss(), "CrossEntropyLoss(model(x), y)"),
    ("detection", Detector(), BOXES, None, "model(x, y)"),
    ("dict with .loss", WithLoss(), {"inputs": X, "labels": Y}, None, "model(**batch).loss"),
    ("model(batch)", Parts(lambda o: o.square().mean()), X, None, "model(batch)"),
]
# fmt: on


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn", "says"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS]
)
def test_a_customary_batch_and_model_are_trained_as_is_shown(model: Any, batch: Any, loss_fn: Any, says: str) -> None:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    step = trained(batch, model=model, loss_fn=loss_fn, optimizer=sgd)
    assert step.description == f"{says}, then backward and SGD.step()"
    assert step.notes == []
    assert any(not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("model", "loss_fn", "batch"),
    [
        (linear(), None, object()),
        (linear(), None, (X, X, Y)),
        (nn.Bilinear(IN, IN, CLASSES), nn.CrossEntropyLoss(), (X, Y)),
        (linear(), None, X),  # no loss
        (nn.Linear(IN, IN), nn.MSELoss(), X),  # an autoencoder's, or of the output alone
        (linear(), None, {"image": X, "label": Y}),
        (WithLoss(), nn.CrossEntropyLoss(), {"inputs": X, "labels": Y}),
        (linear(), None, (X, torch.rand(N, 7))),
        (linear(), None, (X, ["a"] * N)),
        (Parts(lambda o: {"a": o, "b": o}), None, (X, Y)),
        (nn.Linear(9, 2), None, (X, Y)),
    ],
)
def test_what_is_not_customary_is_asked_for_in_one_sentence(model: Any, loss_fn: Any, batch: Any) -> None:
    with pytest.raises(StepInferenceError) as caught:
        trained(batch, model=model, loss_fn=loss_fn)
    told = str(caught.value)
    assert "pass train_step=lambda model, batch: ..." in told
    assert "\n" not in told


def test_a_step_without_a_gradient_and_a_loss_that_has_no_part_are_said() -> None:
    frozen = trained((X, Y), model=linear().requires_grad_(False))
    assert "nothing is trained" in frozen.notes[0]
    unused = trained((X, Y), model=linear(), loss_fn=nn.MSELoss(), train_step=lambda m, b: m(b[0]).sum())
    assert unused.notes == ["loss_fn is not used: train_step gives the loss."]


def test_an_error_of_the_users_own_step_is_its_cause_and_memory_is_no_fault_of_it() -> None:
    with pytest.raises(StepError) as caught:
        trained((X, Y), model=linear(), train_step=lambda model, batch: 1 / 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def out_of_memory(model: Any, batch: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        trained((X, Y), model=linear(), train_step=out_of_memory)


def test_a_train_step_gets_the_batch_as_the_loader_gives_it() -> None:
    seen: list[Any] = []
    own = build_step(TrainingSide(train_step=lambda model, batch: seen.append(batch), device="meta"), X)
    own.run(X)
    assert seen[0] is X
    assert not own.moves
    moved = build_step(TrainingSide(model=linear(), device="meta"), (X, Y))
    assert moved.moves
    assert moved.move((X, Y))[0].device.type == "meta"


@pytest.mark.process
@pytest.mark.parametrize(
    ("dataset", "training", "says"),
    [
        ([torch.rand(3 + i) for i in range(8)], {}, r"\(pass collate_fn=, or the loader that your library makes"),
        ([{"image": torch.rand(IN)}] * 8, {"model": linear()}, "pass train_step=lambda model, batch"),
        (
            [torch.rand(IN)] * 8,
            {"model": linear(), "train_step": lambda model, batch: model(batch[:0, 0])},
            "mat1|shape",
        ),
    ],
)
def test_what_fails_on_the_first_batch_ends_the_run(dataset: Any, training: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkloadError, match=says), opened(workload(dataset, training=TrainingSide(**training))):
        pass


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
