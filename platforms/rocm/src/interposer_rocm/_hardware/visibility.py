"""Visibility of GPUs to a process, by the variables that the runtimes read.

The lower runtime (ROCr) applies ``ROCR_VISIBLE_DEVICES`` to all GPUs; HIP then applies
``HIP_VISIBLE_DEVICES`` to what is left, or ``CUDA_VISIBLE_DEVICES`` where that one is empty or not
set. ``HSA_OVERRIDE_GFX_VERSION`` makes a GPU pass for one of another architecture.

Source: AMD's "GPU isolation techniques"; ROCR-Runtime's amd_filter_device.cpp (a list ends at the
first entry that names nothing, or a GPU again; empty shows none) and libhsakmt's topology.c; clr's
rocdevice.cpp (a list ends at the first entry that names nothing, what is named twice counts once,
empty is as if not set).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from interposer_rocm._hardware.architectures import GfxVersion
from interposer_rocm._hardware.topology import GPU

_ROCR, _HIP, _CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
VARIABLES = (_ROCR, _HIP, _CUDA, _OVERRIDE)
"""Variables that decide, in the order in which they do."""

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Visible:
    """The GPUs that a process sees.

    Attributes:
        gpus: in HIP's order, which is torch's.
        note: why these and no others; empty where these are all.
    """

    gpus: tuple[GPU, ...]
    note: str = ""


def visible(gpus: Sequence[GPU], variables: Mapping[str, str]) -> Visible:
    """Return the GPUs that HIP would show; ``gpus`` are in the order of their nodes."""
    notes = []
    shown = tuple(gpus)
    if _ROCR in variables:
        shown, note = _listed(shown, _ROCR, variables[_ROCR], strict=True)
        notes.append(note)
    for name in (_HIP, _CUDA):
        if variables.get(name):
            if shown:
                shown, note = _listed(shown, name, variables[name], strict=False)
                notes.append(note)
            break
    return Visible(shown, "; ".join(notes))


def overridden(gpu: GPU, variables: Mapping[str, str]) -> GPU:
    """Return the GPU as the runtime presents it, of another version where a variable says so."""
    text = variables.get(f"{_OVERRIDE}_{gpu.node}") or variables.get(_OVERRIDE, "")
    match = _VERSION.match(text)
    if match is None:
        return gpu
    major, minor, stepping = (int(number) for number in match.groups())
    try:
        return replace(gpu, version=GfxVersion(major, minor, stepping))
    except ValueError:  # the runtime takes no such numbers either
        return gpu


def _listed(
    gpus: tuple[GPU, ...], name: str, text: str, *, strict: bool
) -> tuple[tuple[GPU, ...], str]:
    """Return the GPUs that a list names, and the sentence about it.

    Where it is ``strict``, as for ROCr, a list ends at a GPU that it named before, and a unique id
    has to be that of one GPU; but spaces around an entry do not matter, as they do for HIP.
    """
    if not text.strip():
        return (), f"{name} is empty, which hides every GPU"
    found: list[GPU] = []
    for entry in text.removesuffix(",").split(","):
        place, problem = _place(entry.strip() if strict else entry, gpus, strict)
        if not problem and gpus[place] in found:
            if not strict:
                continue
            problem = f"GPU {place} was named before"
        if problem:
            return tuple(found), f"{name}={text}: {problem}, and the list ends there"
        found.append(gpus[place])
    return tuple(found), f"{name}={text}"


def _place(entry: str, gpus: Sequence[GPU], strict: bool) -> tuple[int, str]:
    """Return the index that an entry means, and the fault of the entry."""
    if entry.upper().startswith("GPU-"):
        wanted = entry[4:].lower()
        matches = [i for i, gpu in enumerate(gpus) if wanted and gpu.unique_id.startswith(wanted)]
        if len(matches) == 1 or (matches and not strict):
            return matches[0], ""
        what = f"{len(matches)} GPUs have" if matches else "no GPU has"
        return -1, f"{what} a unique id that begins with {entry}"
    if not re.fullmatch(r"0|-?[1-9]\d*", entry):
        return -1, f"{entry!r} is neither an index nor a unique id"
    if not 0 <= int(entry) < len(gpus):
        last = f"the last is {len(gpus) - 1}" if gpus else "there are none"
        return -1, f"there is no GPU {entry}, {last}"
    return int(entry), ""
