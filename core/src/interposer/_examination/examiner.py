"""Examination of distributions' code; each verdict is remembered in memory and on disk."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
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
    paused_collection,
    surroundings,
)

_log = logging.getLogger("interposer")

_KIND = "verdicts"
# The comparison uses fake tensors, which import torch's compiler.
_FOR_KERNELS = (COMPARISON, "torch._dynamo")
_NESTED = (
    "the plugin requested other plugins while it was examined. "
    "Try: request them when the plugin is used, not when it is imported or probed"
)
_REMEDY = "Config(isolation='off') runs plugins without examining them in another process"

_is_announced = False


def _announce(text: str = "Examining the code of plugins, once") -> None:
    """Log once per process that plugins are being examined and that verdicts are remembered."""
    global _is_announced
    if not _is_announced:
        _is_announced = True
        _log.info("%s; the verdicts are remembered", text)


SANDBOX = Sandbox(HOST, _announce)
_remembered: dict[str, Finding] = {}
_warned: set[str] = set()
_lock = ForkSafeLock()


class VerdictWarning(UserWarning):
    """A remembered verdict cannot be read or stored."""


def examine(dist: Distribution, task: Task, config: Config, *, driver: str = "") -> Finding:
    """Return the finding of a task for code of ``dist``, made now or remembered.

    With ``config.isolation`` the task runs in another process, where each stage may take
    ``config.probe_seconds``. A remembered refusal is only reused while the cause can persist, so
    not after a time limit was raised or a missing module was installed. Code that exceeded the
    limit is examined once more by the next process, because the machine may have been busy. The
    finding's facts contain ``times_late`` if the limit was exceeded twice in a row, and
    ``unavailable`` if no process could examine the code.

    Args:
        driver: identifies the drivers that the code may use.
    """
    SANDBOX.release()
    key = _key(dist, task, config, driver)
    memory_key = _memory_key(key, config)
    finding = _remembered.get(memory_key)
    if finding is not None and finding.stands(config.probe_seconds):
        return finding
    # Checked again below, because another thread may have finished meanwhile.
    with _lock.held:  # concurrent threads share one examination
        finding, was_late = _recall(key, config)
        if finding is not None:
            return finding
        start = time.time_ns()
        finding, is_lasting = _examine_now(task, config)
        span = (start, time.time_ns())
        if was_late and "limit_seconds" in finding.facts:
            finding = replace(finding, facts={**finding.facts, "times_late": 2})
        if is_lasting:
            _remembered[memory_key] = finding
            # A process that was killed from outside says nothing about the code, so it is not
            # stored.
            if not finding.facts.get("passing"):
                _write(default_store(config), key, finding)
        return replace(finding, span=span)


def prepare(plugins: Iterable[tuple[Distribution, Task]], config: Config) -> None:
    """Log the number of plugins without a remembered verdict, and start the sandbox in advance.

    Does nothing if every verdict is remembered, or if the code runs in this process.
    """
    if config.isolation == "off":
        return
    with _lock.held:
        verdicts = [_recall(_key(dist, task, config, ""), config)[0] for dist, task in plugins]
    num_plugins = verdicts.count(None)
    if not num_plugins:
        return
    _announce(f"Examining {num_plugins} plugin{'s' if num_plugins > 1 else ''}, once")
    if num_plugins > 1:  # one plugin may not need torch, which takes longest
        SANDBOX.start()
        # This process needs torch as well. Both processes import it at the same time.
        with suppress(ImportError), paused_collection():
            import_module("torch")


def forget_verdicts() -> None:
    """Forget the verdicts in this process's memory, but not on disk."""
    with _lock.held:
        _remembered.clear()
        _warned.clear()


def _examine_now(task: Task, config: Config) -> tuple[Finding, bool]:
    """Examine code now; return the finding, and False if a temporary condition caused a refusal."""
    if config.isolation == "off":
        return perform(task), True
    try:
        modules = _FOR_KERNELS if task.name == "kernel" else ()
        function, seconds = FUNCTIONS[task.name], config.probe_seconds
        return SANDBOX.run(function, task.arguments, seconds, modules=modules), True
    except UnavailableError as error:
        reason = f"cannot be examined: {error}. Try: {_REMEDY}"
        return Finding.refuse(reason, unavailable=True), False
    except NestedError:
        return Finding.refuse(f"cannot be examined: {_NESTED}"), False
    except SandboxError as error:  # do not fall back to this process, which the code could kill
        return Finding.refuse(f"cannot be examined: {error}"), False


def _recall(key: Mapping[str, Any], config: Config) -> tuple[Finding | None, bool]:
    """Return (remembered finding or None, True if that finding is a first timeout to be retried).

    The caller holds the lock.
    """
    memory_key = _memory_key(key, config)
    finding = _remembered.get(memory_key)
    if finding is not None and finding.stands(config.probe_seconds):
        return finding, False
    finding = _read(default_store(config), key)
    if finding is None or not finding.stands(config.probe_seconds):
        return None, False
    if _may_retry(finding, config):
        return None, True
    _remembered[memory_key] = finding
    return finding, False


def _memory_key(key: Mapping[str, Any], config: Config) -> str:
    return json.dumps([key, config.cache_dir], sort_keys=True)


def _may_retry(finding: Finding, config: Config) -> bool:
    """Tell whether code may be examined again: it exceeded this time limit only once so far."""
    is_late = not finding and finding.facts.get("limit_seconds") == config.probe_seconds
    return is_late and "times_late" not in finding.facts


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
        fingerprint = read_distribution(importlib_metadata.distribution("interposer")).fingerprint
    except (
        importlib_metadata.PackageNotFoundError
    ):  # the source folder is on the path, not installed
        fingerprint = digest(Path(__file__).parents[1].rglob("*.py"))
    return {"interposer": fingerprint, **surroundings()}


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
