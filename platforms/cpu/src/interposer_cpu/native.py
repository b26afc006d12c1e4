"""The compiled library of this platform: its presence, and the instructions that it uses.

It holds every kernel once for each level of instructions of its architecture, and uses those of
the highest level that the processor has.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from interposer import Capability, Request, Verdict
from interposer.errors import ConfigError, nearest_first
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
"""Names of the levels by the library's numbers, ascending on each architecture."""

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
"""Levels of each architecture, ascending, and the features that each needs besides those of the
levels before it."""

BESIDE = frozenset({"avx2_vnni"})
"""Levels that a processor may lack though it has one above."""

# Ops of the library that write to their arguments and return nothing.
_WRITERS = (
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
    """Return the library, ready for use, or why there is none."""
    try:
        import interposer_cpu._native as _native
    except ModuleNotFoundError:
        return None, (
            "this installation holds no native kernels, as they could not be compiled. "
            "Try: install a C++ compiler, then interposer-cpu anew"
        )
    except ImportError as error:
        return None, f"the native kernels cannot be loaded: {error}"
    libraries = Path(torch.__file__).parent / "lib"
    paths = [*libraries.glob("libtorch_cpu.*"), *libraries.glob("libtorch.so")]
    missing = _native.attach(str(paths[0])) if paths else "libtorch_cpu"
    if missing:
        return None, f"the native kernels do not find {missing} in torch {torch.__version__}"
    if not _native.levels():
        return None, "the native kernels need newer instructions than this processor has"
    torch.library.register_fake("interposer_cpu::linear_out", lambda out, x, packed, scale: None)
    for name in _WRITERS:
        torch.library.register_fake(f"interposer_cpu::{name}", lambda *arguments: None)
    return _native, ""


def library() -> ModuleType:
    """Return the compiled module.

    Raises: ConfigError: this installation has none, or not for this processor.
    """
    module, reason = _load()
    if module is None:
        raise ConfigError(reason)
    return module


def why_absent() -> str:
    """Return why native kernels cannot be used here; empty where they can."""
    return _load()[1]


def levels() -> tuple[str, ...]:
    """Return the levels that the processor has, ascending; none without native kernels."""
    module = _load()[0]
    return tuple(LEVELS[number] for number in module.levels()) if module else ()


def level() -> str:
    """Return the level in use, empty without native kernels."""
    module = _load()[0]
    return LEVELS[module.level()] if module else ""


def levels_of(capability: Capability) -> tuple[str, ...]:
    """Return the levels that the features of a device are enough for, ascending.

    A library that an old compiler made, and a system that keeps large registers to itself, have
    fewer.
    """
    found = list[str]()
    for name, needed in NEEDS.get(capability.architecture, {}).items():
        if needed <= capability.features:
            found.append(name)
        elif name not in BESIDE:
            break
    return tuple(found)


def force_level(name: str | None) -> None:
    """Use the instructions of the level ``name`` from now on; None for the best.

    Raises: ConfigError: the processor or the library lacks it.
    """
    wanted = 0 if name is None else {v: k for k, v in LEVELS.items()}.get(name, -1)
    if not library().force_level(wanted):
        has = ", ".join(nearest_first(str(name), levels()))
        raise ConfigError(f"there is no level {name!r} here. This processor has: {has}")


def judge(request: Request) -> Verdict:
    """Accept devices that the library has kernels for, and this machine if it holds it."""
    return judge_device(request.capability)


def judge_device(capability: Capability) -> Verdict:
    """Accept devices that the library has kernels for, and this machine if it holds it."""
    known = NEEDS.get(capability.architecture)
    if known is None:
        written = ", ".join(NEEDS)
        return Verdict.refuse(f"is written for {written}, the device is {capability.architecture}")
    lowest = next(iter(known.values()))
    missing = sorted(lowest - capability.features)
    if missing:
        return Verdict.refuse(f"needs {', '.join(missing)}, which the device lacks")
    # Other architectures are only described, and have an installation of their own.
    reason = why_absent() if capability.architecture == architecture() else ""
    return Verdict.refuse(reason) if reason else Verdict.accept()
