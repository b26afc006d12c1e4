"""Visibility of the machine's GPUs to a process, by the variables that CUDA reads.

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
_NUMBER = re.compile(r"\s*([+-]?\d+)")


@dataclass(frozen=True, slots=True)
class Visible:
    """The GPUs that a process sees.

    Attributes:
        uuids: of GPUs, or of parts of them, in CUDA's order. An index under CUDA's own order, the
            fastest first, names no particular GPU where they differ: its entry is empty.
        note: why these and no others, where that is not obvious.
    """

    uuids: tuple[str, ...]
    note: str = ""


def visible(gpus: Sequence[GPU], variables: Mapping[str, str]) -> Visible:
    """Return the GPUs that CUDA would show; ``gpus`` are in the order of their addresses."""
    ordered = [_unit(gpu) for gpu in gpus]
    usable = [unit for unit in ordered if unit]
    divided = [gpu for gpu in gpus if gpu.mig]
    listed = variables.get(DEVICES)
    if listed is None:
        return _all(usable, divided)
    if not listed.strip():
        return Visible((), f"{DEVICES} is empty, which hides every GPU")
    known = len({gpu.name for gpu in gpus}) == 1 or variables.get(ORDER) == "PCI_BUS_ID"
    found: list[str] = []
    taken: set[str] = set()
    note = ""
    for entry in listed.split(","):
        # An index is known to be a GPU of the machine, but maybe not which one.
        unit, identity, problem = _entry(entry, gpus, ordered)
        if not problem and identity in taken:
            note = f"{DEVICES}={listed} names {entry.strip()} twice, which hides every GPU"
            return Visible((), note)
        if problem:
            note = f"{DEVICES}={listed}: {problem}, and entries from there on count for nothing"
            break
        taken.add(identity)
        found.append(unit if known or not identity.isdecimal() else "")
    parts = [unit for unit in found if unit.startswith("MIG-")]
    if parts and len(found) > 1:
        # A process with a part sees that one and nothing else.
        return Visible((parts[0],), f"a process sees one part of a divided GPU, {parts[0]}")
    return Visible(tuple(found), note or (f"{DEVICES}={listed}" if found else ""))


def _unit(gpu: GPU) -> str:
    """Return what CUDA uses of a GPU: itself, its first part, or nothing."""
    if not gpu.mig:
        return gpu.uuid
    return gpu.parts[0] if gpu.parts else ""


def _all(usable: list[str], divided: list[GPU]) -> Visible:
    if not divided:
        return Visible(tuple(usable))
    names = ", ".join(f"{gpu.name} at {gpu.bus_id}" for gpu in divided)
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


def _entry(entry: str, gpus: Sequence[GPU], ordered: Sequence[str]) -> tuple[str, str, str]:
    """Return the unit of an entry, its identity, and the fault of the entry."""
    text = entry.strip()
    if text.startswith(("GPU-", "MIG-")):
        return _by_uuid(text, gpus)
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


def _by_uuid(text: str, gpus: Sequence[GPU]) -> tuple[str, str, str]:
    """Return the only unit whose uuid begins with ``text``; older MIG names are taken whole."""
    if text.startswith("MIG-GPU-"):  # MIG-GPU-uuid/instance/instance, of drivers before 470
        whole = text.removeprefix("MIG-").partition("/")[0]
        matches = [gpu.uuid for gpu in gpus if gpu.uuid == whole and gpu.parts]
        return (text, text, "") if matches else ("", "", f"no divided GPU is {whole}")
    units = [gpu.uuid for gpu in gpus] + [part for gpu in gpus for part in gpu.parts]
    matches = [unit for unit in units if unit.startswith(text)]
    if len(matches) != 1:
        what = "no GPU" if not matches else f"{len(matches)} GPUs"
        return "", "", f"{what} of a uuid that begins with {text}"
    divided = next((gpu for gpu in gpus if gpu.uuid == matches[0] and gpu.mig), None)
    if divided is None:
        return matches[0], matches[0], ""
    if not divided.parts:
        return "", "", f"{text} is divided by MIG, and no part of it exists"
    return divided.parts[0], divided.parts[0], ""
