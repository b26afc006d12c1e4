"""Kernel packages that are checked in a child process before this process imports them.

The outcome is cached per package version, ``sys.path`` and relevant environment variables;
``refresh`` clears the cache, so a repaired installation is used without a restart.
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

# The first import on a machine may compile modules.
_LIMIT_SECONDS = 900.0
_EXPECTED_ERRORS = ("ImportError", "OSError", "CalledProcessError", "RuntimeError", "KeyError")
_SETTINGS = ("GPU_ARCHS", "HIP_", "ROCR_", "HSA_", "ROCM_", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Inquiry:
    """The outcome of importing a package in a child process.

    Attributes:
        package_text: name and version of the package.
        verdict: a refusal carries the traceback only if the error is of an unexpected type.
        keywords: by function, the keyword arguments that calls pass.
        parameters: by existing function, the names of its parameters.
    """

    package_text: str
    verdict: Verdict
    keywords: Mapping[str, set[str]]
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def judge(self, *functions: str) -> Verdict:
        """Refuse if a function or one of the passed parameters is missing."""
        if not self.verdict:
            return self.verdict
        for name in functions:
            path = name.replace(":", ".")
            if name not in self.parameters:
                return Verdict.refuse(f"{self.package_text} has no {path}. Try a newer one")
            missing_keywords = sorted(self.keywords[name] - {*self.parameters[name]})
            if missing_keywords:
                names = ", ".join(missing_keywords)
                return Verdict.refuse(
                    f"{path} of {self.package_text} takes no {names}. Try another version"
                )
        return Verdict.accept()


class ExaminedPackage:
    """A kernel package whose functions are checked in a child process before use.

    Args:
        name: display name.
        version: returns the installed version.
        keywords: by ``module:function``, the keyword arguments that calls pass.
        error: type raised if the package cannot be used for an expected reason.
        settings: prefix of the package's environment variables.
    """

    def __init__(
        self,
        name: str,
        version: Callable[[], str],
        keywords: Mapping[str, set[str]],
        error: type[InterposerError],
        settings: str,
    ) -> None:
        self._name = name
        self._version = version
        self._keywords = keywords
        self._error = error
        self._settings = (settings, *_SETTINGS)
        self._inquiries: dict[tuple[object, ...], Inquiry] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._lock = RLock()

    def refresh(self) -> None:
        """Clear the cache, so the next use examines the package again."""
        with self._lock:
            self._inquiries.clear()
            self._functions.clear()

    def inquire(self, limit_seconds: float = _LIMIT_SECONDS) -> Inquiry:
        """Import the package in a child process, or return the cached outcome."""
        settings = sorted(
            item for item in variables().items() if item[0].startswith(self._settings)
        )
        key = (self._version(), *settings, *sys.path)
        with self._lock:  # concurrent threads wait for one child process
            if key not in self._inquiries:
                self._inquiries[key] = self._run_inquiry(limit_seconds)
            return self._inquiries[key]

    def require(self, *functions: str) -> None:
        """Check that ``functions`` of the package can be called.

        Raises:
            InterposerError: the package's error type, for an expected reason.
            PluginError: the import failed unexpectedly; the error carries the traceback.
        """
        verdict = self.inquire().judge(*functions)
        if verdict:
            return
        if verdict.traceback:
            raise PluginError("rocm", "interposer-rocm", verdict.reason, trace=verdict.traceback)
        raise self._error(verdict.reason)

    def function(self, name: str) -> Callable[..., Any]:
        """Import a function or an enumeration of the package, given as ``module:name``.

        Raises: InterposerError, PluginError: see ``require``.
        """
        target = self._functions.get(name)
        if target is None:
            # Enumerations have no parameters to check: only listed functions are required.
            self.require(*({name} & {*self._keywords}))
            module, _, attribute = name.partition(":")
            target = self._functions[name] = getattr(importlib.import_module(module), attribute)
        return target

    def _run_inquiry(self, limit_seconds: float) -> Inquiry:
        package = f"{self._name} {self._version()}"
        verdict, parameters = _import_in_child(package, [*self._keywords], limit_seconds)
        return Inquiry(package, verdict, self._keywords, parameters)


def _import_in_child(
    package: str, functions: list[str], limit_seconds: float
) -> tuple[Verdict, Mapping[str, tuple[str, ...]]]:
    # -P keeps the program's folder out of sys.path: a module there could hide one of the package.
    program = str(Path(package_inquiry.__file__))
    command = [sys.executable, "-P", program, json.dumps(sys.path), *functions]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict.refuse(
            f"{package} was not imported within {limit_seconds:g} s, in which it may compile. "
            "What it has compiled is kept: try again"
        ), {}
    try:
        answer = json.loads(process.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return Verdict.refuse(_end_reason(package, process)), {}
    if "parameters" in answer:
        return Verdict.accept(), {name: tuple(p) for name, p in answer["parameters"].items()}
    return _refuse_error(package, answer), {}


def _end_reason(package: str, process: subprocess.CompletedProcess[str]) -> str:
    last_line = process.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
    code = process.returncode
    names = {int(number): number.name for number in signal.Signals}
    end = names.get(-code, f"signal {-code}") if code < 0 else f"code {code}"
    return (
        f"the process that imports {package} ended with {end}: {last_line[0]}. It may "
        "have been built for other GPUs or another torch: build it here"
    )


def _refuse_error(package: str, answer: Mapping[str, Any]) -> Verdict:
    missing_module, text, error_types = answer["missing"], answer["text"], answer["kind"]
    if missing_module:
        needed = missing_module.partition(".")[0]
        return Verdict.refuse(f"{package} needs the package {needed}. Try: pip install {needed}")
    reason = f"{package} cannot be imported: {error_types[0]}: {text}"
    return Verdict.refuse(reason, "" if {*error_types} & {*_EXPECTED_ERRORS} else answer["trace"])
