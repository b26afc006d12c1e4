"""GPUs that CUDA shows to a process, from the environment variables that CUDA reads.

Source: CUDA C++ Programming Guide, chapter "CUDA environment variables"; MIG user guide, chapter
"CUDA device enumeration".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from interposer_cuda._hardware.nvml import GPU
from interposer_ops.devices.visible_devices import (
    VisibleDevices,
    read_device_list,
    require_index,
)

DEVICES = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
# CUDA reads the leading integer of an entry and ignores the text after it.
_NUMBER = re.compile(r"\s*([+-]?\d+)")


def visible(gpus: Sequence[GPU], variables: Mapping[str, str]) -> VisibleDevices[str]:
    """Return the uuids of the GPUs or MIG devices that CUDA would show, in CUDA's order.

    CUDA's default order is "fastest first", so an index into GPUs of different models is ambiguous:
    its uuid is empty.

    Args:
        gpus: sorted by PCI address.
    """
    text = variables.get(DEVICES)
    if text is None:
        return _all_visible(gpus)
    listed = read_device_list(DEVICES, text, lambda entry: _parse_entry(entry, gpus))
    keys = [key for key, _ in listed.devices]
    for position, key in enumerate(keys):
        if key in keys[:position]:
            entry = text.split(",")[position].strip()
            note = f"{DEVICES}={text} names {entry} twice, which hides every GPU"
            return VisibleDevices((), note)
    # GPUs of one model have equal speed and stay in PCI order.
    has_definite_order = (
        len({gpu.name for gpu in gpus}) == 1 or variables.get(ORDER) == "PCI_BUS_ID"
    )
    uuids = tuple(
        uuid if has_definite_order or not key.isdecimal() else "" for key, uuid in listed.devices
    )
    parts = [uuid for uuid in uuids if uuid.startswith("MIG-")]
    if parts and len(uuids) > 1:
        # CUDA shows at most one MIG device to a process, and nothing else.
        note = f"a process sees one part of a divided GPU, {parts[0]}"
        return VisibleDevices((parts[0],), note)
    return VisibleDevices(uuids, listed.note)


def _cuda_unit(gpu: GPU) -> str:
    """Return the uuid of the unit that CUDA uses: the GPU, or its first MIG device, if any."""
    if not gpu.mig:
        return gpu.uuid
    return gpu.parts[0] if gpu.parts else ""


def _all_visible(gpus: Sequence[GPU]) -> VisibleDevices[str]:
    usable = [unit for unit in map(_cuda_unit, gpus) if unit]
    names = ", ".join(f"{gpu.name} at {gpu.bus_id}" for gpu in gpus if gpu.mig)
    if not names:
        return VisibleDevices(tuple(usable))
    if not usable:
        note = (
            f"MIG divides {names}, but no part exists. Create some: nvidia-smi mig -cgi ... -C, "
            "or switch MIG off: nvidia-smi -mig 0"
        )
        return VisibleDevices((), note)
    parts = [unit for unit in usable if unit.startswith("MIG-")]
    if not parts:
        return VisibleDevices(tuple(usable), f"MIG divides {names}, of which no part exists")
    note = f"MIG divides {names}; a process sees one part, and {DEVICES}=MIG-... picks it"
    return VisibleDevices((parts[0],), note)


def _parse_entry(entry: str, gpus: Sequence[GPU]) -> tuple[str, str]:
    """Parse an entry of the device list: return a key to detect repetitions, and the unit's uuid.

    Raises: ValueError: the entry selects nothing.
    """
    text = entry.strip()
    if text.startswith(("GPU-", "MIG-")):
        uuid = _find_uuid(text, gpus)
        return uuid, uuid
    number = _NUMBER.match(text)
    if number is None:
        raise ValueError(f"{text!r} is neither an index nor a uuid")
    index = int(number[1])
    if index < 0:
        raise ValueError(f"{index} ends the list")
    require_index(index, len(gpus))
    uuid = _cuda_unit(gpus[index])
    if not uuid:
        raise ValueError(f"GPU {index} is divided by MIG, and no part of it exists")
    return str(index), uuid


def _find_uuid(text: str, gpus: Sequence[GPU]) -> str:
    """Return the uuid of the only GPU or MIG device whose uuid begins with ``text``."""
    if text.startswith("MIG-GPU-"):  # MIG-GPU-uuid/instance/instance, of drivers before 470
        gpu_uuid = text.removeprefix("MIG-").partition("/")[0]
        if any(gpu.uuid == gpu_uuid and gpu.parts for gpu in gpus):
            return text
        raise ValueError(f"no divided GPU is {gpu_uuid}")
    unit_by_uuid = {gpu.uuid: _cuda_unit(gpu) for gpu in gpus}
    unit_by_uuid |= {part: part for gpu in gpus for part in gpu.parts}
    matches = [unit for uuid, unit in unit_by_uuid.items() if uuid.startswith(text)]
    if len(matches) != 1:
        count_text = f"{len(matches)} GPUs" if matches else "no GPU"
        raise ValueError(f"{count_text} of a uuid that begins with {text}")
    if not matches[0]:
        raise ValueError(f"{text} is divided by MIG, and no part of it exists")
    return matches[0]
