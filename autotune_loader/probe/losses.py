"""The loss of an output: the model's own, or the one that is customary for the shapes and types of output and target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from autotune_loader.pipeline.batches import is_list_of_numbers, tensors_in

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
MASK_OF_NOTHING = 255
"""What VOC, Cityscapes and others write into masks where there is no class."""


def customary_loss(output: Any, target: Any, *, is_soft: bool = False) -> tuple[torch.Tensor, str]:
    """The loss that goes with an output and a target, by their shapes and types, and its name.

    Args:
        output: of the model; the answer is looked for where it has several parts.
        target: a tensor, or a list or mapping that goes with one.
        is_soft: whether the rows of the target are probabilities.
    """
    answer = answer_in(output)
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
    ignored = MASK_OF_NOTHING if target.ndim > 2 and answer.shape[1] <= MASK_OF_NOTHING else -100
    return functional.cross_entropy(answer, target.long(), ignore_index=ignored), "cross_entropy"


def answer_in(output: Any) -> Any:
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


def has_own_loss(output: Any) -> bool:
    return next(_own_losses(output), None) is not None


def own_loss(output: Any) -> tuple[torch.Tensor, str]:
    return next(_own_losses(output))


def loss_in(returned: Any) -> Any:
    """The loss in what a step returned: a tensor, Lightning's `{"loss": ...}`, or the first that trains; else as it is."""
    if isinstance(returned, Mapping):
        return returned.get("loss")
    if isinstance(returned, (tuple, list)) and returned:
        scalars = [each for each in returned if isinstance(each, torch.Tensor) and each.ndim == 0]
        return next((each for each in scalars if each.requires_grad), scalars[0] if scalars else returned[0])
    return getattr(returned, "loss", returned)


def _tensor_in(value: Any, like: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor out of a target: itself, a list of numbers, or the one tensor of a container."""
    if isinstance(value, torch.Tensor):
        return value
    if is_list_of_numbers(value):
        return torch.as_tensor(value, device=None if like is None else like.device)
    if isinstance(value, (tuple, list)) and value and all(isinstance(each, torch.Tensor) for each in value):
        return torch.stack(list(value), dim=-1) if len({each.shape for each in value}) == 1 else value[0]
    found = next(tensors_in(value), None)
    if found is None:
        raise TypeError(f"{type(value).__name__} holds no tensor")
    return found


def is_distribution(target: Any) -> bool:
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
