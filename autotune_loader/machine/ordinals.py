"""Which GPU CUDA means by an ordinal: pure functions of the UUIDs that NVML lists and of the mask.

NVML counts devices in PCI order and does not know `CUDA_VISIBLE_DEVICES`; CUDA by default puts the fastest first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalGpu:
    """A GPU that NVML lists, with its MIG instances."""

    uuid: str
    migs: tuple[str, ...]


def visible_uuids(mask: str | None, gpus: Sequence[PhysicalGpu]) -> list[str]:
    """UUIDs of the devices that `CUDA_VISIBLE_DEVICES` leaves, in CUDA's order, as the CUDA driver reads the mask.

    None shows all, "" none. Entries are indices, `GPU-` UUIDs or unique beginnings of one, or MIG UUIDs, new
    (`MIG-<uuid>`) or old (`MIG-GPU-<uuid>/<gpu instance>/<compute instance>`). The first invalid entry ends the list
    and a repeated one empties it (CUDA C Programming Guide, environment variables; torch.cuda._parse_visible_devices).
    A GPU that is split by MIG shows as its first instance.
    """
    if mask is None:
        return [_first_instance(gpu) for gpu in gpus]
    found: list[str] = []
    for entry in mask.split(","):
        uuid = _resolve(entry.strip(), gpus)
        if uuid is None:
            break
        if uuid in found:
            return []
        found.append(uuid)
    return found


def match_uuids(cuda_uuids: Sequence[str], gpus: Sequence[PhysicalGpu]) -> dict[int, str]:
    """NVML's UUID by CUDA ordinal; torch writes UUIDs without the prefix that NVML puts before them."""
    known = {_bare(gpu.uuid): _first_instance(gpu) for gpu in gpus}
    known.update({_bare(mig): mig for gpu in gpus for mig in gpu.migs})
    bare = [_bare(uuid) for uuid in cuda_uuids]
    return {index: known[uuid] for index, uuid in enumerate(bare) if uuid in known}


def _resolve(entry: str, gpus: Sequence[PhysicalGpu]) -> str | None:
    if entry.startswith("MIG-"):
        return _unique([mig for gpu in gpus for mig in gpu.migs], entry)
    if entry.startswith("GPU-"):
        whole = _unique([gpu.uuid for gpu in gpus], entry)
        return next((_first_instance(gpu) for gpu in gpus if gpu.uuid == whole), None)
    # CUDA reads indices like strtoul: "1gpu" is 1.
    digits = re.match(r"\+?(\d+)", entry)
    index = int(digits[1]) if digits else -1
    return _first_instance(gpus[index]) if 0 <= index < len(gpus) else None


def _unique(uuids: Sequence[str], beginning: str) -> str | None:
    matches = [uuid for uuid in uuids if uuid.lower().startswith(beginning.lower())]
    exact = [uuid for uuid in matches if uuid.lower() == beginning.lower()]
    return (exact or matches)[0] if len(exact or matches) == 1 else None


def _first_instance(gpu: PhysicalGpu) -> str:
    return gpu.migs[0] if gpu.migs else gpu.uuid


def _bare(uuid: str) -> str:
    return re.sub(r"^(GPU-|MIG-)", "", uuid).lower()
