"""GPUs that HIP shows to a process, from the environment variables that the runtimes read.

The lower runtime (ROCr) applies ``ROCR_VISIBLE_DEVICES`` to all GPUs. HIP then applies
``HIP_VISIBLE_DEVICES`` to the remaining ones, or ``CUDA_VISIBLE_DEVICES`` if the former is empty or
not set. ``HSA_OVERRIDE_GFX_VERSION`` presents a GPU as another architecture.

Source: AMD's "GPU isolation techniques"; ROCR-Runtime's amd_filter_device.cpp (a list ends at the
first invalid or repeated entry; an empty list shows no GPU) and libhsakmt's topology.c; clr's
rocdevice.cpp (a list ends at the first invalid entry, repeated entries count once, an empty list
counts as not set).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from interposer_ops.devices.visible_devices import (
    VisibleDevices,
    read_device_list,
    require_index,
)
from interposer_rocm._hardware.architectures import GfxVersion
from interposer_rocm._hardware.topology import GPU

_ROCR, _HIP, _CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
VARIABLES = (_ROCR, _HIP, _CUDA, _OVERRIDE)
"""Environment variables that decide the visible GPUs, in the order of their effect."""

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def visible(gpus: Sequence[GPU], variables: Mapping[str, str]) -> VisibleDevices[GPU]:
    """Return the GPUs that HIP would show; ``gpus`` are sorted by node."""
    notes = []
    remaining = tuple(gpus)
    if _ROCR in variables:
        remaining, note = _select(remaining, _ROCR, variables[_ROCR], strict=True)
        notes.append(note)
    for name in (_HIP, _CUDA):
        if variables.get(name):
            if remaining:
                remaining, note = _select(remaining, name, variables[name], strict=False)
                notes.append(note)
            break
    return VisibleDevices(remaining, "; ".join(notes))


def overridden(gpu: GPU, variables: Mapping[str, str]) -> GPU:
    """Return the GPU with the architecture of ``HSA_OVERRIDE_GFX_VERSION``, if set."""
    text = variables.get(f"{_OVERRIDE}_{gpu.node}") or variables.get(_OVERRIDE, "")
    match = _VERSION.match(text)
    if match is None:
        return gpu
    major, minor, stepping = (int(number) for number in match.groups())
    try:
        return replace(gpu, version=GfxVersion(major, minor, stepping))
    except ValueError:  # ROCr rejects such numbers too
        return gpu


def _select(
    gpus: tuple[GPU, ...], name: str, text: str, *, strict: bool
) -> tuple[tuple[GPU, ...], str]:
    """Return the GPUs that the list ``text`` selects, and a note about the list.

    ROCr is ``strict``: a repeated GPU ends the list, and a unique id must match exactly one GPU,
    but spaces around an entry are ignored. HIP is not strict, but spaces make an entry invalid.
    """
    indices: list[int] = []

    def find(entry: str) -> int:
        index = _index_of(entry.strip() if strict else entry, gpus, strict)
        if strict and index in indices:
            raise ValueError(f"GPU {index} was named before")
        indices.append(index)
        return index

    listed = read_device_list(name, text.removesuffix(","), find)
    return tuple(gpus[index] for index in dict.fromkeys(listed.devices)), listed.note


def _index_of(entry: str, gpus: Sequence[GPU], strict: bool) -> int:
    """Return the index of the GPU that an entry selects.

    Raises: ValueError: the entry selects no GPU.
    """
    if entry.upper().startswith("GPU-"):
        prefix = entry[4:].lower()
        matches = [i for i, gpu in enumerate(gpus) if prefix and gpu.unique_id.startswith(prefix)]
        if len(matches) == 1 or (matches and not strict):
            return matches[0]
        matches_text = f"{len(matches)} GPUs have" if matches else "no GPU has"
        raise ValueError(f"{matches_text} a unique id that begins with {entry}")
    # Both runtimes reject an index with leading zeros.
    if not re.fullmatch(r"0|-?[1-9]\d*", entry):
        raise ValueError(f"{entry!r} is neither an index nor a unique id")
    require_index(int(entry), len(gpus))
    return int(entry)
