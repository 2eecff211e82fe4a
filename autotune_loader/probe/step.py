"""Running a training step: whatever the step does not do itself is done here, and its name says which is which.

first batch     the step is watched: does it run backward, step an optimizer, zero gradients?
every batch     step ── [backward] ── [optimizer.step] ── [zero_grad]        the rest of it, so that nothing is done twice

A step without a gradient is run as it is, and said to train nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from autotune_loader.pipeline.prefetch import move
from autotune_loader.pipeline.workload import StepTime, TrainingSide
from autotune_loader.probe.failures import is_of_dataset
from autotune_loader.probe.inference import Form, StepInferenceError, infer
from autotune_loader.probe.losses import loss_in
from autotune_loader.probe.stand_in_trainer import StandInTrainer, is_lightning_module

FORWARD_ONLY = ", forward only"
TRAINS_NOTHING = (
    "{step}: nothing is trained, so the bursts time the forward pass alone ({reason}); "
    "train_step=lambda model, batch: ... returning the loss as a tensor with a gradient would train"
)
AGAINST_TIME = (
    "{}: workers and their prefetching are tuned against it; what pin_memory and device_prefetch bring is unknown"
)


@dataclass(slots=True)
class TrainingStep:
    """One optimisation step on one batch, as the training loop would do it."""

    train: Callable[[Any], None]
    """Takes a batch on the device and trains on it."""
    description: str
    """What is done with a batch, in words: the inference is never silent. It is complete once a batch was trained on."""
    device: torch.device
    moves: bool = True
    """Whether batches are brought to the device; without a model on a CPU they stay where the dataset put them."""
    notes: list[str] = field(default_factory=list)
    """What the user should know of it, such as that nothing is trained; complete once a batch was trained on."""

    def move(self, batch: Any) -> Any:
        """The batch on the device; what is there already is not copied. From pinned memory the host does not wait."""
        return move(batch, self.device) if self.moves else batch

    def ready(self, batch: Any) -> Any:
        """The batch as a loader that copies ahead delivers it: there already, also where the step brings it itself.

        It stays on the host where the step takes it from there only, as lengths of sequences.
        """
        if self.moves or self.device.type == "cpu":
            return self.move(batch)
        moved = move(batch, self.device)
        try:
            self.train(moved)
        except Exception as error:
            if not is_of_dataset(error):
                raise
            return batch
        return moved

    def run(self, batch: Any) -> None:
        """Take a batch as the loader delivers it, move it to the device and train on it."""
        self.train(self.move(batch))


def build_step(side: TrainingSide, first_batch: Any) -> TrainingStep:
    """The step for a training side, inferred from what its first batch looks like where `train_step` is not given.

    Args:
        side: model, step, loss and optimizer; the model is moved to `side.device` and put into training mode, unless it
            is spread over devices or is there already.
        first_batch: a batch as the loader delivers it, on the host.

    Raises:
        TypeError: no step can be inferred; the message shows the form that `train_step` takes.
    """
    device = torch.device(side.device)
    if isinstance(side.train_step, StepTime):
        wait = functools.partial(side.train_step, None)
        return TrainingStep(
            wait, str(side.train_step), device, moves=False, notes=[AGAINST_TIME.format(side.train_step)]
        )
    if side.model is None and side.train_step is None:
        moves = device.type != "cpu"
        alone = "no model: the loader alone" + (f", with the copy to {device}" if moves else "")
        return TrainingStep(lambda batch: None, alone, device, moves)
    if isinstance(side.model, torch.nn.Module):
        ready_model(side.model, device, side.compiled)
    form = infer(side, first_batch)
    # Whether a step of the user's own moves its batch is found out on the first one. Where the CPU trains nothing is moved.
    step = TrainingStep(lambda batch: None, form.name, device, moves=not form.is_own and device.type != "cpu")
    step.train = _Training(side, form, step)
    return step


def ready_model(model: torch.nn.Module, device: torch.device, compiled: tuple[str, ...] = ()) -> None:
    """Put a model where and as it trains. Frozen parts, and what a library has spread over devices, stay as they are."""
    if not is_placed_by_library(model):
        model.to(device)
    if not model.training:
        model.train()
    for name in compiled:
        model.get_submodule(name).compile()


def is_placed_by_library(model: torch.nn.Module) -> bool:
    """Whether `.to()` would fail or do harm: quantised to 4 or 8 bits, offloaded, or spread over devices."""
    marks = ("hf_device_map", "is_loaded_in_4bit", "is_loaded_in_8bit")
    return any(getattr(model, mark, None) for mark in marks) or any(
        hasattr(part, "_hf_hook") for part in model.modules()
    )


class _Training:
    """Trains on batches: runs the form and whatever of backward, step and zero_grad it leaves to do."""

    def __init__(self, side: TrainingSide, form: Form, step: TrainingStep) -> None:
        self._form = form
        self._learning: TrainingStep | None = step  # let go once learnt: a cycle would keep device memory
        self._model = side.model
        self._was_given_optimizer = side.optimizer is not None
        self._optimizer = _optimizer_of(side)
        self._runs_backward = self._steps = False
        """What is left to do after the form has run."""
        self._zeroed: list[Any] = []
        """Optimizers whose gradients are zeroed afterwards."""

    def __call__(self, batch: Any) -> None:
        if self._learning is not None:
            self._learn(batch, self._learning)
        else:
            self._finish(loss_in(self._form.run(batch)))
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            torch.clear_autocast_cache()  # as the end of a `with torch.autocast` around the step does

    def _learn(self, batch: Any, step: TrainingStep) -> None:
        """Train on the first batch, and see what the form does of it."""
        try:
            returned, seen = self._first_run(batch, step)
        except Exception as error:
            explained = self._form.explained(error)
            if explained is error:
                raise
            raise explained from error
        loss = loss_in(returned)
        said = self._leave_to_do(seen, loss)
        self._learning, step.description = None, f"{self._form.name}{said}"
        step.notes += self._form.notes
        if said == FORWARD_ONLY:
            step.notes.append(TRAINS_NOTHING.format(step=step.description, reason=_why_no_gradient(loss, returned)))
        self._finish(loss)

    def _first_run(self, batch: Any, step: TrainingStep) -> tuple[Any, _Seen]:
        if self._form.is_own and step.device.type != "cpu":
            # It may bring its batch to the device by itself, waiting for the copy or not as the user wrote it.
            with contextlib.suppress(Exception), _watched() as seen, _Moves(step.device.type) as moves:
                returned = self._form.run(batch)
                step.moves = not moves.were_seen
                return returned, seen
            step.moves = True  # it takes the batch to be there already
        with _watched() as seen:
            return self._form.run(step.move(batch)), seen

    def _leave_to_do(self, seen: _Seen, loss: Any) -> str:
        """Find out what is left to do after the form has run, and how that is said."""
        if seen.optimizers:
            if seen.has_zeroed or not seen.has_run_backward:
                return ", which steps the optimizer itself"
            self._zeroed = seen.optimizers
            return ", which steps the optimizer itself; gradients are zeroed here"
        if seen.has_run_backward:
            if not self._was_given_optimizer:
                return ", which runs backward itself; no optimizer stepped on the first batch"
            self._steps, self._zeroed = True, [self._optimizer]
            return f", which runs backward itself, then {type(self._optimizer).__name__}.step()"
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            if loss.numel() != 1:
                raise StepInferenceError(
                    f"{self._form.name} gives a loss of shape {list(loss.shape)}, which has no backward; "
                    "its mean (`return loss.mean()`, or a loss_fn with reduction='mean') would work"
                )
            self._runs_backward, self._steps = True, self._optimizer is not None
            return ""
        return FORWARD_ONLY if _trained(self._model) or self._was_given_optimizer else ""

    def _finish(self, loss: Any) -> None:
        if self._runs_backward:
            if not (isinstance(loss, torch.Tensor) and loss.requires_grad):
                return  # training skips such a batch, too
            if self._steps:
                self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
        if self._steps:
            self._optimizer.step()
        for each in self._zeroed:
            each.zero_grad(set_to_none=True)


@dataclass(slots=True)
class _Seen:
    """What a step did while it was watched."""

    has_run_backward: bool = False
    has_zeroed: bool = False
    optimizers: list[Any] = field(default_factory=list)
    """Those that stepped."""


class _Moves(TorchFunctionMode):
    """Sees whether tensors are brought to a type of device within the block."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.were_seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.to, torch.Tensor.cuda) and result.device.type == self._device_type:
            self.were_seen |= args[0].device.type != self._device_type
        return result


@contextlib.contextmanager
def _watched() -> Iterator[_Seen]:
    """Sees, within the block, what a step does to gradients and weights, whichever model and optimizer it reaches them by."""
    seen = _Seen()

    def watch(owner: Any, name: str, tell: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            tell(*args, **options)
            return original(*args, **options)

        setattr(owner, name, called)
        put_back.callback(setattr, owner, name, original)

    def saw_backward(*_: Any, **__: Any) -> None:
        seen.has_run_backward = True

    def saw_grad(_: Any, inputs: Any, *__: Any, create_graph: bool = False, **___: Any) -> None:
        """Those of weights are stepped by hand; those of inputs, and of gradients themselves, only make a loss."""
        if isinstance(inputs, (torch.Tensor, list, tuple)):  # else `model.parameters()`, which can be read only once
            several = [inputs] if isinstance(inputs, torch.Tensor) else inputs
            create_graph |= not any(isinstance(each, torch.nn.Parameter) for each in several)
        seen.has_run_backward |= not create_graph

    def saw_zero(*_: Any, **__: Any) -> None:
        seen.has_zeroed = True

    def saw_step(optimizer: Any, *_: Any) -> None:
        if not any(optimizer is each for each in seen.optimizers):
            seen.optimizers.append(optimizer)

    with contextlib.ExitStack() as put_back:
        put_back.callback(register_optimizer_step_post_hook(saw_step).remove)
        watch(torch.autograd, "backward", saw_backward)  # also what Tensor.backward calls
        watch(torch.autograd, "grad", saw_grad)
        watch(torch.optim.Optimizer, "zero_grad", saw_zero)
        watch(torch.nn.Module, "zero_grad", saw_zero)
        yield seen


def _why_no_gradient(loss: Any, returned: Any) -> str:
    if loss is None and isinstance(returned, Mapping):
        return f"of the keys {', '.join(map(str, returned))} none is `loss`"
    if loss is None:
        return "there is no loss"
    if isinstance(loss, torch.Tensor):
        return "the loss has no gradient"
    return f"the loss is a {type(loss).__name__}; `return loss` instead of `loss.item()` would work"


def _trained(model: Any) -> list[torch.nn.Parameter]:
    """The parameters that training changes."""
    return [p for p in model.parameters() if p.requires_grad] if isinstance(model, torch.nn.Module) else []


def _optimizer_of(side: TrainingSide) -> Any:
    """The user's optimizer; without one, plain SGD with a rate of zero: it costs a step but changes no weight."""
    optimizer = side.optimizer
    parameters = _trained(side.model)
    if optimizer is not None and not isinstance(optimizer, type) and hasattr(optimizer, "step"):
        optimizer = _beside_its_parameters(optimizer)
    elif callable(optimizer):
        optimizer = _made(optimizer, parameters) if parameters else None
    if is_lightning_module(side.model):
        made = StandInTrainer(side.model, optimizer).optimizers
        optimizer = made[0] if made else None
    if optimizer is None and parameters:
        return torch.optim.SGD(parameters, lr=0.0)
    return optimizer


def _made(factory: Callable[..., Any], parameters: list[torch.nn.Parameter]) -> Any:
    try:
        return factory(parameters)
    except TypeError as error:
        name = getattr(factory, "__name__", factory)
        raise TypeError(
            f"optimizer={name} was called with the model's parameters alone and failed ({error}); "
            "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1) would work"
        ) from error


def _beside_its_parameters(optimizer: Any) -> Any:
    """The optimizer with its state (momenta, say) on the device of the parameters, which were moved in place."""
    state, groups = getattr(optimizer, "state", None), getattr(optimizer, "param_groups", ())
    devices = {parameter.device for group in groups for parameter in group["params"]}
    if state and devices - {torch.device("cpu")}:
        optimizer.load_state_dict(optimizer.state_dict())  # casts, and knows which tensors belong on the host
    return optimizer
