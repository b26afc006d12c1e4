"""GPUs that CUDA shows to a process, from the environment variables that CUDA reads.

Source: CUDA C++ Programming Guide, chapter "CUDA environment variables"; MIG user guide, chapter
"CUDA device enumeration".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interposer_cuda._hardware.nvml import GPU

DEVICES = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
# CUDA reads the leading integer of an entry and ignores the text after it.
_NUMBER = re.compile(r"\s*([+-]?\d+)")


@dataclass(frozen=True, slots=True)
class Visible:
    """The GPUs that a process sees.

    Attributes:
        uuids: uuids of GPUs or MIG devices in CUDA's order. CUDA's default order is "fastest
            first", so an index into GPUs of different models is ambiguous: its uuid is empty.
        note: reason for the selection; empty if all GPUs are visible.
    """

    uuids: tuple[str, ...]
    note: str = ""


def visible(gpus: Sequence[GPU], variables: Mapping[str, str]) -> Visible:
    """Return the GPUs that CUDA would show; ``gpus`` are sorted by PCI address."""
    ordered = [_cuda_unit(gpu) for gpu in gpus]
    usable = [unit for unit in ordered if unit]
    mig_gpus = [gpu for gpu in gpus if gpu.mig]
    devices_text = variables.get(DEVICES)
    if devices_text is None:
        return _all_visible(usable, mig_gpus)
    if not devices_text.strip():
        return Visible((), f"{DEVICES} is empty, which hides every GPU")
    # CUDA's default order is by speed, which is unknown here. GPUs of one model have equal speed
    # and stay in PCI order.
    has_definite_order = (
        len({gpu.name for gpu in gpus}) == 1 or variables.get(ORDER) == "PCI_BUS_ID"
    )
    units: list[str] = []
    identities: set[str] = set()
    note = ""
    for entry in devices_text.split(","):
        # A valid index denotes some GPU of the machine, but which one may be ambiguous.
        unit, identity, problem = _parse_entry(entry, gpus, ordered)
        if not problem and identity in identities:
            note = f"{DEVICES}={devices_text} names {entry.strip()} twice, which hides every GPU"
            return Visible((), note)
        if problem:
            note = (
                f"{DEVICES}={devices_text}: {problem}, and entries from there on count for nothing"
            )
            break
        identities.add(identity)
        units.append(unit if has_definite_order or not identity.isdecimal() else "")
    parts = [unit for unit in units if unit.startswith("MIG-")]
    if parts and len(units) > 1:
        # CUDA shows at most one MIG device to a process, and nothing else.
        return Visible((parts[0],), f"a process sees one part of a divided GPU, {parts[0]}")
    return Visible(tuple(units), note or (f"{DEVICES}={devices_text}" if units else ""))


def _cuda_unit(gpu: GPU) -> str:
    """Return the uuid of the GPU; in MIG mode, of the first MIG device, or "" without one."""
    if not gpu.mig:
        return gpu.uuid
    return gpu.parts[0] if gpu.parts else ""


def _all_visible(usable: list[str], mig_gpus: list[GPU]) -> Visible:
    if not mig_gpus:
        return Visible(tuple(usable))
    names = ", ".join(f"{gpu.name} at {gpu.bus_id}" for gpu in mig_gpus)
    if not usable:
        note = (
            f"MIG divides {names}, but no part exists. Create some: nvidia-smi mig -cgi ... -C, "
            "or switch MIG off: nvidia-smi -mig 0"
        )
        return Visible((), note)
    parts = [unit for unit in usable if unit.startswith("MIG-")]
    if not parts:
        return Visible(tuple(usable), f"MIG divides {names}, of which no part exists")
    note = f"MIG divides {names}; a process sees one part, and {DEVICES}=MIG-... picks it"
    return Visible((parts[0],), note)


def _parse_entry(entry: str, gpus: Sequence[GPU], ordered: Sequence[str]) -> tuple[str, str, str]:
    """Parse one entry of the list.

    Returns: uuid of the GPU or MIG device, a key that detects duplicates, and the entry's fault.
    """
    text = entry.strip()
    if text.startswith(("GPU-", "MIG-")):
        return _parse_uuid(text, gpus)
    number = _NUMBER.match(text)
    if number is None:
        return "", "", f"{text!r} is neither an index nor a uuid"
    index = int(number[1])
    if index < 0:
        return "", "", f"{index} ends the list"
    if index >= len(ordered):
        return "", "", f"there is no GPU {index}, the last is {len(ordered) - 1}"
    if not ordered[index]:
        return "", "", f"GPU {index} is divided by MIG, and no part of it exists"
    return ordered[index], str(index), ""


def _parse_uuid(text: str, gpus: Sequence[GPU]) -> tuple[str, str, str]:
    """Parse a uuid prefix, which must match exactly one GPU or MIG device."""
    if text.startswith("MIG-GPU-"):  # MIG-GPU-uuid/instance/instance, of drivers before 470
        gpu_uuid = text.removeprefix("MIG-").partition("/")[0]
        matches = [gpu.uuid for gpu in gpus if gpu.uuid == gpu_uuid and gpu.parts]
        return (text, text, "") if matches else ("", "", f"no divided GPU is {gpu_uuid}")
    units = [gpu.uuid for gpu in gpus] + [part for gpu in gpus for part in gpu.parts]
    matches = [unit for unit in units if unit.startswith(text)]
    # An ambiguous prefix ends the list, as an unknown uuid does.
    if len(matches) != 1:
        count_text = "no GPU" if not matches else f"{len(matches)} GPUs"
        return "", "", f"{count_text} of a uuid that begins with {text}"
    mig_gpus = next((gpu for gpu in gpus if gpu.uuid == matches[0] and gpu.mig), None)
    if mig_gpus is None:
        return matches[0], matches[0], ""
    if not mig_gpus.parts:
        return "", "", f"{text} is divided by MIG, and no part of it exists"
    return mig_gpus.parts[0], mig_gpus.parts[0], ""
