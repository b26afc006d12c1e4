"""interposer routes any model to any accelerator, and can say why each route was taken.

Every public name is loaded on first use: importing the package initialises no device, loads no
plugin, reads no environment and starts no thread.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interposer.attention import AttentionBackend, AttentionBatch, AttentionSpec, KVCacheLayout
    from interposer.capability import Capability, Device, Memory
    from interposer.checkpoint import CheckpointFile
    from interposer.choice import Candidate, Choice
    from interposer.compatibility import API_VERSION
    from interposer.config import Config, Rule, effective_config, use
    from interposer.device_description import DeviceDescription
    from interposer.explanation import Explanation, explain
    from interposer.health import doctor
    from interposer.hookspecs import hookimpl
    from interposer.layer import PluggableLayer, Site
    from interposer.op import Case, CustomOp, Tolerance, custom_op
    from interposer.placement import Placement, current_platform, place
    from interposer.planning import Planned, planned
    from interposer.platform import Platform
    from interposer.policy import Policy
    from interposer.quantization import (
        CacheFormat,
        EmbeddingMethod,
        ExpertsMethod,
        ExpertsSpec,
        LinearMethod,
        QuantizationScheme,
    )
    from interposer.records import (
        AttentionEntry,
        CheckpointEntry,
        DeviceEntry,
        Kernel,
        LayerEntry,
        OpEntry,
        PlatformEntry,
        SchemeEntry,
        TuningEntry,
    )
    from interposer.registration import Registration, register
    from interposer.registry import Registry, current_registry
    from interposer.request import Request
    from interposer.requires import Dim, Requires
    from interposer.resolver import Resolver
    from interposer.selection import select
    from interposer.threads import bind_threads
    from interposer.tuning import Table, tune
    from interposer.verdict import Refusal, Verdict

__all__ = [
    "API_VERSION",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionEntry",
    "AttentionSpec",
    "CacheFormat",
    "Candidate",
    "Capability",
    "Case",
    "CheckpointEntry",
    "CheckpointFile",
    "Choice",
    "Config",
    "CustomOp",
    "Device",
    "DeviceDescription",
    "DeviceEntry",
    "Dim",
    "EmbeddingMethod",
    "ExpertsMethod",
    "ExpertsSpec",
    "Explanation",
    "KVCacheLayout",
    "Kernel",
    "LayerEntry",
    "LinearMethod",
    "Memory",
    "OpEntry",
    "Placement",
    "Planned",
    "Platform",
    "PlatformEntry",
    "PluggableLayer",
    "Policy",
    "QuantizationScheme",
    "Refusal",
    "Registration",
    "Registry",
    "Request",
    "Requires",
    "Resolver",
    "Rule",
    "SchemeEntry",
    "Site",
    "Table",
    "Tolerance",
    "TuningEntry",
    "Verdict",
    "bind_threads",
    "current_platform",
    "current_registry",
    "custom_op",
    "doctor",
    "effective_config",
    "explain",
    "hookimpl",
    "place",
    "planned",
    "register",
    "select",
    "tune",
    "use",
]

_HOMES = {
    "attention": ("AttentionBackend", "AttentionBatch", "AttentionSpec", "KVCacheLayout"),
    "capability": ("Capability", "Device", "Memory"),
    "checkpoint": ("CheckpointFile",),
    "choice": ("Candidate", "Choice"),
    "compatibility": ("API_VERSION",),
    "config": ("Config", "Rule", "effective_config", "use"),
    "device_description": ("DeviceDescription",),
    "explanation": ("Explanation", "explain"),
    "health": ("doctor",),
    "hookspecs": ("hookimpl",),
    "layer": ("PluggableLayer", "Site"),
    "op": ("Case", "CustomOp", "Tolerance", "custom_op"),
    "placement": ("Placement", "current_platform", "place"),
    "planning": ("Planned", "planned"),
    "platform": ("Platform",),
    "policy": ("Policy",),
    "quantization": (
        "CacheFormat",
        "EmbeddingMethod",
        "ExpertsMethod",
        "ExpertsSpec",
        "LinearMethod",
        "QuantizationScheme",
    ),
    "records": (
        "AttentionEntry",
        "CheckpointEntry",
        "DeviceEntry",
        "Kernel",
        "LayerEntry",
        "OpEntry",
        "PlatformEntry",
        "SchemeEntry",
        "TuningEntry",
    ),
    "registration": ("Registration", "register"),
    "registry": ("Registry", "current_registry"),
    "request": ("Request",),
    "requires": ("Dim", "Requires"),
    "resolver": ("Resolver",),
    "selection": ("select",),
    "threads": ("bind_threads",),
    "tuning": ("Table", "tune"),
    "verdict": ("Refusal", "Verdict"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'interposer' has no attribute {name!r}")
    value = getattr(import_module(f"interposer.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
