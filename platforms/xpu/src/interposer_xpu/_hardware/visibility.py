"""Visibility of Level Zero's devices to torch, by the variables that decide it.

``ZE_AFFINITY_MASK`` and ``ZE_FLAT_DEVICE_HIERARCHY`` are applied by the driver, so that a process
which asks it sees the outcome. ``ONEAPI_DEVICE_SELECTOR`` is applied above it, by the runtime of
SYCL, and read here.

Source: Level Zero specification, chapter "environment variables"; documentation of DPC++,
"environment variables": the grammar of ``ONEAPI_DEVICE_SELECTOR``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MASK = "ZE_AFFINITY_MASK"
HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
SELECTOR = "ONEAPI_DEVICE_SELECTOR"
_BACKENDS = {"level_zero", "*"}
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Shown:
    """The devices that the runtime shows.

    Attributes:
        ordinals: of the driver's devices, in its order.
        note: why these and no others, where that is not obvious.
    """

    ordinals: tuple[int, ...]
    note: str = ""


def shown(count: int, variables: Mapping[str, str]) -> Shown:
    """Return which of ``count`` devices of the driver are left by ``ONEAPI_DEVICE_SELECTOR``.

    Terms that accept come first and those that discard, with ``!``, after them; without any that
    accepts, all are accepted. A term names a backend, then devices by kind, number, or both by
    ``*``; parts of a device (``0.1``) are taken for the device.
    """
    every = tuple(range(count))
    text = variables.get(SELECTOR, "").strip()
    if not text:
        return Shown(every)
    accepted: set[int] = set()
    discarded: set[int] = set()
    terms = [term.strip().lower() for term in text.split(";") if term.strip()]
    for term in terms:
        chosen = _chosen(term.removeprefix("!"), count)
        (discarded if term.startswith("!") else accepted).update(chosen)
    if all(term.startswith("!") for term in terms):
        accepted = set(every)
    return Shown(tuple(sorted(accepted - discarded)), f"{SELECTOR}={text}")


def explained(variables: Mapping[str, str]) -> str:
    """Return what the driver was told by variables, for whoever sees no device or fewer."""
    told = [f"{name}={variables[name]}" for name in (MASK, HIERARCHY) if variables.get(name)]
    return " and ".join(told)


def _chosen(term: str, count: int) -> set[int]:
    backend, _, devices = term.partition(":")
    if backend not in _BACKENDS:
        return set()
    found: set[int] = set()
    for device in (part.strip() for part in devices.split(",")):
        root = device.partition(".")[0]
        if root in ("", "*", "gpu"):
            found |= set(range(count))
        elif _NUMBER.fullmatch(root) and int(root) < count:
            found.add(int(root))
    return found
