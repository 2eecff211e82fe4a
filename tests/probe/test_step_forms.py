"""The ways in which people write a training step: each is trained as written, and what is done is said."""

from __future__ import annotations

import copy
import functools
import types
from collections import namedtuple
from dataclasses import make_dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.inference import StepInferenceError
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.probe.step import build_step
from autotune_loader.values.errors import WorkloadError
from tests.support.bursts import workload

N, IN, CLASSES = 6, 4, 3
X, Y = torch.rand(N, IN), torch.randint(0, CLASSES, (N,))
IMAGES = torch.rand(N, 2, 5, 5)


def trained(batch, runs=3, **side):
    """A step that was run on a batch a few times, as the warm-up does."""
    step = build_step(TrainingSide(**side), batch)
    for _ in range(runs):
        step.run(batch)
    return step


def linear(out=CLASSES):
    return nn.Linear(IN, out)


def own_step(body):
    """The step of a training loop that goes on so once it has a loss."""
    text = f"""def step(model, optimizer, batch):
        x = batch[0].clone().requires_grad_()
        loss = cross_entropy(model(x), batch[1])
        {body}"""
    names = {"torch": torch, "cross_entropy": functional.cross_entropy}
    exec(text, names)
    return names["step"]


SCALED = (
    "scaler = torch.amp.GradScaler('cpu', enabled=False); optimizer.zero_grad(set_to_none=True); "
    "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); return {'loss': loss.item()}"
)
LOOP = "optimizer.zero_grad(); loss.backward(); optimizer.step()"
PENALTY = "return loss + torch.autograd.grad(loss, x, retain_graph=True)[0].square().sum()"
BY_HAND = "g = torch.autograd.grad(loss, model.weight)[0]; model.weight.data -= 0.1 * g"
BACKWARD_ONLY = ", which runs backward itself; no optimizer stepped on the first batch"
ITSELF = ", which steps the optimizer itself"


@pytest.mark.parametrize(
    ("body", "is_given", "says", "steps"),
    [
        ("return loss", True, "", 3),
        ("return loss", False, "", 0),  # SGD at a rate of zero takes the time of a step, and changes nothing
        ("return model(x), loss", True, "", 3),
        ("return {'loss': loss, 'log': 1}", True, "", 3),
        (LOOP, False, ITSELF, 3),
        (f"{LOOP}; return loss", True, ITSELF, 3),
        (SCALED, False, ITSELF, 3),
        ("loss.backward(); optimizer.step(); return loss", False, ITSELF + "; gradients are zeroed here", 3),
        ("loss.backward(); return loss.detach()", True, ", which runs backward itself, then SGD.step()", 3),
        ("loss.backward(); return loss.detach()", False, BACKWARD_ONLY, 0),
        (BY_HAND, False, BACKWARD_ONLY, 0),
        (PENALTY, True, "", 3),
        ("return loss.item()", True, ", forward only", 0),
    ],
)
def test_a_step_is_done_once_and_what_it_does_itself_is_said(body, is_given, says, steps):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    before, run = model.weight.detach().clone(), own_step(body)
    # WHEN it is run three times, and perhaps its optimizer was given to tune() as well
    given = optimizer if is_given else None
    step = trained((X, Y), model=model, train_step=lambda m, b: run(m, optimizer, b), optimizer=given)
    # THEN its name says who does what, the optimizer has stepped once for each batch or never, and weights have moved
    assert step.description == f"train_step(model, batch){says}"
    assert len(stepped) == steps
    assert torch.equal(model.weight, before) is not (steps > 0 or body == BY_HAND)
    assert "zeroed here" not in says or model.weight.grad is None
    # THEN only a step that trains nothing is warned of
    assert ["return loss" in note for note in step.notes] == ([True] if "forward only" in says else [])


def test_watching_leaves_nothing_behind_and_an_error_of_the_users_own_step_as_it_is():
    before = (torch.autograd.backward, torch.optim.Optimizer.zero_grad, nn.Module.zero_grad)

    trained((X, Y), model=linear())
    with pytest.raises(ZeroDivisionError, match=r"^division by zero$"):
        trained((X, Y), model=linear(), train_step=lambda model, batch: 1 / 0)

    assert (torch.autograd.backward, torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == before


def test_an_optimizer_that_needs_more_than_parameters_is_named():
    def demanding(parameters, lr):
        raise AssertionError

    with pytest.raises(TypeError, match=r"optimizer=demanding .*lr.*torch.optim.SGD\(parameters, lr=0.1\) would work"):
        trained((X, Y), model=linear(), optimizer=demanding)


def test_a_step_that_moves_its_batch_itself_is_timed_with_its_own_copy():
    # GIVEN two steps for a device: one takes a batch that is there, the other brings it there
    batch = (X, Y)
    there = trained(batch, model=linear(), device="meta", train_step=lambda m, b: m(b[0]).sum())
    itself = trained(batch, model=linear(), device="meta", train_step=lambda m, b: m(b[0].to("meta")).sum())
    # WHEN a batch arrives THEN it is moved for the one alone
    assert there.move(X).device.type == "meta"
    assert itself.move(X) is X


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()


class WithTargets(Model):
    """minGPT's and nanoGPT's form: logits, and a loss where there are targets."""

    def forward(self, idx, targets=None):
        logits = self.layer(idx)
        return logits, (None if targets is None else functional.cross_entropy(logits, targets))


class WithLoss(Model):
    """A transformer's form."""

    def forward(self, inputs, labels=None, **_):
        logits = self.layer(inputs)
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return types.SimpleNamespace(loss=loss, logits=logits)


class Parts(nn.Module):
    """A model that returns its answer among other things."""

    def __init__(self, wrap, body=None):
        super().__init__()
        self.body, self.wrap = body or linear(), wrap

    def forward(self, image):
        return self.wrap(self.body(image))


class Detector(Model):
    """torchvision's form: a list of images, and in training a dict of losses."""

    def forward(self, images, targets=None):
        assert targets is not None
        boxes = torch.stack([self.layer(image.flatten()[:IN]) for image in images])
        return {"loss_box": (boxes - boxes.detach()).abs().mean(), "loss_class": boxes.square().mean()}


class Graph(Model):
    def forward(self, x, edge_index):
        return self.layer(x + x[edge_index[0]].mean())


class WholeGraph(Graph):
    def forward(self, data):
        return super().forward(data.x, data.edge_index)


class TakesAnything(Model):
    def forward(self, **parts):
        return self.layer(next(part for part in parts.values() if part.is_floating_point()))


class Data:
    """As PyTorch Geometric's: attributes in a store, `to()` and `to_dict()`."""

    def __init__(self, **store):
        self.__dict__["_store"] = store

    def __getattr__(self, name):
        if name not in self.__dict__["_store"]:
            raise AttributeError(name)
        return self._store[name]

    def to(self, device, non_blocking=False):
        return Data(**{name: value.to(device) for name, value in self._store.items()})

    def to_dict(self):
        return dict(self._store)


Sample = make_dataclass("Sample", ["image", "label"])
Pair = namedtuple("Pair", ["x", "y"])
GRAPH = Data(x=X, edge_index=torch.zeros(2, 5, dtype=torch.long), y=Y)
CONV = nn.Conv2d(2, CLASSES, 1)
MASKS = torch.randint(0, CLASSES, (N, 5, 5))
BOXES = ([IMAGES[0], IMAGES[1]], [{"boxes": torch.rand(1, 4)}, {"boxes": torch.rand(2, 4)}])
MSE = nn.MSELoss()
SMOOTHED = functools.partial(functional.cross_entropy, label_smoothing=0.1)
CLASSIFIES = "cross_entropy(model(batch[0]), batch[1])"
# fmt: off
FORMS = [
    # name, model, batch, loss_fn, what is said
    ("classes", linear(), (X, Y), None, CLASSIFIES),
    ("a wrapper that takes anything", nn.DataParallel(linear()), (X, Y), None, CLASSIFIES),
    ("classes as a list", linear(), [X, Y.tolist()], None, "cross_entropy(model(batch[0]), torch.as_tensor(batch[1]))"),
    ("uint8 classes", linear(), (X, Y.byte()), None, "cross_entropy(model(batch[0]), batch[1].long())"),
    ("classes (N, 1)", linear(), (X, Y[:, None]), None, "cross_entropy(model(batch[0]), batch[1].squeeze(1))"),
    ("one logit", linear(1), (X, Y > 1), None,
     "binary_cross_entropy_with_logits(model(batch[0]), batch[1].reshape(-1, 1).float())"),
    ("soft labels", linear(), (X, torch.rand(N, CLASSES).softmax(1)), None, CLASSIFIES),
    ("regression", linear(), (X, torch.rand(N, CLASSES)), None, "mse_loss(model(batch[0]), batch[1])"),
    ("masks", CONV, (IMAGES, MASKS), None, "cross_entropy(model(batch[0]), batch[1], ignore_index=255)"),
    ("one-logit masks", nn.Conv2d(2, 1, 1), (IMAGES, MASKS[:, None] > 0), None,
     "binary_cross_entropy_with_logits(model(batch[0]), batch[1].float())"),
    ("tokens", linear(), (torch.rand(N, 7, IN), torch.zeros(N, 7).long()), None,
     "cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())"),
    ("logits, loss", WithTargets(), (X, Y), None, "model(*batch)[1]"),
    ("logits, loss; own loss", WithTargets(), (X, Y), nn.CrossEntropyLoss(),
     "CrossEntropyLoss(model(batch[0])[0], batch[1])"),
    ("segmentation", Parts(lambda o: {"out": o, "aux": o}, CONV), (IMAGES, MASKS), None,
     "cross_entropy(model(batch[0])['out'], batch[1], ignore_index=255)"),
    ("first of a tuple", Parts(lambda o: (o, o)), (X, Y), None, "cross_entropy(model(batch[0])[0], batch[1])"),
    ("transformer", WithLoss(), {"inputs": X, "labels": Y}, None, "model(**batch).loss"),
    ("transformer; own loss", WithLoss(), {"inputs": X, "labels": Y}, functional.cross_entropy,
     "cross_entropy(model(inputs=batch['inputs']).logits, batch['labels'])"),
    ("dict, other names", linear(), {"image": X, "label": Y, "id": [1] * N}, None,
     "cross_entropy(model(batch['image']), batch['label'])"),
    ("dict, own names", Parts(lambda o: o), {"image": X, "target": Y}, None,
     "cross_entropy(model(image=batch['image']), batch['target'])"),
    ("detection", Detector(), BOXES, None, "sum(model(*batch).values())"),
    ("autoencoder", nn.Linear(IN, IN), X, MSE, "MSELoss(model(batch), batch)"),
    ("loss of the output", linear(), X, lambda output: output.square().mean(), "loss_fn(model(batch))"),
    ("no target", linear(), X, None, "model(batch).float().mean()"),
    ("several heads", Parts(lambda o: {"a": o, "b": o}), (X, {"a": Y, "b": Y}), None,
     "cross_entropy((out := model(batch[0]))['a'], batch[1]['a']) + cross_entropy(out['b'], batch[1]['b'])"),
    ("two targets", Parts(lambda o: (o, o)), (X, [Y, Y]), None,
     "cross_entropy((out := model(batch[0]))[0], batch[1][0]) + cross_entropy(out[1], batch[1][1])"),
    ("two inputs", nn.Bilinear(IN, IN, CLASSES), (X, X, Y), None, "cross_entropy(model(batch[0], batch[1]), batch[2])"),
    ("two inputs, nested", nn.Bilinear(IN, IN, CLASSES), ((X, X), Y), None,
     "cross_entropy(model(*batch[0]), batch[1])"),
    ("a loss with options", linear(), (X, Y), SMOOTHED, CLASSIFIES),
    ("an index besides", linear(), (X, Y, torch.arange(N)), None, CLASSIFIES),
    ("graph", Graph(), GRAPH, None, "cross_entropy(model(x=batch.x, edge_index=batch.edge_index), batch.y)"),
    ("whole graph", WholeGraph(), GRAPH, None, "cross_entropy(model(batch), batch.y)"),
    ("dataclass, other names", linear(), Sample(X, Y), None, "cross_entropy(model(batch.image), batch.label)"),
    ("named tuple", linear(), Pair(X, Y), None, CLASSIFIES),
]
# fmt: on


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn", "says"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS]
)
def test_a_customary_batch_and_model_are_trained_by_the_line_that_is_shown(model, batch, loss_fn, says):
    # GIVEN a model and a batch in a form that is common
    twin, before = copy.deepcopy(model), [parameter.detach().clone() for parameter in model.parameters()]
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    # WHEN it is trained on
    step = trained(batch, model=model, loss_fn=loss_fn, optimizer=sgd)
    # THEN what was done is said, and it has changed weights
    assert step.description == says
    assert any(not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    # THEN only a stand-in for the loss is worth a note
    assert [note for note in step.notes if "stands in for the loss" not in note] == []
    assert bool(step.notes) == says.endswith(".mean()")
    # THEN a `train_step` of that line trains in the same way
    names = vars(functional) | {"torch": torch} | ({says.split("(")[0]: loss_fn} if loss_fn else {})
    trained(batch, model=twin, train_step=eval(f"lambda model, batch: {says}", names), optimizer=sgd)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["class", "x, __import__('os').abort()"])
def test_no_name_in_a_batch_becomes_code(name):
    # GIVEN fields of any name, in an object and in a mapping, and a model that takes each
    batches = Data(**{name: X, "y": Y}), {name: X, "y": Y}
    of_object, of_mapping = (trained(each, model=TakesAnything()) for each in batches)
    # WHEN the step is inferred THEN the name is quoted, and it trains
    assert of_mapping.description == "cross_entropy(model(**batch), batch['y'])"
    assert f"getattr(batch, {name!r})" in of_object.description


def refuses(output):
    raise KeyError("volume")


WRONG, TRIPLET = nn.Linear(9, 2), nn.TripletMarginLoss()


@pytest.mark.parametrize(
    ("model", "loss_fn", "batch", "says"),
    [
        (
            *(WRONG, None, {"image": X, "label": Y}),
            "`cross_entropy(model(batch['image']), batch['label'])` from a dict with keys image, label; "
            "it failed with RuntimeError: mat1 and mat2",
        ),
        (WRONG, None, (X, Y), f"`{CLASSIFIES}` from a tuple of 2: tensor [{N}, {IN}], tensor [{N}]; it failed"),
        (Parts(refuses), None, {"image": X, "label": Y}, "it failed with KeyError: 'volume'"),
        (linear(), None, object(), "no step can be inferred from a batch of type object"),
        (linear(), None, {"a": X, "b": X}, "a dict with keys a, b; it failed with TypeError"),
        (linear(), TRIPLET, (X, X, X), "`TripletMarginLoss(model(batch[0]), batch[1])` from a tuple of 3"),
    ],
)
def test_an_inference_that_fails_names_itself_the_batch_and_a_line_to_pass(model, loss_fn, batch, says):
    with pytest.raises(StepInferenceError) as caught:
        trained(batch, model=model, loss_fn=loss_fn)

    told = str(caught.value)
    assert told.startswith("train_step=None")
    assert says in told
    assert "; pass train_step=lambda model, batch: " in told
    assert "\n" not in told


def test_a_loss_that_is_not_one_number_is_named():
    with pytest.raises(StepInferenceError, match=rf"a loss of shape \[{N}\]"):
        trained((X, Y), model=linear(), loss_fn=nn.CrossEntropyLoss(reduction="none"))


def frozen():
    return linear().requires_grad_(False)


@pytest.mark.parametrize(
    ("side", "batch", "says"),
    [
        ({"model": Parts(lambda output: None)}, X, "there is no loss"),
        ({"model": frozen(), "optimizer": torch.optim.SGD([nn.Parameter(X)])}, (X, Y), "the loss has no gradient"),
        ({"model": linear(), "train_step": lambda m, b: m(b[0]).detach().sum()}, (X, Y), "the loss has no gradient"),
        ({"model": linear(), "train_step": lambda m, b: None}, (X, Y), "there is no loss"),
        ({"model": linear(), "train_step": lambda m, b: {"total": m(b[0]).sum()}}, (X, Y), "keys total none is `loss`"),
    ],
)
def test_a_step_that_trains_nothing_is_said_to(side, batch, says):
    step = trained(batch, **side)

    assert step.description.endswith("forward only")
    assert [says in note for note in step.notes] == [True]
    assert trained(batch, model=None, train_step=lambda model, batch: None).notes == []  # there is nothing to train


def test_a_loss_that_has_no_part_is_said_to():
    step = trained((X, Y), model=linear(), loss_fn=MSE, train_step=lambda m, b: m(b[0]).sum())

    assert step.notes == ["loss_fn=MSELoss is not used: train_step returns the loss; loss_fn=None says the same"]


def normed():
    return nn.Sequential(nn.BatchNorm1d(IN), linear())


def test_a_frozen_batch_norm_stays_frozen_and_an_evaluated_model_is_trained():
    # GIVEN a model in training with a part that is not, and one that is in evaluation as a whole
    frozen_norm, evaluated = normed(), normed().eval()
    frozen_norm[0].eval()
    # WHEN they are trained THEN the part stays as it is, and the whole trains
    trained((X, Y), model=frozen_norm, optimizer=torch.optim.Adam)
    trained((X, Y), model=evaluated)
    assert [each.training for each in (*frozen_norm, evaluated, *evaluated)] == [False, True, True, True, True]


@pytest.mark.parametrize(
    "marks",
    [{"hf_device_map": {"": "cpu"}}, {"is_loaded_in_4bit": True}, {"_hf_hook": object()}],
)
def test_a_model_that_a_library_has_placed_is_not_moved(marks):
    model = normed()
    vars(model if "_hf_hook" not in marks else model[1]).update(marks)

    build_step(TrainingSide(model=model, device="meta"), (X, Y))

    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_parts_that_were_compiled_are_compiled_again(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    model = normed()

    build_step(TrainingSide(model=model, compiled=("", "1")), (X, Y))

    assert compiled == [model, model[1]]


@pytest.mark.parametrize(
    "dataset",
    [[torch.rand(3 + i) for i in range(8)], [[1] * (i + 1) for i in range(8)], [object() for _ in range(8)]],
)
def test_samples_that_torch_cannot_put_together_ask_for_a_collate_function(dataset):
    with pytest.raises(WorkloadError, match=r"\(pass collate_fn=, or the loader that your library makes: tune\(loader"):
        InlineProbe(workload(dataset, 8), inspect_machine()).start()
