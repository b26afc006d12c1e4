"""AITER's functions: examined in another process first, then imported when one is needed.

Nothing of it is kept longer than its cause: another version, torch or setting is examined anew,
and ``refresh`` forgets everything, so that what was mended is seen without a restart.
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any

from interposer.environment import variables
from interposer.errors import InterposerError, PluginError
from interposer.request import Request
from interposer.verdict import Verdict
from interposer_rocm import aiter_inquiry
from interposer_rocm.aiter_package import aiter_version, is_quantized

__all__ = [
    "FLASH",
    "FUSED_MOE",
    "MLA_DECODE",
    "SHUFFLE_WEIGHT",
    "AiterError",
    "Inquiry",
    "confirm_experts",
    "confirm_latent",
    "confirm_scaled_experts",
    "function",
    "inquire",
    "refresh",
    "require",
]

FLASH = "aiter:flash_attn_varlen_func"
MLA_DECODE = "aiter.mla:mla_decode_fwd"
FUSED_MOE = "aiter.fused_moe:fused_moe"
SHUFFLE_WEIGHT = "aiter.ops.shuffle:shuffle_weight"

# Parameters that calls of this plugin name.
_WANTED = {
    FLASH: {
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("softmax_scale", "logits_soft_cap", "causal", "window_size"),
    },
    MLA_DECODE: {
        *("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens"),
        *("max_seqlen_q", "sm_scale"),
    },
    FUSED_MOE: {
        *("hidden_states", "w1", "w2", "topk_weight", "topk_ids"),
        *("activation", "quant_type"),
    },
    SHUFFLE_WEIGHT: {"x", "layout"},
}
_SCALES = {"w1_scale", "w2_scale"}
# Modules may be compiled when it is first imported on a machine.
_LIMIT_SECONDS = 900.0
_KNOWN = ("ImportError", "OSError", "CalledProcessError", "RuntimeError", "KeyError")
_SETTINGS = ("AITER_", "GPU_ARCHS", "HIP_", "ROCR_", "HSA_", "ROCM_", "CUDA_VISIBLE_DEVICES")


class AiterError(InterposerError):
    """AITER cannot be used; the text says why and what to try."""


@dataclass(frozen=True, slots=True)
class Inquiry:
    """What came of importing AITER in another process.

    Attributes:
        verdict: a refusal has the traceback only where its cause is none of the known kinds.
        parameters: names of the parameters of each function that is there.
    """

    verdict: Verdict
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def judge(self, *functions: str) -> Verdict:
        """Refuse where a function, or a parameter that calls name, is missing."""
        if not self.verdict:
            return self.verdict
        for name in functions:
            place = name.replace(":", ".")
            if name not in self.parameters:
                return Verdict.refuse(f"AITER {aiter_version()} has no {place}. Try a newer one")
            missing = sorted(_WANTED[name] - {*self.parameters[name]})
            if missing:
                lacks = ", ".join(missing)
                return Verdict.refuse(
                    f"{place} of AITER {aiter_version()} takes no {lacks}. Try another version"
                )
        return Verdict.accept()


_remembered: dict[tuple[object, ...], Inquiry] = {}
_functions: dict[str, Callable[..., Any]] = {}
_lock = RLock()


def refresh() -> None:
    """Forget what was found, so that it is found out again where it is asked for next."""
    with _lock:
        _remembered.clear()
        _functions.clear()


def inquire(limit_seconds: float = _LIMIT_SECONDS) -> Inquiry:
    """Return what came of importing AITER in another process, done now or remembered."""
    settings = sorted(item for item in variables().items() if item[0].startswith(_SETTINGS))
    key = (aiter_version(), *settings, *sys.path)
    with _lock:  # threads that ask for it wait for one process
        if key not in _remembered:
            _remembered[key] = _inquired(limit_seconds)
        return _remembered[key]


def require(*functions: str) -> None:
    """Return where AITER's ``functions`` can be called.

    Raises:
        AiterError: they cannot, for a reason of the known kinds.
        PluginError: the import failed in another way; it has the traceback.
    """
    verdict = inquire().judge(*functions)
    if verdict:
        return
    if verdict.traceback:
        raise PluginError("rocm", "interposer-rocm", verdict.reason, trace=verdict.traceback)
    raise AiterError(verdict.reason)


def function(name: str) -> Callable[..., Any]:
    """Return one of AITER's functions, or one of the enumerations beside them; imports it.

    Raises: AiterError, PluginError: see ``require``.
    """
    found = _functions.get(name)
    if found is None:
        require(*({name} & {*_WANTED}))
        module, _, attribute = name.partition(":")
        found = _functions[name] = getattr(importlib.import_module(module), attribute)
    return found


def confirm_experts(_request: Request) -> Verdict:
    """Say whether AITER's experts can be called here, and weights shuffled for them."""
    return inquire().judge(FUSED_MOE, SHUFFLE_WEIGHT)


def confirm_scaled_experts(request: Request) -> Verdict:
    """Say whether AITER's experts can be called here with scales of their weights."""
    verdict = confirm_experts(request)
    missing = sorted(_SCALES - {*inquire().parameters.get(FUSED_MOE, ())})
    if verdict and missing:
        return Verdict.refuse(
            f"aiter.fused_moe.fused_moe of AITER {aiter_version()} takes no {', '.join(missing)}. "
            "Try a newer one"
        )
    return verdict


def confirm_latent(request: Request) -> Verdict:
    """Say whether AITER's latent attention can be called here, over the request's cache."""
    found = inquire()
    verdict = found.judge(MLA_DECODE)
    quantized = is_quantized(request.dims, request.dtype)
    if verdict and quantized and "kv_scale" not in found.parameters[MLA_DECODE]:
        return Verdict.refuse(
            f"aiter.mla.mla_decode_fwd of AITER {aiter_version()} takes no kv_scale, which a "
            f"cache of {request.dims['cache_dtype']} needs. Try a newer one"
        )
    return verdict


def _inquired(limit_seconds: float) -> Inquiry:
    program = str(Path(aiter_inquiry.__file__))
    command = [sys.executable, "-P", program, json.dumps(sys.path), *_WANTED]
    version = aiter_version()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Inquiry(
            Verdict.refuse(
                f"AITER {version} was not imported within {limit_seconds:g} s, in which it may "
                "compile. What it has compiled is kept: try again"
            )
        )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return Inquiry(Verdict.refuse(_ended(version, done)))
    if "parameters" in answer:
        found = {name: tuple(names) for name, names in answer["parameters"].items()}
        return Inquiry(Verdict.accept(), found)
    return Inquiry(_failed(version, answer))


def _ended(version: str, done: subprocess.CompletedProcess[str]) -> str:
    said = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
    code = done.returncode
    names = {int(number): number.name for number in signal.Signals}
    how = names.get(-code, f"signal {-code}") if code < 0 else f"code {code}"
    return (
        f"the process that imports AITER {version} ended with {how}: {said[0]}. It may have been "
        "built for other GPUs or another torch: build it here"
    )


def _failed(version: str, answer: Mapping[str, Any]) -> Verdict:
    missing, text, kinds = answer["missing"], answer["text"], answer["kind"]
    if missing:
        package = missing.partition(".")[0]
        return Verdict.refuse(
            f"AITER {version} needs the package {package}. Try: pip install {package}"
        )
    reason = f"AITER {version} cannot be imported: {kinds[0]}: {text}"
    return Verdict.refuse(reason, "" if {*kinds} & {*_KNOWN} else answer["trace"])
