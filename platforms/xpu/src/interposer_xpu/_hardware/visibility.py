"""Devices of Level Zero that SYCL and torch show, from environment variables.

The driver applies ``ZE_AFFINITY_MASK`` and ``ZE_FLAT_DEVICE_HIERARCHY``, so the driver's answer has
the remaining devices only. The SYCL runtime then applies ``ONEAPI_DEVICE_SELECTOR``, which this
module parses.

Source: Level Zero specification, chapter "environment variables"; documentation of DPC++,
"environment variables": the grammar of ``ONEAPI_DEVICE_SELECTOR``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from interposer_ops.devices.visible_devices import VisibleDevices

MASK = "ZE_AFFINITY_MASK"
HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
SELECTOR = "ONEAPI_DEVICE_SELECTOR"
_BACKENDS = {"level_zero", "*"}
_NUMBER = re.compile(r"\d+")


def visible_devices(count: int, variables: Mapping[str, str]) -> VisibleDevices[int]:
    """Return the positions of the devices that ``ONEAPI_DEVICE_SELECTOR`` selects.

    Terms with ``!`` discard devices, the other terms accept devices; without an accepting term, all
    devices are accepted. A term is ``backend:devices``. Devices are given by type, by number, or as
    ``*``; a sub-device such as ``0.1`` counts as its device.
    """
    all_ordinals = tuple(range(count))
    text = variables.get(SELECTOR, "").strip()
    if not text:
        return VisibleDevices(all_ordinals)
    accepted: set[int] = set()
    discarded: set[int] = set()
    terms = [term.strip().lower() for term in text.split(";") if term.strip()]
    for term in terms:
        selected = _select(term.removeprefix("!"), count)
        (discarded if term.startswith("!") else accepted).update(selected)
    if all(term.startswith("!") for term in terms):
        accepted = set(all_ordinals)
    return VisibleDevices(tuple(sorted(accepted - discarded)), f"{SELECTOR}={text}")


def driver_settings(variables: Mapping[str, str]) -> str:
    """Format the environment variables that the driver applies, "" if none is set."""
    assignments = [f"{name}={variables[name]}" for name in (MASK, HIERARCHY) if variables.get(name)]
    return " and ".join(assignments)


def _select(term: str, count: int) -> set[int]:
    backend, _, devices = term.partition(":")
    if backend not in _BACKENDS:
        return set()
    ordinals: set[int] = set()
    for device in (part.strip() for part in devices.split(",")):
        root = device.partition(".")[0]
        # All devices of Level Zero are GPUs here, so the type "gpu" selects all of them.
        if root in ("", "*", "gpu"):
            ordinals |= set(range(count))
        elif _NUMBER.fullmatch(root) and int(root) < count:
            ordinals.add(int(root))
    return ordinals
