"""The training step of a burst: the user's own, or one inferred from the first batch and said aloud."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autotune_loader.pipeline.prefetch import move
from autotune_loader.pipeline.workload import TrainingSide


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One optimisation step on one batch, as the training loop would do it."""

    train: Callable[[Any], None]
    """Takes a batch on the device and trains on it."""
    description: str
    """What is done with a batch, in words: the inference is never silent."""
    device: torch.device
    moves: bool = True
    """Whether batches are brought to the device; without a model on a CPU they stay where the dataset put them."""

    def move(self, batch: Any) -> Any:
        """The batch on the device; what is there already is not copied. From pinned memory the host does not wait."""
        return move(batch, self.device) if self.moves else batch

    def run(self, batch: Any) -> None:
        """Take a batch as the loader delivers it, move it to the device and train on it."""
        self.train(move(batch, self.device) if self.moves else batch)


def build_step(side: TrainingSide, first_batch: Any) -> TrainingStep:
    """The step for a training side, inferred from what its first batch looks like where `train_step` is not given.

    Args:
        side: model, step, loss and optimizer; the model is moved to `side.device` and put into training mode.
        first_batch: a batch as the loader delivers it, on the host.

    Raises:
        TypeError: no step can be inferred; the message shows the form that `train_step` takes.
    """
    device = torch.device(side.device)
    if side.model is None and side.train_step is None:
        moves = device.type != "cpu"
        alone = "no model: the loader alone" + (f", with the copy to {device}" if moves else "")
        return TrainingStep(lambda batch: None, alone, device, moves)
    model = side.model
    if isinstance(model, torch.nn.Module):
        model.to(device).train()
    forward, description = loss_of(side, first_batch)
    optimize = _optimize(side)

    def train(batch: Any) -> None:
        loss = forward(batch)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            optimize(loss)

    return TrainingStep(train, description, device)


def loss_of(side: TrainingSide, batch: Any) -> tuple[Callable[[Any], Any], str]:
    """A function batch -> loss (or None when the user's step did everything itself) and its description."""
    model, train_step, loss_fn = side.model, side.train_step, side.loss_fn
    if train_step is not None:
        return lambda batch: train_step(model, batch), "train_step(model, batch)"
    if _is_lightning_module(model):
        return lambda batch: _loss_in(model.training_step(batch, 0)), "LightningModule.training_step(batch, 0)"
    if isinstance(batch, Mapping):
        return lambda batch: _loss_in(model(**batch)), "model(**batch).loss"
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        loss_fn = loss_fn or _loss_by_dtype
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__).lstrip("_")
        return lambda batch: loss_fn(model(batch[0]), batch[1]), f"{name}(model(x), y)"
    if isinstance(batch, torch.Tensor):
        score = loss_fn or _mean_output
        return lambda batch: score(model(batch)), "mean of model(batch)" if loss_fn is None else "loss_fn(model(batch))"
    raise TypeError(
        f"train_step=None, but no step can be inferred from a batch of type {type(batch).__name__}; "
        "pass train_step=lambda model, batch: ... returning the loss"
    )


def _loss_by_dtype(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy for integer targets, mean squared error for floating ones."""
    output = getattr(output, "logits", output)
    if target.is_floating_point():
        return torch.nn.functional.mse_loss(output.reshape(target.shape), target)
    return torch.nn.functional.cross_entropy(output, target)


def _mean_output(output: Any) -> torch.Tensor:
    output = output[0] if isinstance(output, (tuple, list)) else output
    mean: torch.Tensor = output.float().mean()
    return mean


def _loss_in(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output.get("loss")
    loss = getattr(output, "loss", output)
    if isinstance(loss, torch.Tensor) or loss is None:
        return loss
    raise TypeError(
        f"train_step=None, but the model returned {type(output).__name__}, which has no loss; "
        "pass train_step=lambda model, batch: ... returning the loss"
    )


def _is_lightning_module(model: Any) -> bool:
    # By name, so that Lightning need not be imported (or installed) to find out.
    return any(cls.__name__ == "LightningModule" for cls in type(model).__mro__)


def _optimize(side: TrainingSide) -> Callable[[torch.Tensor], None]:
    optimizer = _optimizer_of(side)

    def optimize(loss: torch.Tensor) -> None:
        if optimizer is None:
            loss.backward()
            return
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return optimize


def _optimizer_of(side: TrainingSide) -> Any:
    """The user's optimizer; without one, plain SGD with a rate of zero: it costs a step but changes no weight."""
    if side.optimizer is not None and hasattr(side.optimizer, "step"):
        return _beside_its_parameters(side.optimizer)
    parameters = [p for p in _parameters(side.model) if p.requires_grad]
    if not parameters:
        return None
    if callable(side.optimizer):
        return side.optimizer(parameters)
    if _is_lightning_module(side.model):
        return _lightning_optimizer(side.model)
    return torch.optim.SGD(parameters, lr=0.0)


def _beside_its_parameters(optimizer: Any) -> Any:
    """The optimizer with its state (momenta, say) on the device of the parameters, which were moved in place."""
    state, groups = getattr(optimizer, "state", None), getattr(optimizer, "param_groups", ())
    devices = {parameter.device for group in groups for parameter in group["params"]}
    if state and devices - {torch.device("cpu")}:
        optimizer.load_state_dict(optimizer.state_dict())  # casts, and knows which tensors belong on the host
    return optimizer


def _parameters(model: Any) -> Iterator[torch.nn.Parameter]:
    return model.parameters() if isinstance(model, torch.nn.Module) else iter(())


def _lightning_optimizer(model: Any) -> Any:
    """The first optimizer of `configure_optimizers()`, whichever of Lightning's return forms it takes."""
    made = model.configure_optimizers()
    made = made[0] if isinstance(made, tuple) else made
    made = made[0] if isinstance(made, list) else made
    return made["optimizer"] if isinstance(made, Mapping) else made


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nested batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_in(value)
    elif hasattr(batch, "__dict__"):
        for value in vars(batch).values():
            if isinstance(value, torch.Tensor):
                yield value
