"""The loss of an output, as code: the model's own, or the one that is customary for the shapes and types of output and target.

`OUT` stands for the output wherever it is needed; `batch` is the batch. What a value is decides once, on the first batch.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from typing import Any

import torch

from autotune_loader.pipeline.batches import fields_of, is_list_of_numbers

OUT = "\0"
# Where a model's answer is kept, in an output with several parts.
ANSWERS = ("logits", "out", "prediction", "predictions", "pred", "preds",
           "output", "outputs", "y_hat", "last_hidden_state")  # fmt: skip
MASK_OF_NOTHING = 255
"""What VOC, Cityscapes and others write into masks where there is no class."""


def is_name(key: Any) -> bool:
    """Whether code may name something so; names come from the user's data, and anything else is quoted."""
    return isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)


def part_of(text: str, whole: Any, key: Any) -> str:
    """A part of a mapping, or of an object with attributes, as code."""
    if isinstance(whole, Mapping):
        return f"{text}[{key!r}]"
    return f"{text}.{key}" if is_name(key) else f"getattr({text}, {key!r})"


def customary_loss(output: Any, target: Any, of: str, out: str = OUT) -> str:
    """The loss that goes with an output and a target, by their shapes and types.

    Args:
        output: of the model; the answer is looked for where it has several parts.
        target: a tensor, or a list or mapping that goes with one.
        of: the target as code.
        out: the output as code.
    """
    if (
        isinstance(target, Mapping)
        and isinstance(output, Mapping)
        and (both := [key for key in target if key in output])
    ):
        parts = [(output[key], target[key], f"[{key!r}]") for key in both]
    elif isinstance(target, (tuple, list)) and isinstance(output, (tuple, list)) and len(target) == len(output):
        parts = [(*pair, f"[{index}]") for index, pair in enumerate(zip(output, target, strict=True))]
    else:
        return _of_tensors(*tensor_in(*answer_in(output, out)), of, target)
    return " + ".join(customary_loss(each, y, of + place, out + place) for each, y, place in parts)


def _of_tensors(text: str, answer: torch.Tensor, of: str, target: Any) -> str:
    of, target = tensor_in(of, target, answer.device)
    if answer.numel() == target.numel() and answer.shape != target.shape:  # (N,) and (N, 1)
        of, target = f"{of}.reshape({', '.join(map(str, (-1, *answer.shape[1:])))})", target.reshape(answer.shape)
    if target.is_floating_point():
        name = "cross_entropy" if answer.shape == target.shape and is_distribution(target) else "mse_loss"
        return f"{name}({text}, {of})"
    if answer.shape == target.shape:
        as_answer = "float()" if answer.dtype is torch.float32 else f"to({answer.dtype})"
        return f"binary_cross_entropy_with_logits({text}, {of}.{as_answer})"
    # (N, 1) and (N, 1, H, W), whose answers are (N, C) and (N, C, H, W)
    if target.ndim == answer.ndim and target.shape[1] == 1:
        of, target = f"{of}.squeeze(1)", target.squeeze(1)
    if answer.shape[:-1] == target.shape and answer.shape[:1] + answer.shape[2:] != target.shape:
        # (N, T, C), as language models have it
        text, answer, of, target = f"{text}.flatten(0, -2)", answer.flatten(0, -2), f"{of}.flatten()", target.flatten()
    of += "" if target.dtype is torch.int64 else ".long()"
    is_mask = target.ndim > 2 and answer.shape[1] <= MASK_OF_NOTHING
    return f"cross_entropy({text}, {of}{f', ignore_index={MASK_OF_NOTHING}' if is_mask else ''})"


def answer_in(output: Any, out: str = OUT) -> tuple[str, Any]:
    """The part of an output that a loss is about."""
    fields = {} if isinstance(output, torch.Tensor) else fields_of(output)
    known = [name for name in ANSWERS if fields.get(name) is not None]
    if not known and isinstance(output, Mapping):
        known = [key for key, value in fields.items() if isinstance(value, torch.Tensor) and value.ndim]
    if known:
        return part_of(out, output, known[0]), fields[known[0]]
    return (f"{out}[0]", output[0]) if isinstance(output, (tuple, list)) and output else (out, output)


def own_loss(output: Any) -> str | None:
    """The loss that a model's output holds itself; None where it holds none."""
    if isinstance(output, torch.Tensor):
        return OUT if output.ndim == 0 else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return f"{OUT}.loss" if hasattr(output, "loss") else f"{OUT}['loss']"
    if isinstance(output, Mapping):
        parts = [key for key, value in output.items() if isinstance(value, torch.Tensor)]
        if parts and all(output[key].ndim == 0 and output[key].requires_grad for key in parts):
            return (
                f"sum({OUT}.values())" if len(parts) == len(output) else " + ".join(f"{OUT}[{key!r}]" for key in parts)
            )
    elif isinstance(output, (tuple, list)):
        for index, part in enumerate(output):
            if isinstance(part, torch.Tensor) and part.ndim == 0 and part.requires_grad:
                return f"{OUT}[{index}]"
    return None


def loss_in(returned: Any) -> Any:
    """The loss in what a step returned: a tensor, Lightning's `{"loss": ...}`, or the first that trains; else as it is."""
    if isinstance(returned, Mapping):
        return returned.get("loss")
    if isinstance(returned, (tuple, list)) and returned:
        scalars = [each for each in returned if isinstance(each, torch.Tensor) and each.ndim == 0]
        return next((each for each in scalars if each.requires_grad), scalars[0] if scalars else returned[0])
    return getattr(returned, "loss", returned)


def tensor_in(text: str, value: Any, device: torch.device | None = None) -> tuple[str, torch.Tensor]:
    """A tensor out of a target or an output: itself, a list of numbers, or the first one of a container.

    Raises:
        TypeError: there is none.
    """
    if is_list_of_numbers(value):
        there = "" if device is None or device.type == "cpu" else f", device={str(device)!r}"
        return f"torch.as_tensor({text}{there})", torch.as_tensor(value, device=device)
    are_tensors = isinstance(value, (tuple, list)) and all(isinstance(each, torch.Tensor) for each in value)
    if are_tensors and len({each.shape for each in value}) == 1:
        return f"torch.stack({text}, dim=-1)", torch.stack(list(value), dim=-1)
    found = first_tensor(text, value)
    if found is None:
        raise TypeError(f"{type(value).__name__} holds no tensor")
    return found


def first_tensor(text: str, value: Any) -> tuple[str, torch.Tensor] | None:
    """The first tensor in a container, however deep in lists and mappings; None where there is none."""
    if isinstance(value, torch.Tensor):
        return text, value
    if isinstance(value, (tuple, list)):
        parts = [(f"{text}[{index}]", each) for index, each in enumerate(value)]
    else:
        parts = [(part_of(text, value, key), each) for key, each in fields_of(value).items()]
        if not isinstance(value, Mapping):  # an object may hold anything, itself among it
            parts = [part for part in parts if isinstance(part[1], torch.Tensor)]
    return next((found for part in parts if (found := first_tensor(*part)) is not None), None)


def is_distribution(target: Any) -> bool:
    """Whether the rows of a target are probabilities of classes: soft labels, as mixup makes them."""
    if not isinstance(target, torch.Tensor) or not target.is_floating_point():
        return False
    if target.ndim != 2 or target.shape[1] < 2:
        return False
    sums = target.sum(1)
    return bool((target >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-2))
