"""The training step: one optimisation step on one batch, as the training loop would do it.

    train_step given     it is the step, and gets the batch as the loader gives it. Where it returns a loss with a gradient,
                         the rest is done for it: zero_grad, backward, optimizer.step. What it does by itself is not repeated
    Lightning module     its training_step and first optimizer, with a stand-in for its Trainer
    a batch (x, y)       model(x, y), where the model takes both and gives a loss; else a loss of model(x) and y
    a dict               model(**batch) that gives a loss

Whatever else a batch and a model may mean is asked for in one sentence.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.nn import functional

from autotune_loader.bursts.failures import first_sentence, is_of_user
from autotune_loader.pipeline.batches import described, fresh, move
from autotune_loader.pipeline.workload import StepTime, TrainingSide

TARGETS = ("labels", "label", "targets", "target", "y", "masks", "mask")
"""What a model calls the target that it may be given."""
ANSWERS = ("logits", "out", "output", "pred", "prediction", "last_hidden_state")
"""Where a model keeps its answer, in an output with several parts."""
AUTOCAST = ("cuda", "cpu")
"""Types of devices that this process may have autocast for."""
ASKS = "pass train_step=lambda model, batch: ..., which returns the loss"
AGAINST_TIME = (
    "{}: workers and prefetching are tuned against it; the effect of pin_memory and device_prefetch is unknown."
)
NOT_THERE = (
    "self.trainer.{name}: trials have no Trainer; pass train_step=lambda model, batch: ..., which returns the loss"
)
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Lightning's, of a module or of its data module, in the order of their calls."""
TRAINS_NOTHING = "{step}: the loss has no gradient, so nothing is trained and the trials time the forward pass alone."


IN_TRAINING: dict[str, Any] = {
    **dict.fromkeys(("validating", "testing", "predicting", "evaluating", "sanity_checking", "fast_dev_run"), False),
    **dict.fromkeys(("datamodule", "train_dataloader", "gradient_clip_val", "gradient_clip_algorithm"), None),
    **dict.fromkeys(("current_epoch", "global_step", "global_rank", "local_rank", "node_rank"), 0),
    **dict.fromkeys(("world_size", "num_nodes", "num_devices", "accumulate_grad_batches"), 1),
    "training": True,
    "is_global_zero": True,
    "is_last_batch": False,
    "max_epochs": 100,
    "max_steps": -1,
    "num_training_batches": 1000,
    "estimated_stepping_batches": 100_000,
    "loggers": [],
    "callbacks": [],
    "callback_metrics": {},
    "state": SimpleNamespace(fn="fit", status="running", stage="train"),  # equal to the members of Lightning's enums
}
"""What a Trainer of one process says in the midst of training of a usual length."""


class StepInferenceError(TypeError):
    """What the step is cannot be told, or the reading chosen does not run; says which, and asks for `train_step`."""


class StepError(Exception):
    """The step raised for a batch; the cause is the user's."""


class SGD:
    """SGD with a learning rate of 0, which changes no weight. Making torch's own imports the compiler, which takes a second."""

    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - as torch's optimizers are called
        for each in self._parameters:
            each.grad = None

    def step(self) -> None:
        trained = [each for each in self._parameters if each.grad is not None]
        if trained:
            with torch.no_grad():
                torch._foreach_add_(trained, [each.grad for each in trained], alpha=0.0)


@dataclass(slots=True)
class TrainingStep:
    """One optimisation step on one batch: the way to its loss, and what is left to do with that.

    Name, notes and description are complete once a batch was trained on.
    """

    forward: Callable[[Any], Any]
    """Takes a batch, on the device where it does not move it itself; gives the loss, or is the step that is done."""
    name: str
    """The way as code."""
    device: torch.device
    optimizer: Any = None
    is_own: bool = False
    """Whether it is the user's `train_step`, which moves its batches, and whose errors speak for themselves."""
    is_whole: bool = False
    """Whether nothing is left to do, whatever `forward` returns."""
    parameters: list[Any] = field(default_factory=list)
    """The model's, where the step is the user's own and may go backward itself."""
    transfer: Callable[[Any], Any] | None = None
    """Brings a batch to the device, where a framework has its own way to."""
    accumulate: int = 1
    """Batches for each step of the optimizer."""
    scaler: Any = None
    """A `GradScaler` that scales the loss."""
    trained: int = 0
    """Batches that went backward so far."""
    notes: list[str] = field(default_factory=list)
    description: str = ""
    """What is done with a batch, in words; empty at first."""

    def move(self, batch: Any) -> Any:
        """The batch on the device, unless the step brings it there itself. From pinned memory the host does not wait."""
        if self.transfer is not None:
            try:
                return self.transfer(batch)
            except Exception as error:
                self._explain(error, batch)
        return batch if self.is_own or self.device.type == "cpu" else move(batch, self.device)

    def ready(self, batch: Any) -> Any:
        """The batch as a loader that copies ahead delivers it: on the device, unless the step takes it from the host only."""
        if not self.is_own:
            return move(batch, self.device)
        with contextlib.suppress(Exception):  # it may not move at all, or be too large to as a whole
            self.train(fresh(moved := move(batch, self.device)))
            return moved
        return batch

    def run(self, batch: Any) -> None:
        """Train on a batch as the loader delivers it."""
        self.train(self.move(batch))

    def train(self, batch: Any) -> None:
        """Train on a batch that lies where `forward` takes it.

        Raises:
            StepError: it raised for this batch.
            StepInferenceError: the reading that was chosen does not run; at the first batch alone.
        """
        try:
            if self.description:
                loss = loss_in(self.forward(batch))
                if not self.is_whole and has_gradient(loss):  # training passes over a batch without one, too
                    self._complete(loss)
            else:
                with watching(self.parameters) as gradients:
                    loss = loss_in(self.forward(batch))
                self._learn(loss, gradients)
        except (Exception, SystemExit) as error:
            self._explain(error, batch)
        finally:
            torch.clear_autocast_cache()  # weights are cast anew in each step, as where each step enters autocast

    def _explain(self, error: Exception | SystemExit, batch: Any) -> NoReturn:
        """Raise an error as one of the step, where it is; a hook of a framework says which it was."""
        if not is_of_user(error) or isinstance(error, StepInferenceError):
            raise error
        if self.description or self.is_own:
            raise StepError(str(error)) from error
        cause = first_sentence(f"{type(error).__name__}: {error}")
        name = getattr(error, "of_hook", self.name).removeprefix("a ")
        raise StepInferenceError(f"Inferred step {name} failed on {described(batch)}: {cause}; {ASKS}") from error

    def _learn(self, loss: Any, gradients: set[int]) -> None:
        """See at the first batch what is left to do, and do it; `gradients` is where backward has written meanwhile."""
        left = ""
        if not self.is_whole and not has_gradient(loss):
            self.is_whole = True
            self.notes += [] if self.is_own else [TRAINS_NOTHING.format(step=self.name)]
        elif self.is_own and has_gone_backward(loss, gradients, set(map(id, self.parameters))):
            self.is_whole = True
        elif not self.is_whole:
            try:
                self._complete(loss)
                left = f" and {type(self.optimizer).__name__}.step()" if self.optimizer is not None else ""
                left = f", then backward{left}"
            except RuntimeError as error:
                if not self.is_own or "second time" not in str(error):  # autograd's words for what has run already
                    raise
                self.is_whole = True
        self.description = f"{self.name}{left}"

    def _complete(self, loss: Any) -> None:
        with contextlib.ExitStack() as autocast_off:  # which loops leave before backward
            for kind in filter(torch.is_autocast_enabled, AUTOCAST):
                autocast_off.enter_context(torch.autocast(kind, enabled=False))
            # The first one is a whole step, so that the optimizer has its memory from then on.
            number, self.trained = self.trained, self.trained + 1
            is_first, is_last = (
                not number or number % self.accumulate == 1 % self.accumulate,
                not number % self.accumulate,
            )
            if self.optimizer is not None and is_first:
                self.optimizer.zero_grad(set_to_none=True)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if self.optimizer is None or not is_last:
                return
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()


@contextlib.contextmanager
def watching(parameters: list[Any]) -> Iterator[set[int]]:
    """The identities of the parameters into whose gradients backward writes in the block."""
    gradients = set[int]()
    hooks = [each.register_post_accumulate_grad_hook(lambda one: gradients.add(id(one))) for each in parameters]
    try:
        yield gradients
    finally:
        for each in hooks:
            each.remove()


def has_gone_backward(loss: torch.Tensor, gradients: set[int], watched: set[int]) -> bool:
    """Whether backward has written into all that a loss is made of: what is left of its graph tells nothing of it.

    Where it has written into a part, that was another loss: of a discriminator, say.
    """
    waiting, seen, leaves = [loss.grad_fn], set[Any](), list[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
            leaves += [node.variable] if hasattr(node, "variable") else []
    done = [id(each) in gradients or (id(each) not in watched and each.grad is not None) for each in leaves]
    return all(done) if done else bool(gradients)  # what is checkpointed the old way has no leaves to see


def build_step(side: TrainingSide, first_batch: Any) -> TrainingStep:
    """The step for a training side; where `train_step` is not given, the one reading that its first batch allows.

    The model is moved to `side.device` and put into training mode. The first batch is one as the loader delivers it.

    Raises:
        StepInferenceError: no reading, or more than one.
    """
    device, model, train_step = torch.device(side.device), side.model, side.train_step
    if isinstance(train_step, StepTime):
        wait, name = functools.partial(train_step, None), str(train_step)
        return TrainingStep(wait, name, device, is_own=True, notes=[AGAINST_TIME.format(name)])
    if model is None and train_step is None:
        alone = "no model: the DataLoader alone" + (f", with the copy to {device}" if device.type != "cpu" else "")
        return TrainingStep(lambda batch: None, alone, device, is_whole=True)
    if is_lightning_module(model):
        model.configure_model()  # makes what is not there yet
    if isinstance(model, torch.nn.Module):
        if not hasattr(model, "hf_device_map"):  # transformers has quantised it or spread it over devices
            model.to(device)
        if not model.training:
            model.train()  # else frozen parts stay as they are
        for name in side.compiled:
            model.get_submodule(name).compile()
    parameters = [p for p in model.parameters() if p.requires_grad] if isinstance(model, torch.nn.Module) else []
    optimizer = side.optimizer
    if isinstance(optimizer, type) or not hasattr(optimizer, "step"):  # None, a class, or what makes one
        optimizer = optimizer(parameters) if optimizer is not None and parameters else None
    step = TrainingStep(lambda batch: None, "", device, optimizer, is_own=train_step is not None)
    if train_step is not None:
        step.parameters = [each for each in parameters if each.is_leaf]
        step.name, step.forward = "train_step(model, batch)", functools.partial(train_step, model)
    elif is_lightning_module(model):
        trainer = StandInTrainer(model, optimizer, device, side.trainer)
        step.name, step.forward = "LightningModule.training_step", trainer.training_step
        step.transfer, step.accumulate = trainer.transfer, trainer.accumulate_grad_batches
        step.is_whole, step.optimizer = not model.automatic_optimization, next(iter(trainer.optimizers), None)
        step.scaler = getattr(trainer.precision_plugin, "scaler", None)
    else:
        _read_form(step, model, side.loss_fn, first_batch)
    if step.optimizer is None and parameters:
        step.optimizer = SGD(parameters)
    return step


def loss_in(returned: Any) -> Any:
    """The loss in what a step or model returned: a scalar, Lightning's `{"loss": ...}`, or the first one that trains."""
    if isinstance(returned, Mapping):
        return returned.get("loss")
    if isinstance(returned, (tuple, list)):
        return next((each for each in returned if has_gradient(each) and each.ndim == 0), None)
    return getattr(returned, "loss", returned)


def has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _own_loss(output: Any) -> Any:
    """The loss that a model gives itself: a scalar, `.loss`, or one in a tuple."""
    loss = loss_in(output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise StepInferenceError(f"The model returns no loss, and its loss cannot be inferred from the batch: {ASKS}")
    return loss


def _answer_in(output: Any) -> torch.Tensor:
    """The answer of a model whose output may have several parts."""
    several = isinstance(output, (tuple, list)) and output
    named = (output.get(name) if isinstance(output, Mapping) else getattr(output, name, None) for name in ANSWERS)
    for answer in (output, output[0] if several else None, *named):
        if isinstance(answer, torch.Tensor):
            return answer
    raise StepInferenceError(f"The loss cannot be inferred from the model's output: {ASKS}")


def customary_loss(answer: torch.Tensor, target: Any) -> tuple[str, torch.Tensor]:
    """The name and value of the loss that goes with an answer and a target, by their types and shapes."""
    if isinstance(target, torch.Tensor):
        if answer.numel() == target.numel():
            of_one = functional.mse_loss if target.is_floating_point() else functional.binary_cross_entropy_with_logits
            return of_one.__name__, of_one(answer, target.reshape(answer.shape).to(answer.dtype))
        if not target.is_floating_point() and answer.ndim > 1:
            if answer.shape[:1] + answer.shape[2:] != target.shape and answer.shape[:-1] == target.shape:
                answer, target = answer.flatten(0, -2), target.flatten()  # (N, T, C), as language models have it
            if answer.shape[:1] + answer.shape[2:] == target.shape:
                return "cross_entropy", functional.cross_entropy(answer, target.long())
    words = f"a tensor of shape {list(target.shape)}" if isinstance(target, torch.Tensor) else type(target).__name__
    raise StepInferenceError(
        f"The loss of an output of shape {list(answer.shape)} and {words} cannot be inferred: {ASKS}"
    )


def _read_form(step: TrainingStep, model: Any, loss_fn: Any, batch: Any) -> None:
    """Read from a batch what the model takes of it and where the loss comes from."""
    if loss_fn is None and isinstance(batch, Mapping):
        step.name, step.forward = "model(**batch).loss", lambda batch: _own_loss(model(**batch))
        return
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise StepInferenceError(f"The step for {described(batch)} cannot be inferred: {ASKS}")
    if loss_fn is None and _takes_target(model):
        step.name, step.forward = "model(x, y)", lambda batch: _own_loss(model(*batch))
        return
    given = getattr(loss_fn, "func", loss_fn)  # functools.partial
    is_of_torch = str(getattr(given, "__module__", "")).startswith("torch.")
    name = "a loss" if loss_fn is None else getattr(given, "__name__", type(given).__name__)

    def forward(batch: Any) -> Any:
        output = model(batch[0])
        if loss_fn is not None:  # one of the user's own takes whatever the model gives; torch's take tensors
            return loss_fn(_answer_in(output) if is_of_torch else output, batch[1])
        name, loss = customary_loss(_answer_in(output), batch[1])
        step.name = f"{name}(model(x), y)"
        return loss

    step.name, step.forward = f"{name}(model(x), y)", forward


def _takes_target(model: Any) -> bool:
    """Whether a model must be given two arguments, or calls the second one what a target is called."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper takes anything
    with contextlib.suppress(TypeError, ValueError):
        found = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model).parameters.values()
        positional = [each for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        is_named = len(positional) > 1 and positional[1].name in TARGETS
        return is_named or sum(each.default is each.empty for each in positional) == 2
    return False


def is_lightning_module(model: Any) -> bool:
    """Whether it is one of Lightning's, under either of its two package names; Lightning need not be installed."""
    return any(cls.__name__ == "LightningModule" for cls in type(model).__mro__)


class StandInTrainer(SimpleNamespace):
    """The part of `lightning.Trainer` that modules use in training, attached to the model that bursts train.

    An `optimizer` is used instead of those of `configure_optimizers()`; `facts` is what the user's Trainer says, where there
    is one. Without its precision plugin the model trains in its own precision. What the model logs goes nowhere.
    """

    def __init__(self, model: Any, optimizer: Any, device: torch.device, facts: Mapping[str, Any]) -> None:
        kind = next(cls for cls in type(model).__mro__ if cls.__name__ == "LightningModule")
        package = kind.__module__.removesuffix(".core.module")
        logger, optimizing, plugins, hooks = (
            importlib.import_module(f"{package}.{name}")
            for name in ("loggers.logger", "core.optimizer", "plugins.precision", "core.hooks")
        )
        facts = {**IN_TRAINING, "precision_plugin": plugins.Precision(), **facts}
        super().__init__(**facts, logger=logger.DummyLogger())
        self.precision, self.lightning_module = self.precision_plugin.precision, model
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.strategy = SimpleNamespace(
            backward=lambda loss, *_args, **options: loss.backward(**options),
            all_gather=lambda tensor, **_: tensor,
            _lightning_optimizers=self.optimizers,
        )
        self.precision_plugin.convert_module(model)
        self._model, model.trainer, self._device = model, self, device
        if self.datamodule is not None:
            self.datamodule.trainer = self
        self._hooks = {name: owner for name in BATCH_HOOKS if (owner := self._owner(name, hooks.DataHooks)) is not None}
        for module in filter(is_lightning_module, model.modules()):
            module.log = module.log_dict = module.print = lambda *_args, **_options: None
        if optimizer is not None:
            self.optimizers.append(optimizer)
        elif (made := model.configure_optimizers()) is not None:
            optimizers, schedulers, _ = optimizing._configure_optimizers(made)
            self.optimizers += optimizers
            self.lr_scheduler_configs += optimizing._configure_schedulers_manual_opt(schedulers)
        for each in self.optimizers:
            each.toggle_model = functools.partial(_toggled, model, each)
            if self.gradient_clip_val and model.automatic_optimization:
                each.register_step_pre_hook(self._clip)
        self._batches = 0
        self._takes_index = len(inspect.signature(model.training_step).parameters) > 1

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(NOT_THERE.format(name=name))

    def _owner(self, hook: str, plain: Any) -> Any:
        """Who overrides a hook for batches: the data module before the model, as in Lightning; None where neither does."""
        for owner in filter(None, (self.datamodule, self._model)):
            if getattr(getattr(owner, hook), "__func__", None) is not getattr(plain, hook):
                return owner
        return None

    def _prepared(self, hook: str, batch: Any, *arguments: Any) -> Any:
        """What a hook makes of a batch."""
        owner = self._hooks.get(hook)
        try:
            return batch if owner is None else getattr(owner, hook)(batch, *arguments, 0)
        except Exception as error:
            error.of_hook = f"{type(owner).__name__}.{hook}"  # type: ignore[attr-defined]
            raise

    def transfer(self, batch: Any) -> Any:
        """The batch on the device, with what is made of it on its way there."""
        batch = self._prepared("on_before_batch_transfer", self.precision_plugin.convert_input(batch))
        if "transfer_batch_to_device" in self._hooks:
            return self._prepared("transfer_batch_to_device", batch, self._device)
        return batch if self._device.type == "cpu" else move(batch, self._device)

    def training_step(self, batch: Any) -> Any:
        """What the module's own returns, in the precision of the user's Trainer."""
        batch = self._prepared("on_after_batch_transfer", batch)
        number, self._batches = self._batches, self._batches + 1
        with self.precision_plugin.forward_context():
            return self._model.training_step(batch, number) if self._takes_index else self._model.training_step(batch)

    def _clip(self, optimizer: Any, *_arguments: Any) -> None:
        limit = {"gradient_clip_val": self.gradient_clip_val, "gradient_clip_algorithm": self.gradient_clip_algorithm}
        self._model.configure_gradient_clipping(optimizer, **limit)


@contextlib.contextmanager
def _toggled(model: Any, optimizer: Any, sync_grad: bool = True) -> Iterator[None]:  # noqa: ARG001 - as Lightning's own
    model.toggle_optimizer(optimizer)
    yield
    model.untoggle_optimizer(optimizer)
