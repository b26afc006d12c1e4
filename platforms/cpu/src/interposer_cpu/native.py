"""The compiled library of the CPU platform: loading, and choice of the instruction level.

The library holds every kernel once per instruction level of its architecture. By default, kernels
of the highest level that the processor supports are used.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from interposer import Capability, Request, Verdict
from interposer.errors import ConfigError, near_names
from interposer_cpu._features import architecture

__all__ = [
    "BESIDE",
    "LEVELS",
    "NEEDS",
    "force_level",
    "judge",
    "level",
    "levels",
    "levels_of",
    "library",
    "why_absent",
]

LEVELS = {
    1: "avx2",
    2: "avx2_vnni",
    3: "avx512",
    4: "avx512_vnni",
    5: "avx512_bf16",
    6: "amx",
    16: "neon",
    17: "dotprod",
    18: "bf16_i8mm",
    32: "z14",
    33: "z15",
}
"""Level names by the library's level numbers, ascending on each architecture."""

NEEDS = {
    "x86_64": {
        "avx2": {"avx2", "fma", "f16c", "bmi2"},
        "avx2_vnni": {"avx_vnni"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"},
        "avx512_vnni": {"avx512_vnni"},
        "avx512_bf16": {"avx512_bf16"},
        "amx": {"amx_tile", "amx_bf16", "amx_int8"},
    },
    "aarch64": {"neon": {"neon"}, "dotprod": {"dotprod"}, "bf16_i8mm": {"bf16", "i8mm"}},
    "s390x": {"z14": {"vx", "vxe"}, "z15": {"vxe2"}},
}
"""Levels of each architecture, ascending, with the features that a level needs in addition to the
features of all lower levels."""

BESIDE = frozenset({"avx2_vnni"})
"""Levels that a processor can lack although it supports a higher level."""

# Torch ops of the library that write results to arguments and return nothing.
_OUT_OPS = (
    "attention_out",
    "ragged_attention_out",
    "latent_attention_out",
    "page_attention_out",
    "lookup_out",
    "multiply_batch_out",
    "normalise_out",
    "add_rms_norm_out",
    "gate_out",
    "turn_heads_out",
    "code_out",
    "code_by_scale_out",
    "experts_out",
    "sample_out",
    "penalise_out",
    "route_out",
    "round_out",
    "convolve_out",
    "scan_states_out",
    "apply_delta_out",
    "lora_shrink_out",
    "lora_expand_out",
)


@cache
def _load() -> tuple[ModuleType | None, str]:
    """Import and initialize the library; return (None, reason) if that fails."""
    try:
        import interposer_cpu._native as _native
    except ModuleNotFoundError:
        return None, (
            "this installation holds no native kernels, as they could not be compiled. "
            "Try: install a C++ compiler, then interposer-cpu anew with `pip install --verbose`, "
            "which shows the compiler's errors"
        )
    except ImportError as error:
        return None, f"the native kernels cannot be loaded: {error}"
    # The library links to no torch: attach() looks up the few symbols it needs at run time.
    libraries = Path(torch.__file__).parent / "lib"
    paths = [*libraries.glob("libtorch_cpu.*"), *libraries.glob("libtorch.so")]
    missing = _native.attach(str(paths[0])) if paths else "libtorch_cpu"
    if missing:
        return None, f"the native kernels do not find {missing} in torch {torch.__version__}"
    if not _native.levels():
        return None, "the native kernels need newer instructions than this processor has"
    torch.library.register_fake("interposer_cpu::linear_out", lambda out, x, packed, scale: None)
    for name in _OUT_OPS:
        torch.library.register_fake(f"interposer_cpu::{name}", lambda *arguments: None)
    return _native, ""


def library() -> ModuleType:
    """Return the compiled library, imported at the first call.

    Raises: ConfigError: the installation has no compiled module, or none for this processor.
    """
    module, reason = _load()
    if module is None:
        raise ConfigError(reason)
    return module


def why_absent() -> str:
    """Return the reason why native kernels are unavailable; "" if they are available."""
    return _load()[1]


def levels() -> tuple[str, ...]:
    """List the instruction levels that this processor supports, ascending."""
    module = _load()[0]
    return tuple(LEVELS[number] for number in module.levels()) if module else ()


def level() -> str:
    """Return the name of the instruction level in use; "" without native kernels."""
    module = _load()[0]
    return LEVELS[module.level()] if module else ""


def levels_of(capability: Capability) -> tuple[str, ...]:
    """List the instruction levels that a device's features allow, ascending.

    The actual levels can be fewer: an old compiler cannot build all levels, and some operating
    systems do not enable large registers.
    """
    names = list[str]()
    for name, features in NEEDS.get(capability.architecture, {}).items():
        if features <= capability.features:
            names.append(name)
        elif name not in BESIDE:
            break
    return tuple(names)


def force_level(name: str | None) -> None:
    """Use the kernels of the instruction level ``name``; None selects the highest level.

    Raises: ConfigError: the processor or the library does not support the level.
    """
    number = 0 if name is None else {v: k for k, v in LEVELS.items()}.get(name, -1)
    if not library().force_level(number):
        near = near_names(str(name), levels())
        raise ConfigError(f"there is no level {name!r} here. Those of this processor: {near}")


def judge(request: Request) -> Verdict:
    """Accept a request if the compiled library has kernels for the request's device."""
    return judge_device(request.capability)


def judge_device(capability: Capability) -> Verdict:
    """Accept a device if the library has kernels for its architecture and features.

    For the architecture of this machine, the library must also be installed and load.
    """
    features_by_level = NEEDS.get(capability.architecture)
    if features_by_level is None:
        supported = ", ".join(NEEDS)
        return Verdict.refuse(
            f"is written for {supported}, the device is {capability.architecture}"
        )
    lowest = next(iter(features_by_level.values()))
    missing = sorted(lowest - capability.features)
    if missing:
        return Verdict.refuse(f"needs {', '.join(missing)}, which the device lacks")
    # A device of another architecture is a description, for which this installation says nothing.
    reason = why_absent() if capability.architecture == architecture() else ""
    return Verdict.refuse(reason) if reason else Verdict.accept()
