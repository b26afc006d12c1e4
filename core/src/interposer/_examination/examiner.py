"""Examines code of distributions once and remembers the verdict, in memory and on disk."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import importlib_metadata

from interposer._config.config import Config
from interposer._config.storage import Store, default_store
from interposer._contract.errors import StorageError, warn
from interposer._examination.inspection import COMPARISON, FUNCTIONS, HOST, perform
from interposer._examination.task import Task
from interposer._validation.distribution import Distribution, read_distribution
from interposer_sandbox import (
    Finding,
    ForkSafeLock,
    NestedError,
    Sandbox,
    SandboxError,
    UnavailableError,
    digest,
    surroundings,
)

_log = logging.getLogger("interposer")

_KIND = "verdicts"
# Fake tensors import torch's compiler.
_FOR_KERNELS = (COMPARISON, "torch._dynamo")
_NESTED = (
    "a plugin asked for other plugins while it was examined. "
    "Try: do so when it is used, not when it is imported or probed"
)
_MEND = "Config(isolation='off') runs plugins without examining them in another process"

SANDBOX = Sandbox(
    HOST,
    lambda: _log.info("Examining plugins in another process; it is remembered what was found."),
)
_remembered: dict[str, Finding] = {}
_warned: set[str] = set()
_lock = ForkSafeLock()


class VerdictWarning(UserWarning):
    """A remembered verdict cannot be read or kept."""


def examine(dist: Distribution, task: Task, config: Config, *, driver: str = "") -> Finding:
    """Return the finding on a task for code of ``dist``, made now or remembered.

    With ``config.isolation`` it is made in another process, where each stage may take
    ``config.probe_seconds``. A remembered refusal counts only while its cause can persist: not
    that of a limit which is now higher, or of a missing module which is now there. Whoever took
    too long gets a second chance in the next process, as the machine may have been busy. The
    facts say so with ``times_late`` if it took too long twice in a row, and with ``unavailable``
    where no process could examine anything.

    Args:
        driver: what tells apart the drivers that the code may meet.
    """
    SANDBOX.release()
    key = _key(dist, task, config, driver)
    known = json.dumps([key, config.cache_dir], sort_keys=True)
    finding = _remembered.get(known)
    if finding is not None and finding.stands(config.probe_seconds):
        return finding
    with _lock.held:  # threads that ask for the same thing wait for one answer
        finding = _remembered.get(known)
        if finding is not None and finding.stands(config.probe_seconds):
            return finding
        store = default_store(config)
        finding = _read(store, key)
        stands = finding is not None and finding.stands(config.probe_seconds)
        if finding is not None and stands and not _has_a_chance(finding, config):
            _remembered[known] = finding
            return finding
        start = time.time_ns()
        finding, lasts = _examined(task, config)
        span = (start, time.time_ns())
        if stands and "limit_seconds" in finding.facts:
            finding = replace(finding, facts={**finding.facts, "times_late": 2})
        if lasts:
            _remembered[known] = finding
            if not finding.facts.get("passing"):
                _write(store, key, finding)
        return replace(finding, span=span)


def forget_verdicts() -> None:
    """Forget what this process remembers; what is on disk stays."""
    with _lock.held:
        _remembered.clear()
        _warned.clear()


def _examined(task: Task, config: Config) -> tuple[Finding, bool]:
    """Return a finding, and whether it says something about the code and not only this moment."""
    if config.isolation == "off":
        return perform(task), True
    try:
        modules = _FOR_KERNELS if task.name == "kernel" else ()
        function, seconds = FUNCTIONS[task.name], config.probe_seconds
        return SANDBOX.run(function, task.arguments, seconds, modules=modules), True
    except UnavailableError as error:
        reason = f"cannot be examined: {error}. Try: {_MEND}"
        return Finding.refuse(reason, unavailable=True), False
    except NestedError:
        return Finding.refuse(f"cannot be examined: {_NESTED}"), False
    except SandboxError as error:  # without the other process it would end this one
        return Finding.refuse(f"cannot be examined: {error}"), False


def _has_a_chance(finding: Finding, config: Config) -> bool:
    """Say whether code that took too long once may try again: not with less time than then."""
    late = not finding and finding.facts.get("limit_seconds") == config.probe_seconds
    return late and "times_late" not in finding.facts


def _key(dist: Distribution, task: Task, config: Config, driver: str) -> dict[str, Any]:
    return {
        "task": task.name,
        "arguments": dict(task.arguments),
        "distribution": dist.name,
        "version": dist.version,
        "fingerprint": dist.fingerprint,
        "driver": driver,
        "isolation": config.isolation,
        **_surroundings(),
    }


@cache
def _surroundings() -> Mapping[str, str]:
    try:
        own = read_distribution(importlib_metadata.distribution("interposer")).fingerprint
    except importlib_metadata.PackageNotFoundError:  # a folder was only put on the path
        own = digest(Path(__file__).parents[1].rglob("*.py"))
    return {"interposer": own, **surroundings()}


def _read(store: Store, key: Mapping[str, Any]) -> Finding | None:
    try:
        value = store.read(_KIND, key)
        return None if value is None else Finding.from_json(value)
    except StorageError as error:
        _warn_once(error.path, error)
    except ValueError as error:
        _warn_once(f"{store.folder} {error}", error)
    return None


def _write(store: Store, key: Mapping[str, Any], finding: Finding) -> None:
    try:
        store.write(_KIND, key, finding.to_json())
    except StorageError as error:
        _warn_once("write", error)


def _warn_once(cause: str, error: Exception) -> None:
    if cause not in _warned:
        _warned.add(cause)
        warn(f"A verdict cannot be remembered. {error}", VerdictWarning)
