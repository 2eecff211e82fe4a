"""The training step: what it returns decides what is left to do, few forms are read from batch and
model, the rest is asked."""

import functools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autotune_loader.bursts.step import (
    StepError,
    StepInferenceError,
    build_step,
    customary_loss,
)
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


def plainly(optimizer, loss):
    return loss


def scaled(optimizer, loss):
    """A GradScaler whose first step overflows, as at first in half precision: it steps nothing."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    optimizer.zero_grad()
    scaler.scale(loss * 10).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def of_a_part(optimizer, loss):
    """Goes backward as for another loss."""
    optimizer.param_groups[0]["params"][1].sum().backward()
    return loss


def checkpointed(loss):
    return checkpoint(loss.add, 1, use_reentrant=False)


def late(optimizer, loss):
    """Has no loss at first."""
    seen = vars(optimizer).setdefault("seen", [])
    seen.append(loss)
    return loss if len(seen) > 1 else None


def whole(gives=True, clears=False, made_of=lambda loss: loss, **options):
    """Goes backward and steps itself, and returns its loss or nothing."""

    def go(optimizer, loss):
        optimizer.zero_grad()
        made_of(loss).backward(**options)
        optimizer.step()
        if clears:
            optimizer.zero_grad()
        return loss if gives else None

    return go


@pytest.mark.parametrize(("go", "is_given", "says", "steps"), [
    (plainly, True, COMPLETED, 3),
    (plainly, False, COMPLETED, 0),  # at a rate of zero: the time of a step, and no change
    (lambda optimizer, loss: {"loss": loss, "log": 1}, True, COMPLETED, 3),
    (whole(gives=False), False, "", 3),
    (whole(), True, "", 3),
    (scaled, True, "", 0),
    # gone backward already, though its graph is still there
    (whole(retain_graph=True), True, "", 3),
    (whole(retain_graph=True, clears=True), True, "", 3),
    (whole(made_of=checkpointed), True, "", 3),
    (of_a_part, True, COMPLETED, 3),
    # a loss of nothing that is trained
    (lambda optimizer, loss: loss.detach().requires_grad_(), True, COMPLETED, 3),
    # the first batch says what is left to do
    (late, True, "", 0),
])  # fmt: skip
def test_a_train_step_is_completed_once(go, is_given, says, steps):
    # GIVEN a loop that goes on so once it has a loss, and perhaps gives tune() its optimizer
    model, calls, stepped = nn.Linear(IN, CLASSES), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))

    def train_step(model, batch):
        calls.append(1)
        return go(optimizer, functional.cross_entropy(model(batch[0]), batch[1]))

    given = optimizer if is_given else None
    step = trained((X, Y), model=model, train_step=train_step, optimizer=given)
    assert len(calls) == 3
    assert len(stepped) == steps
    assert step.description == f"train_step(model, batch){says}"
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())


def own_step(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("own", [{"train_step": own_step}, {}], ids=["own", "inferred"])
def test_each_step_casts_its_weights_anew(own):
    model, outputs, off = nn.Linear(IN, CLASSES), [], []

    def keep(model, args, output):
        outputs.append(output)
        output.register_hook(lambda grad: off.append(not torch.is_autocast_enabled("cpu")))

    model.register_forward_hook(keep)
    optimizer = functools.partial(torch.optim.SGD, lr=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained((X, Y), model=model, optimizer=optimizer, **own)
    # THEN the weights of the second step are not those that were cast in the first
    assert not torch.equal(outputs[0], outputs[1])
    assert {output.dtype for output in outputs} == {torch.bfloat16}
    # AND it goes backward outside of autocast
    assert off == [True] * 3


class Model(nn.Module):
    """A layer, and what a function makes of its output and of targets."""

    def __init__(self, wrap, layer=None):
        super().__init__()
        self.layer, self.wrap = layer or nn.Linear(IN, CLASSES), wrap

    def forward(self, inputs, labels=None):
        logits = self.layer(inputs)
        losses = () if labels is None else (functional.cross_entropy(logits, labels),)
        return self.wrap(logits, *losses)


class OutputOnly(Model):
    def forward(self, image):
        return super().forward(image)


def pair(logits, loss=None):
    """As nanoGPT."""
    return logits, loss


def with_loss(logits, loss=None):
    """As of transformers: an object with the loss."""
    return SimpleNamespace(logits=logits, loss=loss)


def of_the_first(output, y):
    return functional.cross_entropy(output[0], y)


plain, CONV = functools.partial(nn.Linear, IN, CLASSES), nn.Conv2d(2, CLASSES, 1)
SMOOTHED = functools.partial(functional.cross_entropy, label_smoothing=0.1)
ENTROPY, OF_ONE = "cross_entropy(model(x), y)", "binary_cross_entropy_with_logits(model(x), y)"
TOKENS = torch.rand(N, 7, IN), torch.zeros(N, 7).long()
NAMED = {"inputs": X, "labels": Y}


@pytest.mark.parametrize(("model", "batch", "loss_fn", "says"), [
    (plain(), (X, Y), None, ENTROPY),
    (nn.DataParallel(plain()), (X, Y), None, ENTROPY),
    (nn.Linear(IN, 1), (X, Y > 1), None, OF_ONE),
    (nn.Linear(IN, 1), (X, torch.rand(N).double()), None, "mse_loss(model(x), y)"),
    (CONV, (IMAGES, MASKS), None, ENTROPY),
    (plain(), TOKENS, None, ENTROPY),
    (OutputOnly(pair), [X, Y.byte()], None, ENTROPY),
    (plain(), (X, Y), SMOOTHED, ENTROPY),
    (OutputOnly(pair), (X, Y), of_the_first, "of_the_first(model(x), y)"),
    (Model(pair), (X, Y), None, "model(x, y)"),
    (Model(pair), (X, Y), nn.CrossEntropyLoss(), "CrossEntropyLoss(model(x), y)"),
    (Model(with_loss), NAMED, None, "model(**batch).loss"),
])  # fmt: skip
def test_a_customary_batch_is_trained_as_shown(model, batch, loss_fn, says):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    step = trained(batch, model=model, loss_fn=loss_fn, optimizer=optimizer)
    assert step.description == f"{says}{COMPLETED}"
    assert step.notes == []
    assert not all(map(torch.equal, model.parameters(), before))


SHAPES = "mat1 and mat2 shapes cannot be multiplied (6x4 and 9x2)"


def test_classes_are_the_second_dimension():
    answer, target = torch.rand(2, 3, 3), torch.randint(3, (2, 3))
    assert customary_loss(answer, target)[1] == functional.cross_entropy(answer, target)


@pytest.mark.parametrize(("model", "loss_fn", "batch", "says"), [
    (plain(), None, object(), "The step for a batch of type object cannot be inferred"),
    (plain(), None, (X, X, Y), "The step for a tuple of 3: tensor [6, 4], tensor [6, 4], tensor [6]"
        " cannot be inferred"),
    (nn.Bilinear(IN, IN, CLASSES), nn.CrossEntropyLoss(), (X, Y),
        "Inferred step CrossEntropyLoss(model(x), y) failed on a tuple of 2: tensor [6, 4], tensor"
        " [6]: TypeError: Bilinear.forward() missing 1 required positional argument: 'input2'"),
    # an autoencoder's, or of the output alone
    (nn.Linear(IN, IN), nn.MSELoss(), X, "The step for a tensor [6, 4] cannot be inferred"),
    (Model(with_loss), nn.CrossEntropyLoss(), NAMED,
        "The step for a dict with keys inputs, labels cannot be inferred"),
    (Model(lambda logits, loss: logits), None, NAMED,
        "The model returns no loss, and its loss cannot be inferred from the batch"),
    (plain(), None, (X, torch.rand(N, 7)),
        "The loss of an output of shape [6, 3] and a tensor of shape [6, 7] cannot be inferred"),
    (plain(), None, (X, ["a"] * N),
        "The loss of an output of shape [6, 3] and list cannot be inferred"),
    (OutputOnly(lambda out: {"a": out, "b": out}), None, (X, Y),
        "The loss cannot be inferred from the model's output"),
    (nn.Linear(9, 2), None, (X, Y), "Inferred step loss(model(x), y) failed on a tuple of 2: "
        f"tensor [6, 4], tensor [6]: RuntimeError: {SHAPES}"),
])  # fmt: skip
def test_what_is_not_customary_is_asked_for(model, loss_fn, batch, says):
    with pytest.raises(StepInferenceError) as caught:
        trained(batch, model=model, loss_fn=loss_fn)
    mark = ";" if "failed" in says else ":"
    asks = "pass train_step=lambda model, batch: ..., which returns the loss"
    assert str(caught.value) == f"{says}{mark} {asks}"


@pytest.mark.parametrize(("act", "raised"), [
    (lambda: 1 / 0, StepError),
    (lambda: sys.exit(2), StepError),
    (lambda: torch.empty(1 << 60), RuntimeError),  # a lack of memory is no fault of the step
])  # fmt: skip
def test_an_error_of_the_users_step_is_told(act, raised):
    with pytest.raises(raised):
        trained((X, Y), model=plain(), train_step=lambda model, batch: act())


def test_a_train_step_moves_its_batch_itself():
    seen = []
    side = TrainingSide(train_step=lambda model, batch: seen.append(batch), device="meta")
    build_step(side, X).run(X)
    assert seen[0] is X
    # AND another step does not, nor its model, but where its library has put it somewhere
    for spread in ({}, {"hf_device_map": {}}):
        model = plain().eval()
        vars(model).update(spread)
        moved = build_step(TrainingSide(model=model, device="meta"), (X, Y)).move((X, Y))
        assert moved[0].device.type == "meta"
        assert model.weight.device.type == ("cpu" if spread else "meta")
        assert model.training
    # AND what is frozen in a model that trains stays as it is
    model = nn.Sequential(plain(), nn.Dropout().eval())
    build_step(TrainingSide(model=model), (X, Y))
    assert [part.training for part in model] == [True, False]


@pytest.mark.parametrize("model", [plain().requires_grad_(False), lambda x, y: x.mean()])
def test_that_nothing_is_trained_is_said(model):
    (note,) = trained((X, Y), model=model).notes
    assert "nothing is trained" in note


def test_without_an_optimizer_weights_stay():
    model = plain()
    before = model.weight.detach().clone()
    trained((X, Y), model=model)
    assert torch.equal(model.weight, before)
    # AND their gradients are those of one batch
    (of_one,) = torch.autograd.grad(functional.cross_entropy(model(X), Y), [model.weight])
    assert torch.equal(model.weight.grad, of_one)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_some_batches_make_one_step(is_scaled):
    called = []
    optimizer = SimpleNamespace(
        zero_grad=lambda set_to_none: called.append("zero"), step=lambda: called.append("step")
    )
    step = build_step(TrainingSide(model=plain(), optimizer=optimizer), (X, Y))
    step.accumulate = 3
    if is_scaled:
        step.scaler = SimpleNamespace(
            scale=lambda loss: loss, step=lambda own: own.step(), update=lambda: called.append("up")
        )
    for _ in range(8):
        step.run((X, Y))
        called.append("|")
    # THEN the first is a whole one, so that memory of the optimizer is there from then on
    expected = "zero step up | zero | | step up | zero | | step up | zero |"
    assert " ".join(called) == (expected if is_scaled else expected.replace(" up", ""))


@pytest.mark.process
def test_a_step_may_empty_its_batch():
    side = TrainingSide(train_step=lambda model, batch: batch.pop("labels"))
    with opened(workload([{"x": X[0], "labels": 1}] * 64, training=side)) as found:
        measured(found.probe)
        assert isinstance(found.probe.step_ceiling(QUICK), Measurement)


@pytest.mark.process
def test_a_step_that_raises_later_ends_the_run():
    left = iter(range(30))
    side = TrainingSide(train_step=lambda model, batch: 1 / (29 - next(left)))
    with pytest.raises(WorkloadError, match="ZeroDivisionError: division by zero"):
        run(workload([X[0]] * 64, training=side), *[ALONE] * 9)
