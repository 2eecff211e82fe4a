"""The training step: what it returns decides what is left to do, few forms are read from batch and model, the rest is asked."""

import functools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autotune_loader.bursts.step import StepError, StepInferenceError, build_step
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values import Measurement, WorkloadError
from tests.support.bursts import ALONE, QUICK, measured, opened, run, workload

N, IN, CLASSES = 6, 4, 3
X, Y = torch.rand(N, IN), torch.randint(0, CLASSES, (N,))
IMAGES, MASKS = torch.rand(N, 2, 5, 5), torch.randint(0, CLASSES, (N, 5, 5))
COMPLETED = ", then backward and SGD.step()"


def trained(batch, **side):
    """A step that was run on a batch a few times, as the warm-up does."""
    step = build_step(TrainingSide(**side), batch)
    for _ in range(3):
        step.run(batch)
    return step


# A GradScaler whose first step overflows, as at first in half precision: it steps no optimizer.
SCALED = (
    "scaler = torch.amp.GradScaler('cpu', init_scale=1e38); optimizer.zero_grad(); scaler.scale(loss * 10).backward(); "
    "scaler.step(optimizer); scaler.update(); return loss"
)
LOOP = "optimizer.zero_grad(); loss.backward(); optimizer.step()"


@pytest.mark.parametrize(
    ("body", "is_given", "says", "steps"),
    [
        ("return loss", True, COMPLETED, 3),
        (
            "return loss",
            False,
            COMPLETED,
            0,
        ),  # at a rate of zero: the time of a step, and no change
        ("return {'loss': loss, 'log': 1}", True, COMPLETED, 3),
        (LOOP, False, "", 3),
        (f"{LOOP}; return loss", True, "", 3),
        (SCALED, True, "", 0),
        # gone backward already, though its graph is still there
        (LOOP.replace("backward()", "backward(retain_graph=True)") + "; return loss", True, "", 3),
        (
            LOOP.replace("backward()", "backward(retain_graph=True)")
            + "; optimizer.zero_grad(); return loss",
            True,
            "",
            3,
        ),
        (f"loss = checkpoint(loss.add, 1, use_reentrant=False); {LOOP}; return loss", True, "", 3),
        # gone backward in a part of it, as for another loss
        ("model.bias.sum().backward(); return loss", True, COMPLETED, 3),
    ],
)
def test_a_train_step_is_done_once_and_completed_by_what_it_returns(body, is_given, says, steps):
    # GIVEN a loop that goes on so once it has a loss, and perhaps an optimizer that was given to tune() as well
    names = {"torch": torch, "cross_entropy": functional.cross_entropy, "checkpoint": checkpoint}
    exec(
        f"def go(model, optimizer, batch):\n    loss = cross_entropy(model(batch[0]), batch[1])\n    {body}",
        names,
    )
    model, calls, stepped = nn.Linear(IN, CLASSES), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))

    def train_step(model, batch):
        calls.append(1)
        return names["go"](model, optimizer, batch)

    step = trained(
        (X, Y), model=model, train_step=train_step, optimizer=optimizer if is_given else None
    )
    assert (len(calls), len(stepped), step.description) == (
        3,
        steps,
        f"train_step(model, batch){says}",
    )
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())


@pytest.mark.parametrize("is_own", [True, False])
def test_each_step_casts_its_weights_anew_and_goes_backward_outside_of_autocast(is_own):
    model, outputs, off = nn.Linear(IN, CLASSES), [], []

    def keep(model, args, output):
        outputs.append(output)
        output.register_hook(lambda grad: off.append(not torch.is_autocast_enabled("cpu")))

    model.register_forward_hook(keep)
    optimizer = functools.partial(torch.optim.SGD, lr=1.0)
    own = (
        {"train_step": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])}
        if is_own
        else {}
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained((X, Y), model=model, optimizer=optimizer, **own)
    # THEN the weights of the second step are not those that were cast in the first
    assert not torch.equal(outputs[0], outputs[1])
    assert {output.dtype for output in outputs} == {torch.bfloat16}
    assert off == [True] * 3


class Model(nn.Module):
    """A layer, and what a function makes of its output and of targets."""

    def __init__(self, wrap, layer=None):
        super().__init__()
        self.layer, self.wrap = layer or nn.Linear(IN, CLASSES), wrap

    def forward(self, inputs, labels=None):
        logits = self.layer(inputs)
        return (
            self.wrap(logits)
            if labels is None
            else self.wrap(logits, functional.cross_entropy(logits, labels))
        )


class OutputOnly(Model):
    def forward(self, image):
        return super().forward(image)


def pair(logits, loss=None):
    """As nanoGPT."""
    return logits, loss


def with_loss(logits, loss=None):
    """As of transformers: an object with the loss."""
    return SimpleNamespace(logits=logits, loss=loss)


plain, CONV = functools.partial(nn.Linear, IN, CLASSES), nn.Conv2d(2, CLASSES, 1)
SMOOTHED = functools.partial(functional.cross_entropy, label_smoothing=0.1)
ENTROPY = "cross_entropy(model(x), y)"


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn", "says"),
    [
        (plain(), (X, Y), None, ENTROPY),
        (nn.DataParallel(plain()), (X, Y), None, ENTROPY),
        (nn.Linear(IN, 1), (X, Y > 1), None, "binary_cross_entropy_with_logits(model(x), y)"),
        (nn.Linear(IN, 1), (X, torch.rand(N).double()), None, "mse_loss(model(x), y)"),
        (CONV, (IMAGES, MASKS), None, ENTROPY),
        (plain(), (torch.rand(N, 7, IN), torch.zeros(N, 7).long()), None, ENTROPY),  # tokens
        (OutputOnly(pair), [X, Y.byte()], None, ENTROPY),
        (plain(), (X, Y), SMOOTHED, ENTROPY),
        (
            OutputOnly(pair),
            (X, Y),
            lambda out, y: functional.cross_entropy(out[0], y),
            "<lambda>(model(x), y)",
        ),
        (Model(pair), (X, Y), None, "model(x, y)"),
        (Model(pair), (X, Y), nn.CrossEntropyLoss(), "CrossEntropyLoss(model(x), y)"),
        (Model(with_loss), {"inputs": X, "labels": Y}, None, "model(**batch).loss"),
    ],
)
def test_a_customary_batch_and_model_are_trained_as_is_shown(model, batch, loss_fn, says):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = trained(
        batch, model=model, loss_fn=loss_fn, optimizer=functools.partial(torch.optim.SGD, lr=0.1)
    )
    assert (step.description, step.notes) == (f"{says}{COMPLETED}", [])
    assert any(
        not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True)
    )


@pytest.mark.parametrize(
    ("model", "loss_fn", "batch"),
    [
        (plain(), None, object()),
        (plain(), None, (X, X, Y)),
        (nn.Bilinear(IN, IN, CLASSES), nn.CrossEntropyLoss(), (X, Y)),
        (nn.Linear(IN, IN), nn.MSELoss(), X),  # an autoencoder's, or of the output alone
        (Model(with_loss), nn.CrossEntropyLoss(), {"inputs": X, "labels": Y}),
        (plain(), None, (X, torch.rand(N, 7))),
        (OutputOnly(lambda out: {"a": out, "b": out}), None, (X, Y)),
        (nn.Linear(9, 2), None, (X, Y)),
    ],
)
def test_what_is_not_customary_is_asked_for_in_one_sentence(model, loss_fn, batch):
    with pytest.raises(
        StepInferenceError, match=r"^[^\n]*pass train_step=lambda model, batch: \.\.\.[^\n]*$"
    ):
        trained(batch, model=model, loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("act", "raised"),
    [
        (lambda: 1 / 0, StepError),
        (lambda: sys.exit(2), StepError),
        (lambda: torch.empty(1 << 60), RuntimeError),  # a lack of memory is no fault of the step
    ],
)
def test_an_error_of_the_users_own_step_is_told_from_a_lack_of_memory(act, raised):
    with pytest.raises(raised):
        trained((X, Y), model=plain(), train_step=lambda model, batch: act())


def test_a_train_step_gets_the_batch_as_the_loader_gives_it_and_that_nothing_is_trained_is_said():
    seen = []
    build_step(
        TrainingSide(train_step=lambda model, batch: seen.append(batch), device="meta"), X
    ).run(X)
    assert seen[0] is X
    moved = build_step(TrainingSide(model=plain(), device="meta"), (X, Y)).move((X, Y))
    assert moved[0].device.type == "meta"
    assert "nothing is trained" in trained((X, Y), model=plain().requires_grad_(False)).notes[0]


@pytest.mark.process
def test_a_step_may_take_things_out_of_its_batch():
    side = TrainingSide(train_step=lambda model, batch: batch.pop("labels"))
    with opened(workload([{"x": X[0], "labels": 1}] * 64, training=side)) as found:
        measured(found.probe)
        assert isinstance(found.probe.step_ceiling(QUICK), Measurement)


@pytest.mark.process
def test_a_step_that_raises_later_ends_the_run_as_training_would():
    left = iter(range(30))
    side = TrainingSide(train_step=lambda model, batch: 1 / (29 - next(left)))
    with pytest.raises(WorkloadError, match="ZeroDivisionError: division by zero"):
        run(workload([X[0]] * 64, training=side), *[ALONE] * 9)
