"""The parts of the core for command lines, conformance kits and tuners.

Models and plugins do not need this module. Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer._contract.lazy_names import lazy_attributes

if TYPE_CHECKING:
    from interposer._config.config import child_environment, config_sources, variables
    from interposer._config.file_access import (
        SharedCacheWarning,
        irregular,
        open_owned,
        warn_if_shared,
    )
    from interposer._config.policy import policy_for
    from interposer._config.rules import parse_rules
    from interposer._config.steady_time import steady_time_ns
    from interposer._config.storage import (
        Store,
        canonical_json,
        checksum,
        default_store,
        write_text,
    )
    from interposer._contract.attention import UINT4
    from interposer._contract.choice import Measured
    from interposer._contract.gathering import gather_bytes
    from interposer._contract.host_member import HostMember
    from interposer._contract.lazy_names import (
        BACKEND_REMEDY,
        backend_problem,
        import_problem,
        lazy_attributes,
        unreadable_entry_points,
    )
    from interposer._contract.platform import applied
    from interposer._contract.request import Kind
    from interposer._explanation.inventory import Row, Subject, strays
    from interposer._explanation.text import (
        answer,
        figures,
        options_here,
        places_summary,
        refused_lines,
        subject_summary,
    )
    from interposer._plugins.acceptance import acceptance_of
    from interposer._plugins.discovery import entry_points, installed_distributions
    from interposer._plugins.plugins import Plugin, Plugins, PluginWarning, Skipped
    from interposer._plugins.registry import forget_discovery
    from interposer._plugins.trust import Lock, allowed, check_lock, lock_path
    from interposer._selection.measurements import Measurements
    from interposer._selection.placement import platform_hint, unless_explicit
    from interposer._validation.compatibility import API_RANGE, check_api
    from interposer._validation.distribution import STANDARD
    from interposer._validation.records import check_classes, check_records

# fmt: off
__all__ = [
    "API_RANGE", "BACKEND_REMEDY", "STANDARD", "UINT4", "HostMember", "Kind", "Lock", "Measured",
    "Measurements", "Plugin", "PluginWarning", "Plugins", "Row", "SharedCacheWarning", "Skipped",
    "Store", "Subject", "acceptance_of", "allowed", "answer", "applied", "backend_problem",
    "canonical_json", "check_api", "check_classes", "check_lock", "check_records", "checksum",
    "child_environment", "config_sources", "default_store", "entry_points", "figures",
    "forget_discovery", "gather_bytes", "import_problem", "installed_distributions", "irregular",
    "lazy_attributes", "lock_path", "open_owned", "options_here", "parse_rules", "places_summary",
    "platform_hint", "policy_for", "refused_lines", "steady_time_ns", "strays", "subject_summary",
    "unless_explicit", "unreadable_entry_points", "variables", "warn_if_shared", "write_text",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer._config.config": "child_environment config_sources variables",
        "interposer._config.file_access": (
            "SharedCacheWarning irregular open_owned warn_if_shared"
        ),
        "interposer._config.policy": "policy_for",
        "interposer._config.rules": "parse_rules",
        "interposer._config.steady_time": "steady_time_ns",
        "interposer._config.storage": "Store canonical_json checksum default_store write_text",
        "interposer._contract.attention": "UINT4",
        "interposer._contract.choice": "Measured",
        "interposer._contract.gathering": "gather_bytes",
        "interposer._contract.host_member": "HostMember",
        "interposer._contract.platform": "applied",
        "interposer._contract.request": "Kind",
        "interposer._explanation.inventory": "Row Subject strays",
        "interposer._explanation.text": (
            "answer figures options_here places_summary refused_lines subject_summary"
        ),
        "interposer._contract.lazy_names": (
            "BACKEND_REMEDY backend_problem import_problem lazy_attributes unreadable_entry_points"
        ),
        "interposer._plugins.acceptance": "acceptance_of",
        "interposer._plugins.discovery": "entry_points installed_distributions",
        "interposer._plugins.plugins": "Plugin PluginWarning Plugins Skipped",
        "interposer._plugins.registry": "forget_discovery",
        "interposer._plugins.trust": "Lock allowed check_lock lock_path",
        "interposer._selection.measurements": "Measurements",
        "interposer._selection.placement": "platform_hint unless_explicit",
        "interposer._validation.compatibility": "API_RANGE check_api",
        "interposer._validation.distribution": "STANDARD",
        "interposer._validation.records": "check_classes check_records",
    },
)


def __dir__() -> list[str]:
    return __all__
