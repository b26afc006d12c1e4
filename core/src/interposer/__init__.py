"""Route any model to any accelerator, and explain why each route was chosen.

Every public name is loaded on first use: importing the package initialises no device, loads no
plugin, reads no environment variable and starts no thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from interposer._contract.lazy_names import lazy_attributes
except ImportError as error:
    import sys

    # The usual cause is another version of interposer_sandbox on the path, so name both files.
    _file = getattr(sys.modules.get("interposer_sandbox"), "__file__", None)
    raise ImportError(
        f"{error}. interposer is of {__file__}, and interposer_sandbox of {_file}. Try: reinstall "
        "interposer-sandbox, or rename, remove or take off PYTHONPATH the module that shadows it",
        name="interposer_sandbox",
    ) from error

if TYPE_CHECKING:
    from interposer._config.config import Config, effective_config, use
    from interposer._config.policy import Policy
    from interposer._config.rules import Rule
    from interposer._contract.attention import (
        AttentionBackend,
        AttentionBatch,
        AttentionSpec,
        KVCacheLayout,
    )
    from interposer._contract.capability import Capability, Device, Memory
    from interposer._contract.checkpoint import CheckpointFile
    from interposer._contract.choice import Candidate, Choice
    from interposer._contract.communicator import Communicator, Ranks
    from interposer._contract.layer import BoundKernel, PluggableLayer, Site
    from interposer._contract.model import CausalModel, ModelFamily
    from interposer._contract.op import (
        Case,
        CaseGenerator,
        CaseSampler,
        CustomOp,
        Dims,
        Tolerance,
        custom_op,
    )
    from interposer._contract.platform import NumericsPolicy, Placement, Platform
    from interposer._contract.quantization import (
        CacheFormat,
        Call,
        EmbeddingMethod,
        ExpertsMethod,
        ExpertsSpec,
        LinearMethod,
        QuantizationScheme,
    )
    from interposer._contract.records import (
        AttentionEntry,
        CheckpointEntry,
        CommunicatorEntry,
        DeviceEntry,
        Kernel,
        LayerEntry,
        ModelEntry,
        OpEntry,
        PlatformEntry,
        SchemeEntry,
        TuningEntry,
    )
    from interposer._contract.request import Request
    from interposer._contract.requires import Dim, Requires
    from interposer._contract.verdict import Refusal, Verdict
    from interposer._explanation.explanation import Explanation, explain
    from interposer._plugins.registry import Registration, Registry, current_registry, register
    from interposer._selection.placement import Planned, current_platform, place, planned
    from interposer._selection.resolver import Resolver
    from interposer._selection.select import select
    from interposer._validation.compatibility import API_VERSION
    from interposer.hookspecs import hookimpl

# fmt: off
__all__ = [
    "API_VERSION", "AttentionBackend", "AttentionBatch", "AttentionEntry", "AttentionSpec",
    "BoundKernel", "CacheFormat", "Call", "Candidate", "Capability", "Case", "CaseGenerator",
    "CaseSampler", "CausalModel", "CheckpointEntry", "CheckpointFile", "Choice", "Communicator",
    "CommunicatorEntry", "Config", "CustomOp", "Device", "DeviceEntry", "Dim", "Dims",
    "EmbeddingMethod", "ExpertsMethod", "ExpertsSpec", "Explanation", "KVCacheLayout", "Kernel",
    "LayerEntry", "LinearMethod", "Memory", "ModelEntry", "ModelFamily", "NumericsPolicy",
    "OpEntry", "Placement", "Planned", "Platform", "PlatformEntry", "PluggableLayer", "Policy",
    "QuantizationScheme", "Ranks", "Refusal", "Registration", "Registry", "Request", "Requires",
    "Resolver", "Rule", "SchemeEntry", "Site", "Tolerance", "TuningEntry", "Verdict",
    "current_platform", "current_registry", "custom_op", "effective_config", "explain",
    "hookimpl", "place", "planned", "register", "select", "use",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer._config.config": "Config effective_config use",
        "interposer._config.policy": "Policy",
        "interposer._config.rules": "Rule",
        "interposer._contract.attention": (
            "AttentionBackend AttentionBatch AttentionSpec KVCacheLayout"
        ),
        "interposer._contract.capability": "Capability Device Memory",
        "interposer._contract.checkpoint": "CheckpointFile",
        "interposer._contract.choice": "Candidate Choice",
        "interposer._contract.communicator": "Communicator Ranks",
        "interposer._contract.layer": "BoundKernel PluggableLayer Site",
        "interposer._contract.model": "CausalModel ModelFamily",
        "interposer._contract.op": (
            "Case CaseGenerator CaseSampler CustomOp Dims Tolerance custom_op"
        ),
        "interposer._contract.platform": "NumericsPolicy Placement Platform",
        "interposer._contract.quantization": (
            "CacheFormat Call EmbeddingMethod ExpertsMethod ExpertsSpec LinearMethod "
            "QuantizationScheme"
        ),
        "interposer._contract.records": (
            "AttentionEntry CheckpointEntry CommunicatorEntry DeviceEntry Kernel LayerEntry "
            "ModelEntry OpEntry PlatformEntry SchemeEntry TuningEntry"
        ),
        "interposer._contract.request": "Request",
        "interposer._contract.requires": "Dim Requires",
        "interposer._contract.verdict": "Refusal Verdict",
        "interposer._explanation.explanation": "Explanation explain",
        "interposer._plugins.registry": "Registration Registry current_registry register",
        "interposer._selection.placement": "Planned current_platform place planned",
        "interposer._selection.resolver": "Resolver",
        "interposer._selection.select": "select",
        "interposer._validation.compatibility": "API_VERSION",
        "interposer.hookspecs": "hookimpl",
    },
)


def __dir__() -> list[str]:
    return __all__
