"""Functions of a package of kernels: examined in another process, imported when one is needed.

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

from interposer import Verdict
from interposer.errors import InterposerError, PluginError
from interposer.tooling import variables
from interposer_rocm import _package_inquiry as package_inquiry

# Modules may be compiled when it is first imported on a machine.
_LIMIT_SECONDS = 900.0
_KNOWN = ("ImportError", "OSError", "CalledProcessError", "RuntimeError", "KeyError")
_SETTINGS = ("GPU_ARCHS", "HIP_", "ROCR_", "HSA_", "ROCM_", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Inquiry:
    """The outcome of importing a package in another process.

    Attributes:
        named: the package with its version.
        verdict: a refusal has the traceback only where its cause is none of the known kinds.
        wanted: names of the parameters that calls name, by function.
        parameters: names of the parameters of each function that is there.
    """

    named: str
    verdict: Verdict
    wanted: Mapping[str, set[str]]
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def judge(self, *functions: str) -> Verdict:
        """Refuse where a function or a named parameter is missing."""
        if not self.verdict:
            return self.verdict
        for name in functions:
            place = name.replace(":", ".")
            if name not in self.parameters:
                return Verdict.refuse(f"{self.named} has no {place}. Try a newer one")
            missing = sorted(self.wanted[name] - {*self.parameters[name]})
            if missing:
                lacks = ", ".join(missing)
                return Verdict.refuse(
                    f"{place} of {self.named} takes no {lacks}. Try another version"
                )
        return Verdict.accept()


class ExaminedPackage:
    """One such package.

    Args:
        name: for people.
        version: returns the installed version; what it is imported as stands in the functions.
        wanted: names of the parameters that calls name, by ``module:function``.
        error: raised where it cannot be used for a reason of the known kinds.
        settings: what begins the names of the package's own environment variables.
    """

    def __init__(
        self,
        name: str,
        version: Callable[[], str],
        wanted: Mapping[str, set[str]],
        error: type[InterposerError],
        settings: str,
    ) -> None:
        self._name = name
        self._version = version
        self._wanted = wanted
        self._error = error
        self._settings = (settings, *_SETTINGS)
        self._remembered: dict[tuple[object, ...], Inquiry] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._lock = RLock()

    def refresh(self) -> None:
        """Forget the results, so that the next question inquires again."""
        with self._lock:
            self._remembered.clear()
            self._functions.clear()

    def inquire(self, limit_seconds: float = _LIMIT_SECONDS) -> Inquiry:
        """Return what came of importing it in another process, done now or remembered."""
        settings = sorted(
            item for item in variables().items() if item[0].startswith(self._settings)
        )
        key = (self._version(), *settings, *sys.path)
        with self._lock:  # threads that ask for it wait for one process
            if key not in self._remembered:
                self._remembered[key] = self._inquired(limit_seconds)
            return self._remembered[key]

    def require(self, *functions: str) -> None:
        """Return where ``functions`` of it can be called.

        Raises:
            InterposerError: the package's own, for a reason of the known kinds.
            PluginError: the import failed in another way; it has the traceback.
        """
        verdict = self.inquire().judge(*functions)
        if verdict:
            return
        if verdict.traceback:
            raise PluginError("rocm", "interposer-rocm", verdict.reason, trace=verdict.traceback)
        raise self._error(verdict.reason)

    def function(self, name: str) -> Callable[..., Any]:
        """Return one of its functions, or one of the enumerations beside them; imports it.

        Raises: InterposerError, PluginError: see ``require``.
        """
        found = self._functions.get(name)
        if found is None:
            self.require(*({name} & {*self._wanted}))
            module, _, attribute = name.partition(":")
            found = self._functions[name] = getattr(importlib.import_module(module), attribute)
        return found

    def _inquired(self, limit_seconds: float) -> Inquiry:
        named = f"{self._name} {self._version()}"
        verdict, found = _asked(named, [*self._wanted], limit_seconds)
        return Inquiry(named, verdict, self._wanted, found)


def _asked(
    named: str, functions: list[str], limit_seconds: float
) -> tuple[Verdict, Mapping[str, tuple[str, ...]]]:
    program = str(Path(package_inquiry.__file__))
    command = [sys.executable, "-P", program, json.dumps(sys.path), *functions]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict.refuse(
            f"{named} was not imported within {limit_seconds:g} s, in which it may compile. What "
            "it has compiled is kept: try again"
        ), {}
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return Verdict.refuse(_ended(named, done)), {}
    if "parameters" in answer:
        return Verdict.accept(), {name: tuple(p) for name, p in answer["parameters"].items()}
    return _failed(named, answer), {}


def _ended(named: str, done: subprocess.CompletedProcess[str]) -> str:
    said = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
    code = done.returncode
    names = {int(number): number.name for number in signal.Signals}
    how = names.get(-code, f"signal {-code}") if code < 0 else f"code {code}"
    return (
        f"the process that imports {named} ended with {how}: {said[0]}. It may have been built for "
        "other GPUs or another torch: build it here"
    )


def _failed(named: str, answer: Mapping[str, Any]) -> Verdict:
    missing, text, kinds = answer["missing"], answer["text"], answer["kind"]
    if missing:
        package = missing.partition(".")[0]
        return Verdict.refuse(f"{named} needs the package {package}. Try: pip install {package}")
    reason = f"{named} cannot be imported: {kinds[0]}: {text}"
    return Verdict.refuse(reason, "" if {*kinds} & {*_KNOWN} else answer["trace"])
