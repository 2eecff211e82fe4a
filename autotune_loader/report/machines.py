"""The machine a result was found on, in words, and how this one differs from it."""

from __future__ import annotations

from autotune_loader.machine.comparison import differences
from autotune_loader.machine.facts import Fingerprint, inspect_machine
from autotune_loader.report.units import bytes_text, counted


def machine_words(machine: Fingerprint) -> str:
    """A machine in a line: "4 cores, 16 GiB, no GPU, torch 2.6.0, Linux"."""
    gpus = ", ".join(machine.gpus) or "no GPU"
    told = [counted(machine.usable_cores, "core"), bytes_text(machine.memory_bytes), gpus]
    told += [f"torch {machine.torch}"] if machine.torch else []
    return ", ".join([*told, machine.platform] if machine.platform else told)


def render_machines(tuned_on: Fingerprint | None, here: Fingerprint | None = None) -> str:
    """Where it was tuned, and a sentence for each difference of this machine, what matters first.

    Args:
        tuned_on: from `loader.json`; None where it holds none.
        here: this machine, inspected if None.
    """
    if tuned_on is None:
        return "The file does not say on which machine it was tuned."
    if here is None:
        here = inspect_machine().fingerprint(dataset=tuned_on.dataset)
    found = sorted(differences(tuned_on, here), key=lambda each: not each.matters)
    sentences = [f"{'!' if each.matters else '~'} {each.sentence}" for each in found]
    same = "This machine is the same in all that matters."
    return "\n".join([f"Tuned on: {machine_words(tuned_on)}.", *(sentences or [same])])
