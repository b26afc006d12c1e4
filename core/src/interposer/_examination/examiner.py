"""Examines code of distributions once and remembers the verdict, in memory and on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import importlib_metadata

import interposer_sandbox
from interposer._config.config import Config
from interposer._config.storage import Store, default_store
from interposer._contract.errors import StorageError, warn
from interposer._examination.inspection import COMPARISON, FUNCTIONS, HOST, perform
from interposer._examination.task import Task
from interposer._validation.distribution import Distribution, read_distribution
from interposer_sandbox import Finding, NestedError, Sandbox, SandboxError, UnavailableError

_log = logging.getLogger("interposer")

_KIND = "verdicts"
# Fake tensors import torch's compiler.
_FOR_KERNELS = (COMPARISON, "torch._dynamo")
# Lines of /proc/cpuinfo that are the same whenever and on whichever core they are read.
_LASTING = frozenset(
    {"vendor_id", "model name", "flags", "Features", "features", "CPU implementer", "CPU part"}
)
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
_lock = RLock()


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
    finding = _current(_remembered.get(known), config)
    if finding is not None:
        return finding
    with _lock:  # threads that ask for the same thing wait for one answer
        finding = _current(_remembered.get(known), config)
        if finding is not None:
            return finding
        store = default_store(config)
        finding = _current(_read(store, key), config)
        if finding is not None and not _has_a_chance(finding, config):
            _remembered[known] = finding
            return finding
        had_a_chance = finding is not None
        start = time.time_ns()
        finding, lasts = _examined(task, config)
        span = (start, time.time_ns())
        if had_a_chance and "limit_seconds" in finding.facts:
            finding = replace(finding, facts={**finding.facts, "times_late": 2})
        if lasts:
            _remembered[known] = finding
            if not finding.facts.get("passing"):
                _write(store, key, finding)
        return replace(finding, span=span)


def examine_all(tasks: Iterable[tuple[Distribution, Task]], config: Config) -> list[Finding]:
    """Return the findings on several tasks, in order; one child process serves them all."""
    return [examine(dist, task, config) for dist, task in tasks]


def forget_verdicts() -> None:
    """Forget what this process remembers; what is on disk stays."""
    with _lock:
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


def _current(finding: Finding | None, config: Config) -> Finding | None:
    """Return a finding unless it is a refusal whose cause is gone."""
    if finding is None or finding:
        return finding
    limit, missing = finding.facts.get("limit_seconds"), finding.facts.get("missing")
    if isinstance(limit, int | float) and limit < config.probe_seconds:
        return None
    if isinstance(missing, str) and _is_installed(missing.partition(".")[0]):
        return None
    return finding


def _has_a_chance(finding: Finding, config: Config) -> bool:
    """Say whether code that took too long once may try again: not with less time than then."""
    late = not finding and finding.facts.get("limit_seconds") == config.probe_seconds
    return late and "times_late" not in finding.facts


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ValueError, ImportError):
        return False


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
    # What is refused changes with every edit of this code. Without metadata, as where a folder
    # was only put on the path, files are read.
    try:
        parts = map(importlib_metadata.distribution, ("interposer", "interposer-sandbox"))
        own = " ".join(read_distribution(part).fingerprint for part in parts)
    except importlib_metadata.PackageNotFoundError:
        folders = (Path(__file__).parents[1], Path(interposer_sandbox.__file__).parent)
        own = _digest(sorted(file for folder in folders for file in folder.rglob("*.py")))
    try:
        torch = str(importlib_metadata.version("torch"))
    except importlib_metadata.PackageNotFoundError:
        spec = importlib.util.find_spec("torch")
        origin = spec.origin if spec is not None else None
        torch = _digest([Path(origin).with_name("version.py")]) if origin else ""
    return {
        "interposer": own,
        "torch": torch,
        "python": platform.python_version(),
        "machine": f"{sys.platform} {platform.machine()}",
        "processor": _processor(),
    }


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with suppress(OSError):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """Return what tells processors apart, for caches that several machines share."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    first = text.partition("\n\n")[0].splitlines()
    lasting = [line for line in first if line.partition(":")[0].strip() in _LASTING]
    return hashlib.sha256("\n".join(lasting).encode()).hexdigest()


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


def _renew_lock() -> None:
    # The thread that may hold it is not in a forked process.
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
