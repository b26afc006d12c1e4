"""Examines code of distributions once and remembers the verdict, in memory and on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any

import importlib_metadata

from interposer._config.config import Config
from interposer._config.storage import Store, default_store
from interposer._contract.errors import StorageError
from interposer._sandbox import client as process
from interposer._sandbox.client import ExaminationError
from interposer._sandbox.task import Finding, Task
from interposer._sandbox.tasks import perform
from interposer._validation.distribution import Distribution, read_distribution

_KIND = "verdicts"
# Lines of /proc/cpuinfo that are the same whenever and on whichever core they are read.
_LASTING = frozenset(
    {"vendor_id", "model name", "flags", "Features", "features", "CPU implementer", "CPU part"}
)
_MEND = "Config(isolation='off') runs plugins without examining them in another process"

_remembered: dict[tuple[object, ...], Finding] = {}
_warned: set[str] = set()
_lock = RLock()


class VerdictWarning(UserWarning):
    """A remembered verdict cannot be read or kept."""


def examine(dist: Distribution, task: Task, config: Config, *, driver: str = "") -> Finding:
    """Return the finding on a task for code of ``dist``, made now or remembered.

    With ``config.isolation`` it is made in another process, where each stage may take
    ``config.probe_seconds``. A remembered refusal counts only while its cause can persist: not
    that of a limit which is now higher, or of a missing module which is now there. Whoever took
    too long gets a second chance in the next process, as the machine may have been busy.

    Args:
        driver: what tells apart the drivers that the code may meet.
    """
    process.release()
    arguments = json.dumps(task.arguments, sort_keys=True)
    known = (
        *(dist.name, dist.version, dist.fingerprint, task.name, arguments, driver),
        *(config.isolation, config.cache_dir),
    )
    finding = _remembered.get(known)
    if finding is not None and _persists(finding, config):
        return finding
    with _lock:  # threads that ask for the same thing wait for one answer
        finding = _remembered.get(known)
        if finding is not None and _persists(finding, config):
            return finding
        store = default_store(config)
        key = _key(dist, task, config, driver)
        finding = _read(store, key)
        if finding is None or not _persists(finding, config) or _has_a_chance(finding, config):
            before = finding if finding is not None and _persists(finding, config) else None
            start = time.time_ns()
            finding, lasts = _examined(task, config)
            span = (start, time.time_ns())
            if before is not None and _times_late(finding):
                finding = replace(finding, facts={**finding.facts, "times_late": 2})
            if lasts:
                _remembered[known] = finding
                if not finding.facts.get("passing"):
                    _write(store, key, finding)
            return replace(finding, span=span)
        _remembered[known] = finding
        return finding


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
        answer = process.ask(task.name, dict(task.arguments), config.probe_seconds)
    except ExaminationError as error:
        return Finding.refused(f"cannot be examined: {error}. Try: {_MEND}"), False
    return Finding.from_json(answer), True


def _persists(finding: Finding, config: Config) -> bool:
    if finding.verdict or not finding.facts:
        return True
    limit = finding.facts.get("limit_seconds")
    if isinstance(limit, int | float) and limit < config.probe_seconds:
        return False
    missing = finding.facts.get("missing")
    return not (isinstance(missing, str) and _is_installed(missing.partition(".")[0]))


def _times_late(finding: Finding) -> int:
    """Return how often in a row, up to twice, the code took too long; 0 if it ended in time."""
    if finding.verdict or "limit_seconds" not in finding.facts:
        return 0
    return 2 if finding.facts.get("times_late") == 2 else 1


def _has_a_chance(finding: Finding, config: Config) -> bool:
    """Say whether code that took too long once may try again: not with less time than then."""
    return _times_late(finding) == 1 and finding.facts["limit_seconds"] <= config.probe_seconds


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


@lru_cache(maxsize=1)
def _surroundings() -> Mapping[str, str]:
    return {
        "interposer": _own_fingerprint(),
        "torch": _torch_version(),
        "python": platform.python_version(),
        "machine": f"{sys.platform} {platform.machine()}",
        "processor": _processor(),
    }


def _own_fingerprint() -> str:
    """Return what changes with the code: what is refused does so with every edit of it.

    Without metadata, as where the folder was only put on the path, the files are read.
    """
    try:
        return read_distribution(importlib_metadata.distribution("interposer")).fingerprint
    except importlib_metadata.PackageNotFoundError:
        folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        with suppress(OSError):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _torch_version() -> str:
    try:
        return str(importlib_metadata.version("torch"))
    except importlib_metadata.PackageNotFoundError:
        spec = importlib.util.find_spec("torch")
        return "" if spec is None or not spec.origin else _version_file(Path(spec.origin))


def _version_file(module: Path) -> str:
    try:
        return hashlib.sha256(module.with_name("version.py").read_bytes()).hexdigest()
    except OSError:
        return str(module)


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


def _warn_once(subject: str, error: Exception) -> None:
    if subject not in _warned:
        _warned.add(subject)
        warnings.warn(f"A verdict cannot be remembered. {error}", VerdictWarning, stacklevel=5)


def _renew_lock() -> None:
    # The thread that may hold it is not in a forked process.
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
