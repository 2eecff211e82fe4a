"""What the step on a batch is where no `train_step` says it: how the model is called, what its target is, which loss is meant.

    batch ── how the model is called ──► output ── its own loss, or the loss of output and target ──► loss, and its name

Nothing here is run before the first batch is: an inference that turns out wrong is explained with a line that would work.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.stand_in_trainer import is_lightning_module

# What the target is called, as a key of a batch or a parameter of a model.
TARGETS = (
    "labels",
    "label",
    "targets",
    "target",
    "y",
    "masks",
    "mask",
    "label_ids",
    "ground_truth",
    "gt",
    "classes",
    "class",
)
# What the one input of a model is called, as a key of a batch with several.
INPUTS = (
    "x",
    "image",
    "images",
    "img",
    "input",
    "inputs",
    "pixel_values",
    "input_ids",
    "data",
    "features",
    "text",
    "audio",
)
# What a model calls its one parameter that is a whole batch.
WHOLES = ("batch", "data", "tensordict", "td", "graph", "sample")
# Where a model's answer is kept, in an output with several parts.
ANSWERS = (
    "logits",
    "out",
    "prediction",
    "predictions",
    "pred",
    "preds",
    "output",
    "outputs",
    "y_hat",
    "last_hidden_state",
)
LONGEST_CAUSE = 150


class StepInferenceError(TypeError):
    """A step could not be inferred, or the inferred one does not run; says which, and how `train_step` would say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A way from a batch to what it was trained by."""

    run: Callable[[Any], tuple[Any, str]]
    """Takes a batch on the device; gives the loss (or whatever the step returned), and what was done, in words."""
    name: str
    """What will be done, as far as that is known before the first batch."""
    is_own: bool = False
    """Whether it is the user's `train_step`, whose errors speak for themselves."""
    example: str = "lambda model, batch: ...  # returning the loss"
    """A `train_step` that says the same."""
    described: str = ""
    """The batch it was inferred from."""
    ignores: str | None = None
    """A note on an argument that has no part in it."""

    def loss(self, batch: Any) -> Any:
        return loss_in(self.run(batch)[0])

    def explained(self, error: Exception) -> Exception:
        """The error of a first run, with the inference that it comes from."""
        if self.is_own or isinstance(error, StepInferenceError):
            return error
        cause = next(iter(str(error).splitlines()), "")
        cause = cause if len(cause) <= LONGEST_CAUSE else cause[: LONGEST_CAUSE - 1] + "…"
        return StepInferenceError(
            f"train_step=None: inferred `{self.name}` from {self.described}; it failed with {type(error).__name__}: {cause}; "
            f"pass train_step={self.example}"
        )


def infer(side: TrainingSide, batch: Any) -> Form:
    """The form of the step: the user's `train_step`, Lightning's, or one inferred from a batch and the model's signature.

    Raises:
        StepInferenceError: nothing is customary for such a batch.
    """
    model, train_step = side.model, side.train_step
    if train_step is not None:
        name = "train_step(model, batch)"
        return Form(
            run=lambda batch: (train_step(model, batch), name),
            name=name,
            is_own=True,
            ignores=_ignored(side, "train_step"),
        )
    if is_lightning_module(model):
        return _lightning_form(side, batch)
    call = _call_for(model, batch, wants_output=side.loss_fn is not None)
    return _form(call, side.loss_fn, batch)


@dataclass(frozen=True, slots=True)
class Call:
    """How the model is called on a batch, and where its target is."""

    output: Callable[[Any], Any]
    text: str
    """With x, y standing for parts of the batch, as people write it."""
    example: str
    """The same of `batch`."""
    target: Callable[[Any], Any] | None = None
    target_text: str = "y"
    target_example: str = "batch[1]"


def _form(call: Call, loss_fn: Callable[..., Any] | None, batch: Any) -> Form:
    soft = call.target is not None and _is_distribution(call.target(batch))
    is_autoencoder = call.target is None and loss_fn is not None and _takes_two(loss_fn)

    def run(batch: Any) -> tuple[Any, str]:
        output = call.output(batch)
        target = call.target(batch) if call.target is not None else None
        if loss_fn is not None and (target is not None or not _has_own_loss(output)):
            answer = _answer(output) if _is_of_torch(loss_fn) else output
            if target is not None:
                return loss_fn(answer, target), f"{_name(loss_fn)}({call.text}, {call.target_text})"
            if is_autoencoder:
                return loss_fn(answer, batch_input(batch)), f"{_name(loss_fn)}({call.text}, x)"
            return loss_fn(answer), f"{_name(loss_fn)}({call.text})"
        if _has_own_loss(output):
            loss, where = _own_loss(output)
            return loss, f"{call.text}{where}" + ("; loss_fn is not used" if loss_fn is not None else "")
        if target is not None:
            loss, name = customary_loss(output, target, is_soft=soft)
            return loss, f"{name}({call.text}, {call.target_text})"
        answer = next(tensors_in(_answer(output)), None)
        if answer is None:
            return None, call.text
        return answer.float().mean(), f"mean of {call.text}"

    def batch_input(batch: Any) -> Any:
        return batch[0] if isinstance(batch, (tuple, list)) else batch

    given = _name(loss_fn) if loss_fn is not None else "cross_entropy"
    target = call.target_example if call.target is not None else ("batch" if is_autoencoder else "...")
    scored = f"{given}({call.text}, {call.target_text})" if call.target is not None else call.text
    return Form(
        run=run,
        name=scored if loss_fn is not None or call.target is not None else f"{call.text}.loss",
        example=f"lambda model, batch: {given}({call.example}, {target})",
        described=described(batch),
    )


def _call_for(model: Any, batch: Any, *, wants_output: bool) -> Call:
    parameters = Parameters.of(model)
    if isinstance(batch, torch.Tensor):
        return Call(model, "model(batch)", "model(batch)")
    if isinstance(batch, (tuple, list)) and batch and not _is_flat_list_of_numbers(batch):
        return _call_with_elements(model, batch, parameters, wants_output)
    fields = fields_of(batch)
    if not fields:
        raise StepInferenceError(
            f"train_step=None, but no step can be inferred from {described(batch)}; "
            "pass train_step=lambda model, batch: ... returning the loss"
        )
    return _call_with_fields(model, batch, fields, parameters, wants_output)


def _call_with_elements(model: Any, batch: Any, parameters: Parameters, wants_output: bool) -> Call:
    if len(batch) == 1:
        return Call(lambda batch: model(batch[0]), "model(x)", "model(batch[0])")
    names, count = parameters.names, len(batch)
    is_taken = len(names) >= count and names[count - 1] in TARGETS and not wants_output
    if is_taken or parameters.required == count:
        call = "model(x, y)" if count == 2 else "model(*batch)"
        return Call(
            lambda batch: model(*batch), call, "model(*batch)", lambda batch: batch[-1], target_example="batch[-1]"
        )
    inputs = max(parameters.required, min(count - 1, len(names)), 1)
    inputs = min(inputs, count - 1)
    if inputs == 1 and isinstance(batch[0], Mapping) and parameters.take(batch[0]):
        keyed = _call_with_fields(model, batch[0], dict(batch[0]), parameters, wants_output)
        return Call(
            lambda batch: keyed.output(batch[0]),
            keyed.text.replace("batch", "x"),
            keyed.example.replace("batch", "batch[0]"),
            lambda batch: batch[1],
        )
    text = "x" if inputs == 1 else ", ".join(f"x{index + 1}" for index in range(inputs))
    example = ", ".join(f"batch[{index}]" for index in range(inputs))
    return Call(
        lambda batch: model(*batch[:inputs]),
        f"model({text})",
        f"model({example})",
        lambda batch: batch[inputs],
        target_example=f"batch[{inputs}]",
    )


def _call_with_fields(
    model: Any, batch: Any, fields: Mapping[Any, Any], parameters: Parameters, wants_output: bool
) -> Call:
    """For a mapping, or an object with attributes: by the names that batch and model have in common."""
    by_key = isinstance(batch, Mapping)
    get: Callable[[Any, Any], Any] = (lambda batch, key: batch[key]) if by_key else getattr
    show: Callable[[Any], str] = (lambda key: f"batch[{key!r}]") if by_key else (lambda key: f"batch.{key}")
    target = next((key for key in TARGETS if key in fields), None)
    found: dict[str, Any] = {}
    if target is not None:
        found = {
            "target": lambda batch: get(batch, target),
            "target_text": show(target),
            "target_example": show(target),
        }
    first = parameters.names[0] if parameters.required == 1 else None
    # TensorDictModule and its kind have `in_keys`.
    is_whole = hasattr(model, "in_keys") or (first in WHOLES and not (by_key and first in fields))
    taken = {} if is_whole else parameters.take(fields)
    if wants_output:
        taken = {name: key for name, key in taken.items() if key != target or name in parameters.required_names}
    if taken:
        is_all = by_key and list(taken) == list(taken.values()) == list(fields)
        written = ", ".join(f"{name}={show(key)}" for name, key in taken.items())
        text = "model(**batch)" if is_all else f"model({written})"
        return Call(lambda batch: model(**{name: get(batch, key) for name, key in taken.items()}), text, text, **found)
    if is_whole or not (by_key or dataclasses.is_dataclass(batch)):
        return Call(model, "model(batch)", "model(batch)", **found)
    tensors = [key for key, value in fields.items() if key != target and isinstance(value, torch.Tensor)]
    chosen = next((key for key in INPUTS if key in tensors), tensors[0] if len(tensors) == 1 else None)
    if chosen is None or (target is None and not wants_output):
        # Torch's own complaint names what is missing; it is explained when it comes.
        return Call(lambda batch: model(**batch), "model(**batch)", f"model({show(next(iter(fields)))})", **found)
    return Call(lambda batch: model(get(batch, chosen)), f"model({show(chosen)})", f"model({show(chosen)})", **found)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a model's `forward`."""

    names: tuple[str, ...] = ()
    """Those that can be given by position."""
    keywords: frozenset[str] = frozenset()
    required: int = 0
    required_names: frozenset[str] = frozenset()
    takes_any_keyword: bool = False

    @classmethod
    def of(cls, model: Any) -> Parameters:
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper takes anything
        try:
            found = inspect.signature(
                model.forward if isinstance(model, torch.nn.Module) else model
            ).parameters.values()
        except (TypeError, ValueError):
            return cls()
        positional = [each for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        named = [each for each in found if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
        has_star = any(each.kind is each.VAR_POSITIONAL for each in found)
        return cls(
            names=(*(each.name for each in positional), *(("*",) * 16 if has_star else ())),
            keywords=frozenset(each.name for each in named),
            required=sum(each.default is each.empty for each in positional),
            required_names=frozenset(each.name for each in (*positional, *named) if each.default is each.empty),
            takes_any_keyword=any(each.kind is each.VAR_KEYWORD for each in found),
        )

    def take(self, fields: Mapping[Any, Any]) -> dict[str, Any]:
        """Which fields are given under which names; none where a parameter would be left without."""
        names = [key for key in fields if isinstance(key, str)]
        taken = {key: key for key in names if key in self.keywords or (self.takes_any_keyword and not self._has(key))}
        missing = [name for name in TARGETS if name in self.keywords and name not in taken]
        spare = [key for key in names if key in TARGETS and key not in taken]
        if missing and spare and taken:  # `label` in the data is `labels` of the model
            taken[missing[0]] = spare[0]
        return taken if taken and self.required_names <= set(taken) else {}

    def _has(self, key: str) -> bool:
        """Whether a target goes by another name here, which `**kwargs` would swallow."""
        return key in TARGETS and any(name in self.keywords for name in TARGETS)


def customary_loss(output: Any, target: Any, *, is_soft: bool = False) -> tuple[torch.Tensor, str]:
    """The loss that goes with an output and a target, by their shapes and types, and its name.

    Args:
        output: of the model; the answer is looked for where it has several parts.
        target: a tensor, or a list or mapping that goes with one.
        is_soft: whether the rows of the target are probabilities.
    """
    answer = _answer(output)
    if (
        isinstance(target, Mapping)
        and isinstance(output, Mapping)
        and (both := [key for key in target if key in output])
    ):
        losses = [customary_loss(output[key], target[key]) for key in both]
        return _sum([loss for loss, _ in losses]), losses[0][1]
    if isinstance(target, (tuple, list)) and isinstance(output, (tuple, list)) and len(target) == len(output):
        losses = [customary_loss(*pair) for pair in zip(output, target, strict=True)]
        return _sum([loss for loss, _ in losses]), losses[0][1]
    answer, target = _tensor_in(answer), _tensor_in(target, like=_tensor_in(answer))
    if answer.numel() == target.numel() and answer.shape != target.shape:
        target = target.reshape(answer.shape)  # (N,) and (N, 1)
    if target.is_floating_point():
        if is_soft and answer.shape == target.shape:
            return functional.cross_entropy(answer, target), "cross_entropy"
        return functional.mse_loss(answer, target), "mse_loss"
    if answer.shape == target.shape:
        return functional.binary_cross_entropy_with_logits(answer, target.to(answer.dtype)), "bce_with_logits"
    if target.ndim == answer.ndim and target.shape[1] == 1:
        target = target.squeeze(1)  # (N, 1) and (N, 1, H, W), whose answers are (N, C) and (N, C, H, W)
    if answer.shape[:-1] == target.shape and answer.shape[:1] + answer.shape[2:] != target.shape:
        answer, target = answer.flatten(0, -2), target.flatten()  # (N, T, C), as language models have it
    return functional.cross_entropy(answer, target.long()), "cross_entropy"


def _answer(output: Any) -> Any:
    """The part of an output that a loss is about."""
    for name in ANSWERS:
        if isinstance(output, Mapping) and name in output:
            return output[name]
        if not isinstance(output, (torch.Tensor, Mapping)) and getattr(output, name, None) is not None:
            return getattr(output, name)
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    if isinstance(output, Mapping) and output:
        return next((value for value in output.values() if isinstance(value, torch.Tensor) and value.ndim), output)
    return output


def _own_losses(output: Any) -> Iterator[tuple[torch.Tensor, str]]:
    if isinstance(output, torch.Tensor):
        if output.ndim == 0:
            yield output, ""
        return
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        yield loss, ".loss"
    elif isinstance(output, Mapping):
        parts = [value for value in output.values() if isinstance(value, torch.Tensor)]
        if parts and all(part.ndim == 0 and part.requires_grad for part in parts):
            yield _sum(parts), ", its losses summed"
    elif isinstance(output, (tuple, list)):
        for index, part in enumerate(output):
            if isinstance(part, torch.Tensor) and part.ndim == 0 and part.requires_grad:
                yield part, f"[{index}]"


def _has_own_loss(output: Any) -> bool:
    return next(_own_losses(output), None) is not None


def _own_loss(output: Any) -> tuple[torch.Tensor, str]:
    return next(_own_losses(output))


def loss_in(returned: Any) -> Any:
    """The loss in what a step returned: a tensor, Lightning's `{"loss": ...}`, or the first of several; else as it is."""
    if isinstance(returned, Mapping):
        return returned.get("loss")
    if isinstance(returned, (tuple, list)) and returned:
        return next((each for each in returned if isinstance(each, torch.Tensor) and each.ndim == 0), returned[0])
    return getattr(returned, "loss", returned)


def _lightning_form(side: TrainingSide, batch: Any) -> Form:
    model, numbers = side.model, itertools.count()
    takes_index = len(Parameters.of(model.training_step).names) > 1
    name = "LightningModule.training_step(batch, batch_idx)" if takes_index else "LightningModule.training_step(batch)"

    def run(batch: Any) -> tuple[Any, str]:
        returned = model.training_step(batch, next(numbers)) if takes_index else model.training_step(batch)
        return returned, name

    return Form(run=run, name=name, described=described(batch), ignores=_ignored(side, "training_step"))


def _ignored(side: TrainingSide, by: str) -> str | None:
    if side.loss_fn is None:
        return None
    return f"loss_fn={_name(side.loss_fn)} is not used: {by} returns the loss; loss_fn=None says the same"


def fields_of(batch: Any) -> dict[Any, Any]:
    """What a batch object holds by name: a mapping's items, or the attributes of a dataclass, of PyG's `Data` and the like."""
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        return dict(batch._asdict())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name, None) for field in dataclasses.fields(batch)}
    if callable(getattr(batch, "to_dict", None)) and hasattr(batch, "to"):
        return dict(batch.to_dict())
    return dict(vars(batch)) if hasattr(batch, "__dict__") else {}


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nested batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_in(value)
    elif isinstance(batch, Mapping) or callable(getattr(batch, "to_dict", None)):
        for value in fields_of(batch).values():
            yield from tensors_in(value)
    else:
        yield from (value for value in fields_of(batch).values() if isinstance(value, torch.Tensor))


def described(batch: Any) -> str:
    """A batch in a few words: its type, and its keys, elements or shape."""
    if isinstance(batch, torch.Tensor):
        return f"a tensor {list(batch.shape)}"
    if isinstance(batch, (tuple, list)):
        inner = ", ".join(_in_a_word(each) for each in batch[:4]) + (", ..." if len(batch) > 4 else "")
        return f"a {type(batch).__name__} of {len(batch)}: {inner}"
    fields = fields_of(batch)
    if not fields:
        return f"a batch of type {type(batch).__name__}"
    kind = f"a {type(batch).__name__} with " + ("keys" if isinstance(batch, Mapping) else "attributes")
    return f"{kind} {', '.join(map(str, list(fields)[:12]))}"


def _in_a_word(value: Any) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _tensor_in(value: Any, like: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor out of a target: itself, a list of numbers, or the one tensor of a container."""
    if isinstance(value, torch.Tensor):
        return value
    if _is_flat_list_of_numbers(value):
        return torch.as_tensor(value, device=None if like is None else like.device)
    if isinstance(value, (tuple, list)) and value and all(isinstance(each, torch.Tensor) for each in value):
        return torch.stack(list(value), dim=-1) if len({each.shape for each in value}) == 1 else value[0]
    found = next(tensors_in(value), None)
    if found is None:
        raise TypeError(f"{type(value).__name__} holds no tensor")
    return found


def _is_flat_list_of_numbers(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(each, (int, float)) for each in value)


def _is_distribution(target: Any) -> bool:
    """Whether the rows of a target are probabilities of classes: soft labels, as mixup makes them."""
    if not isinstance(target, torch.Tensor) or target.ndim != 2 or target.shape[1] < 2:
        return False
    if not target.is_floating_point():
        return False
    sums = target.sum(1)
    return bool((target >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-2))


def _sum(losses: list[torch.Tensor]) -> torch.Tensor:
    total: torch.Tensor = torch.stack([loss.float().mean() for loss in losses]).sum()
    return total


def _takes_two(loss_fn: Callable[..., Any]) -> bool:
    return Parameters.of(loss_fn).required != 1


def _is_of_torch(loss_fn: Any) -> bool:
    """Whether it takes tensors only; a loss of the user's own takes whatever the model returns."""
    loss_fn = getattr(loss_fn, "func", loss_fn)  # functools.partial
    return str(getattr(loss_fn, "__module__", "")).startswith("torch.")


def _name(loss_fn: Any) -> str:
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)
