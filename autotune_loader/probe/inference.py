"""What the step on a batch is where no `train_step` says it: how the model is called, what its target is, which loss is meant.

    batch ── how the model is called ──► output ── its own loss, or the loss of output and target ──► one line of code

The line is what runs, what is shown, and what could be passed as `train_step`. How the model is called is told by the batch and
the model's signature; which loss is meant, by the first output. An inference that turns out wrong is explained.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from autotune_loader.pipeline.batches import described, fields_of, is_list_of_numbers
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.losses import (
    OUT,
    answer_in,
    customary_loss,
    first_tensor,
    is_distribution,
    is_name,
    own_loss,
    part_of,
)
from autotune_loader.probe.stand_in_trainer import is_lightning_module

# What the target is called, as a key of a batch or a parameter of a model.
TARGETS = ("labels", "label", "targets", "target", "y", "masks", "mask", "label_ids",
           "ground_truth", "gt", "classes", "class")  # fmt: skip
# What the one input of a model is called, as a key of a batch with several.
INPUTS = ("x", "image", "images", "img", "input", "inputs", "pixel_values", "input_ids",
          "data", "features", "text", "audio")  # fmt: skip
# What a model calls its one parameter that is a whole batch.
WHOLES = ("batch", "data", "tensordict", "td", "graph", "sample")
# Characters of a cause: an exception may quote a whole tensor.
LONGEST_CAUSE = 150
CUSTOMARY = (functional.cross_entropy, functional.mse_loss, functional.binary_cross_entropy_with_logits)
EXAMPLE = "lambda model, batch: ...  # returning the loss"
"""What to pass where nothing is known of the step."""
STAND_IN_LOSS = (
    "{step} stands in for the loss, as the batch has no target; pass loss_fn= (an autoencoder's is given output and input) "
    "or train_step= for the true cost of the step"
)
UNUSED_LOSS = "loss_fn is not used, since the batch has no target for it: {step} is trained; loss_fn=None says the same"


class StepInferenceError(TypeError):
    """A step could not be inferred, or the inferred one does not run; says which, and how `train_step` would say it."""


@dataclass(slots=True, kw_only=True)
class Form:
    """A way from a batch to what it was trained by."""

    run: Callable[[Any], Any]
    """Takes a batch on the device; gives the loss, or whatever the step returned."""
    name: str
    """What is done: the code itself where it was inferred, complete once a batch was run."""
    example: str | None = None
    """A `train_step` that says the same, to be corrected; None for the user's own, whose errors speak for themselves."""
    described: str = ""
    """The batch it was inferred from."""
    notes: list[str] = field(default_factory=list)
    """What the user should know of it; complete once a batch was run."""

    @property
    def is_own(self) -> bool:
        """Whether it is the user's `train_step`."""
        return self.example is None

    def explained(self, error: Exception) -> Exception:
        """The error of a first run, with the inference that it comes from."""
        if self.is_own or isinstance(error, StepInferenceError):
            return error
        cause = textwrap.shorten(next(iter(str(error).splitlines()), ""), LONGEST_CAUSE, placeholder="…")
        return StepInferenceError(
            f"train_step=None: inferred `{self.name}` from {self.described}; it failed with {type(error).__name__}: {cause}; "
            f"pass train_step={self.example}"
        )


def infer(side: TrainingSide, batch: Any) -> Form:
    """The form of the step: the user's `train_step`, Lightning's, or one inferred from a batch and the model's signature.

    Raises:
        StepInferenceError: nothing is customary for such a batch.
    """
    model, train_step, loss_fn = side.model, side.train_step, side.loss_fn
    if train_step is not None:
        name = "train_step(model, batch)"
        notes = _ignored(loss_fn, "train_step")
        return Form(run=lambda batch: train_step(model, batch), name=name, notes=notes)
    if is_lightning_module(model):
        return _lightning_form(side, batch)
    call = _call_for(model, batch, wants_output=loss_fn is not None)
    return _Inferred(model, call, loss_fn, batch).form


class Call(NamedTuple):
    """How the model is called on a batch, and where its target is: as code."""

    text: str
    target: str | None = None


class _Inferred:
    """The form of a call, whose first run finds out which loss is meant."""

    def __init__(self, model: Any, call: Call, loss_fn: Callable[..., Any] | None, batch: Any) -> None:
        self._call = call
        self._loss_fn = loss_fn
        self._names = {"torch": torch, **{each.__name__: each for each in CUSTOMARY}, "model": model}
        target = None if call.target is None else self._value_of(call.target, batch=batch)
        is_float = isinstance(target, torch.Tensor) and target.is_floating_point() and not is_distribution(target)
        self._loss_name = "mse_loss" if is_float else "cross_entropy"
        if loss_fn is not None:
            name = _name(loss_fn)
            is_free = name.isidentifier() and name not in ("torch", "model", "batch", "out")
            self._loss_name = name if is_free else "loss_fn"
            self._names[self._loss_name] = loss_fn
        self._is_autoencoder = call.target is None and loss_fn is not None and Parameters.of(loss_fn).required != 1
        where = call.target or ("batch" if self._is_autoencoder else "...")
        line = f"{self._loss_name}({call.text}, {where})"
        self.form = Form(
            run=self._learn,
            name=call.text if call.target is None else line,
            example=f"lambda model, batch: {line}",
            described=described(batch),
        )

    def _value_of(self, code: str, **values: Any) -> Any:
        # The code is made here: of what the user's data hold there are but literals, and names that are identifiers.
        return eval(compile(code, "<inferred step>", "eval"), {**self._names, **values})  # noqa: S307

    def _learn(self, batch: Any) -> Any:
        """Run the model on the first batch, and write down the whole step."""
        output, form, call = self._value_of(self._call.text, batch=batch), self.form, self._call.text
        loss, note = self._loss_of(output, batch)
        form.name = loss.replace(OUT, call if loss.count(OUT) == 1 else f"(out := {call})", 1).replace(OUT, "out")
        form.notes += [note.format(step=form.name)] if note else []
        form.run = self._value_of(f"lambda batch: {form.name}")
        return self._value_of(loss.replace(OUT, "out"), out=output, batch=batch)

    def _loss_of(self, output: Any, batch: Any) -> tuple[str, str | None]:
        """The code of the loss of an output, and what is to be known of it."""
        own, target = own_loss(output), self._call.target
        if self._loss_fn is not None and (target is not None or own is None):
            answer = answer_in(output)[0] if _is_of_torch(self._loss_fn) else OUT
            if target is None and self._is_autoencoder:
                target = "batch[0]" if isinstance(batch, (tuple, list)) else "batch"
            return f"{self._loss_name}({answer}{f', {target}' if target else ''})", None
        if own is not None:
            return own, None if self._loss_fn is None else UNUSED_LOSS
        if target is not None:
            return customary_loss(output, self._value_of(target, batch=batch), target), None
        found = first_tensor(*answer_in(output))
        return (OUT, None) if found is None else (f"{found[0]}.float().mean()", STAND_IN_LOSS)


def _call_for(model: Any, batch: Any, *, wants_output: bool) -> Call:
    parameters = Parameters.of(model)
    if isinstance(batch, torch.Tensor):
        return Call("model(batch)")
    if isinstance(batch, (tuple, list)) and batch and not is_list_of_numbers(batch):
        return _call_with_elements(model, batch, parameters, wants_output)
    if not fields_of(batch):
        raise StepInferenceError(
            f"train_step=None, but no step can be inferred from {described(batch)}; "
            "pass train_step=lambda model, batch: ... returning the loss"
        )
    return _call_with_fields(model, batch, parameters, wants_output)


def _call_with_elements(model: Any, batch: Any, parameters: Parameters, wants_output: bool) -> Call:
    names, count = parameters.names, len(batch)
    if count == 1:
        return Call("model(batch[0])")
    first = batch[0]
    if isinstance(first, Mapping) and parameters.take(first):  # ({...}, y)
        return Call(_call_with_fields(model, first, parameters, wants_output, "batch[0]").text, "batch[1]")
    several = first if isinstance(first, (tuple, list)) and len(first) > 1 else ()
    samples = {len(each) if isinstance(each, torch.Tensor) and each.dim() else None for each in (*several, batch[1])}
    if several and len(several) == parameters.required and len(samples) == 1 and samples != {None}:  # ((x1, x2), y)
        return Call("model(*batch[0])", "batch[1]")
    if parameters.required == count or (len(names) >= count and names[count - 1] in TARGETS and not wants_output):
        return Call("model(*batch)", "batch[-1]")
    inputs = min(max(parameters.required, min(count - 1, len(names)), 1), count - 1)
    return Call(f"model({', '.join(f'batch[{index}]' for index in range(inputs))})", f"batch[{inputs}]")


def _call_with_fields(model: Any, batch: Any, parameters: Parameters, wants_output: bool, at: str = "batch") -> Call:
    """For a mapping, or an object with attributes: by the names that batch and model have in common."""
    by_key, fields = isinstance(batch, Mapping), fields_of(batch)
    key = next((key for key in TARGETS if key in fields), None)
    target = None if key is None else part_of(at, batch, key)
    first = parameters.names[0] if parameters.required == 1 else None
    # TensorDictModule and its kind have `in_keys`.
    is_whole = hasattr(model, "in_keys") or (first in WHOLES and not (by_key and first in fields))
    taken = {} if is_whole else parameters.take(fields)
    if wants_output:
        taken = {name: each for name, each in taken.items() if each != key or name in parameters.required_names}
    if taken:
        parts = {name: part_of(at, batch, each) for name, each in taken.items()}
        if by_key and list(taken) == list(taken.values()) == list(fields):
            given = f"**{at}"
        elif all(map(is_name, parts)):
            given = ", ".join(f"{name}={part}" for name, part in parts.items())
        else:
            given = f"**{{{', '.join(f'{name!r}: {part}' for name, part in parts.items())}}}"
        return Call(f"model({given})", target)
    if is_whole or not (by_key or dataclasses.is_dataclass(batch)):
        return Call(f"model({at})", target)
    tensors = [each for each, value in fields.items() if each != key and isinstance(value, torch.Tensor)]
    chosen = next((each for each in INPUTS if each in tensors), tensors[0] if len(tensors) == 1 else None)
    if chosen is not None and (target is not None or wants_output):
        return Call(f"model({part_of(at, batch, chosen)})", target)
    return Call(f"model(**{at})", target)  # torch's own complaint names what is missing


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
        if has_star and isinstance(inner := getattr(model, "module", None), torch.nn.Module):  # so does DataParallel
            return cls.of(inner)
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

    def run(batch: Any) -> Any:
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            batch = getattr(model, hook)(batch, 0) if hasattr(model, hook) else batch
        return model.training_step(batch, next(numbers)) if takes_index else model.training_step(batch)

    return Form(
        run=run,
        name=f"LightningModule.training_step({'batch, batch_idx' if takes_index else 'batch'})",
        example=f"{EXAMPLE}; what only a Trainer calls (setup(), on_fit_start(), ...) is yours to call before",
        described=described(batch),
        notes=_ignored(side.loss_fn, "training_step"),
    )


def _ignored(loss_fn: Any, by: str) -> list[str]:
    if loss_fn is None:
        return []
    return [f"loss_fn={_name(loss_fn)} is not used: {by} returns the loss; loss_fn=None says the same"]


def _is_of_torch(loss_fn: Any) -> bool:
    """Whether it takes tensors only; a loss of the user's own takes whatever the model returns."""
    loss_fn = getattr(loss_fn, "func", loss_fn)  # functools.partial
    return str(getattr(loss_fn, "__module__", "")).startswith("torch.")


def _name(loss_fn: Any) -> str:
    loss_fn = getattr(loss_fn, "func", loss_fn)  # functools.partial
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)
