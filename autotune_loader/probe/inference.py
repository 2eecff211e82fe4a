"""What the step on a batch is where no `train_step` says it: how the model is called, what its target is, which loss is meant.

    batch ── how the model is called ──► output ── its own loss, or the loss of output and target ──► loss, and its name

Nothing here is run before the first batch is: an inference that turns out wrong is explained with a line that would work.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autotune_loader.pipeline.batches import described, fields_of, is_list_of_numbers, tensors_in
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.losses import answer_in, customary_loss, has_own_loss, is_distribution, loss_in, own_loss
from autotune_loader.probe.stand_in_trainer import hooks_not_run, is_lightning_module

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
# Characters of a cause: an exception may quote a whole tensor.
LONGEST_CAUSE = 150
EXAMPLE = "lambda model, batch: ...  # returning the loss"
"""What to pass where nothing is known of the step."""
UNUSED_LOSS = "; loss_fn is not used"


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
    example: str = EXAMPLE
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
    if side.loss_fn is not None:
        _check_loss(side.loss_fn, Parameters.of(model), batch)
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
    target_example: str = "..."
    likely_target: Any = None
    """Of this batch, where nothing says which part is one: for the line that is shown."""


def _form(call: Call, loss_fn: Callable[..., Any] | None, batch: Any) -> Form:
    soft = call.target is not None and is_distribution(call.target(batch))
    is_autoencoder = call.target is None and loss_fn is not None and Parameters.of(loss_fn).required != 1

    def run(batch: Any) -> tuple[Any, str]:
        output = call.output(batch)
        target = call.target(batch) if call.target is not None else None
        if loss_fn is not None and (target is not None or not has_own_loss(output)):
            answer = answer_in(output) if _is_of_torch(loss_fn) else output
            if target is not None:
                return loss_fn(answer, target), f"{_name(loss_fn)}({call.text}, {call.target_text})"
            if is_autoencoder:
                return loss_fn(answer, batch_input(batch)), f"{_name(loss_fn)}({call.text}, x)"
            return loss_fn(answer), f"{_name(loss_fn)}({call.text})"
        if has_own_loss(output):
            loss, where = own_loss(output)
            return loss, f"{call.text}{where}" + (UNUSED_LOSS if loss_fn is not None else "")
        if target is not None:
            loss, name = customary_loss(output, target, is_soft=soft)
            return loss, f"{name}({call.text}, {call.target_text})"
        answer = next(tensors_in(answer_in(output)), None)
        if answer is None:
            return None, call.text
        return answer.float().mean(), f"mean of {call.text}"

    def batch_input(batch: Any) -> Any:
        return batch[0] if isinstance(batch, (tuple, list)) else batch

    target = "batch" if is_autoencoder else call.target_example
    given = _customary_name(call, batch) if loss_fn is None else _name(loss_fn)
    scored = f"{given}({call.text}, {call.target_text})" if call.target is not None else call.text
    called = "loss_fn" if given == "<lambda>" else given
    return Form(
        run=run,
        name=scored if loss_fn is not None or call.target is not None else f"{call.text}.loss",
        example=f"lambda model, batch: {called}({_with_floats(call.example, batch)}, {target})",
        described=described(batch),
    )


def _check_loss(loss_fn: Callable[..., Any], parameters: Parameters, batch: Any) -> None:
    """What takes neither an output nor an output and a target."""
    takes = Parameters.of(loss_fn)
    if takes.required == 2 and takes.names[0] in ("model", "net", "module"):
        raise StepInferenceError(
            f"loss_fn={_name(loss_fn)} takes {takes.names[0]} and {takes.names[1]}, where output and target are given; "
            "passed as train_step=, it would work"
        )
    if takes.required > 2:
        taken = "..."
        if len(_several(batch)) == takes.required:
            taken = "*model(*batch)" if parameters.required == takes.required else "*map(model, batch)"
        raise StepInferenceError(
            f"loss_fn={_name(loss_fn)} takes {takes.required} arguments, where output and target are given; "
            f"pass train_step=lambda model, batch: loss_fn({taken}), for {described(batch)}"
        )


def _customary_name(call: Call, batch: Any) -> str:
    target = call.target(batch) if call.target is not None else call.likely_target
    is_float = isinstance(target, torch.Tensor) and target.is_floating_point()
    return "mse_loss" if is_float and not is_distribution(target) else "cross_entropy"


def _with_floats(example: str, batch: Any) -> str:
    """The call of a model that fails on pictures of bytes, or numpy's doubles, which some loop of the user's makes floats."""
    named = enumerate(batch) if isinstance(batch, (tuple, list)) else fields_of(batch).items()
    for key, value in named:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.uint8, torch.float64):
            example = example.replace(f"batch[{key!r}]", f"batch[{key!r}].float()")
        elif isinstance(value, np.ndarray):
            example = example.replace(f"batch[{key!r}]", f"torch.as_tensor(batch[{key!r}]).float()")
    return example


def _call_for(model: Any, batch: Any, *, wants_output: bool) -> Call:
    parameters = Parameters.of(model)
    if isinstance(batch, torch.Tensor):
        return Call(model, "model(batch)", "model(batch)")
    if isinstance(batch, (tuple, list)) and batch and not is_list_of_numbers(batch):
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
    if count > 1 and (nested := _call_with_nested(model, batch, parameters, wants_output)) is not None:
        return nested
    is_taken = len(names) >= count and names[count - 1] in TARGETS and not wants_output
    if is_taken or parameters.required == count:
        call = "model(x, y)" if count == 2 else "model(*batch)"
        return Call(
            lambda batch: model(*batch), call, "model(*batch)", lambda batch: batch[-1], target_example="batch[-1]"
        )
    inputs = max(parameters.required, min(count - 1, len(names)), 1)
    inputs = min(inputs, count - 1)
    text = "x" if inputs == 1 else ", ".join(f"x{index + 1}" for index in range(inputs))
    example = ", ".join(f"batch[{index}]" for index in range(inputs))
    return Call(
        lambda batch: model(*batch[:inputs]),
        f"model({text})",
        f"model({example})",
        lambda batch: batch[inputs],
        target_example=f"batch[{inputs}]",
    )


def _call_with_nested(model: Any, batch: Any, parameters: Parameters, wants_output: bool) -> Call | None:
    """For `((x1, x2), y)` and `({...}, y)`, where the model takes what the first element holds."""
    first = batch[0]
    if isinstance(first, Mapping) and parameters.take(first):
        keyed = _call_with_fields(model, first, dict(first), parameters, wants_output)
        return Call(
            lambda batch: keyed.output(batch[0]),
            keyed.text.replace("batch", "x"),
            keyed.example.replace("batch", "batch[0]"),
            lambda batch: batch[1],
            target_example="batch[1]",
        )
    samples = {
        len(each) if isinstance(each, torch.Tensor) and each.dim() else None for each in (*_several(first), batch[1])
    }
    if len(_several(first)) == parameters.required and len(samples - {None}) == len(samples) == 1:
        return Call(
            lambda batch: model(*batch[0]),
            "model(*x)",
            "model(*batch[0])",
            lambda batch: batch[1],
            target_example="batch[1]",
        )
    return None


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) and len(value) > 1 else ()


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
        example = (
            f"model({_first_tensor({key: value for key, value in fields.items() if key != target} or fields, show)})"
        )
        others = [key for key in tensors if show(key) not in example]
        if target is None and len(tensors) == 2 and len(others) == 1:
            found = {"target_example": show(others[0]), "likely_target": fields[others[0]]}
        return Call(lambda batch: model(**batch), "model(**batch)", example, **found)
    return Call(lambda batch: model(get(batch, chosen)), f"model({show(chosen)})", f"model({show(chosen)})", **found)


def _first_tensor(fields: Mapping[Any, Any], show: Callable[[Any], str]) -> str:
    """How the first tensor is reached, which may be in a dict of its own (torchio's pictures are)."""
    for key, value in fields.items():
        if isinstance(value, torch.Tensor):
            return show(key)
        if _several(value) and all(isinstance(each, torch.Tensor) for each in value):  # a list in each sample, collated
            return f"torch.stack({show(key)}, dim=1).float()"
        inner = value.items() if isinstance(value, Mapping) else ()
        for name, each in inner:
            if isinstance(each, torch.Tensor):
                return f"{show(key)}[{name!r}]"
    return show(next(iter(fields)))


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


def _lightning_form(side: TrainingSide, batch: Any) -> Form:
    model, numbers = side.model, itertools.count()
    takes_index = len(Parameters.of(model.training_step).names) > 1
    name = "LightningModule.training_step(batch, batch_idx)" if takes_index else "LightningModule.training_step(batch)"

    def run(batch: Any) -> tuple[Any, str]:
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            batch = getattr(model, hook)(batch, 0) if hasattr(model, hook) else batch
        returned = model.training_step(batch, next(numbers)) if takes_index else model.training_step(batch)
        return returned, name

    missing = hooks_not_run(model)
    example = f"{EXAMPLE}, or call {', '.join(missing)} before: only a Trainer does"
    return Form(
        run=run,
        name=name,
        example=example if missing else EXAMPLE,
        described=described(batch),
        ignores=_ignored(side, "training_step"),
    )


def _ignored(side: TrainingSide, by: str) -> str | None:
    if side.loss_fn is None:
        return None
    return f"loss_fn={_name(side.loss_fn)} is not used: {by} returns the loss; loss_fn=None says the same"


def _is_of_torch(loss_fn: Any) -> bool:
    """Whether it takes tensors only; a loss of the user's own takes whatever the model returns."""
    loss_fn = getattr(loss_fn, "func", loss_fn)  # functools.partial
    return str(getattr(loss_fn, "__module__", "")).startswith("torch.")


def _name(loss_fn: Any) -> str:
    loss_fn = getattr(loss_fn, "func", loss_fn)  # functools.partial
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)
