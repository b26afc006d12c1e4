"""Gates: costly checks that run only on the candidate that would win; see ``select``."""

from __future__ import annotations

import logging
from collections.abc import Collection
from textwrap import shorten
from typing import Any, Literal

from interposer._contract.capability import Device
from interposer._contract.choice import Candidate, Choice
from interposer._contract.records import Kernel
from interposer._contract.request import Request
from interposer._contract.verdict import Verdict
from interposer._examination.task import Task
from interposer._plugins.plugins import Source
from interposer._plugins.registry import Registry

_log = logging.getLogger("interposer")
_STRIKES = 3
_MAX_REASON = 300  # characters of a reason in a warning
_ACCEPTED = Verdict.accept()


class _OfRegistry:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry


class HasNotFailed(_OfRegistry):
    """Refuses a kernel that failed at run time before."""

    def __call__(self, request: Request, candidate: Candidate) -> Verdict:
        """Accept a kernel without a recorded failure."""
        failure = self._registry.blame(candidate).failures.get(candidate.qualified_name)
        return _ACCEPTED if failure is None else Verdict.refuse(failure)


class Confirms(_OfRegistry):
    """Calls the function that a kernel's record names as ``confirm``."""

    def __call__(self, request: Request, candidate: Candidate) -> Verdict:
        """Return the verdict of the record's function ``confirm``; accept a record without one."""
        target = getattr(candidate.record, "confirm", "")
        if not target:
            return _ACCEPTED
        verdict: Verdict = self._registry.load(candidate, target)(request)
        return verdict


class AgreesWithReference:
    """The canary: compares a kernel with the reference before the first binding for a dtype.

    The kernel runs on cases of the op in the examining process, so that a crash or hang only
    refuses the kernel. Two providers are trusted unless the policy says ``all``: the part of the
    SDK that defines the op, and therefore the correct result, and the distribution of the current
    platform, which runs in this process anyway. A kernel that is not proven on the device is always
    compared, even from a trusted provider.
    """

    def __init__(
        self,
        registry: Registry,
        device: Device,
        scope: Literal["third_party", "all", "off"],
        trusted: frozenset[str],
    ) -> None:
        self._registry = registry
        self._device = device
        self._scope = scope
        self._trusted = trusted

    def __call__(self, request: Request, candidate: Candidate) -> Verdict:
        """Compare the kernel with the reference, or return the dtype's remembered refusal.

        A refusal applies to all requests of the dtype, with any dims.
        """
        record, provider = candidate.record, candidate.provider
        if not isinstance(record, Kernel) or self._scope == "off":
            return _ACCEPTED
        definer = self._registry.definers[record.op].source
        is_definer = definer.standard and definer.distribution == provider
        is_trusted = provider in self._trusted or is_definer
        is_proven = candidate.is_proven_on(request.capability.architecture)
        if self._scope == "third_party" and is_trusted and is_proven:
            return _ACCEPTED
        departures = self._registry.blame(candidate).departures
        key = (candidate.qualified_name, request.dtype)
        if key in departures:
            return departures[key]
        # After several wrong kernels of a provider, its other kernels are not compared.
        if sum(name.startswith(f"{provider}/") for name, _ in departures) >= _STRIKES:
            return Verdict.refuse(
                f"{_STRIKES} kernels of {provider} differed from their references, "
                f"so the other kernels of {provider} are not compared"
            )
        task = Task("kernel", self._arguments(candidate, record, request, definer))
        verdict = self._registry.examine(candidate, task)
        if not verdict:
            if not any(name == candidate.qualified_name for name, _ in departures):
                self._warn(candidate, record.op, verdict.reason)
            departures[key] = verdict
        return verdict

    def _warn(self, candidate: Candidate, op: str, reason: str) -> None:
        """Log one line about a refused kernel, which otherwise shows only in explanations."""
        line = shorten(reason, _MAX_REASON, placeholder=" ...")
        is_installed = self._registry.owner(candidate).source.installed is not None
        if "Try: " not in line:
            next_step = (
                f"interposer verify {candidate.provider} --op {op}"
                if is_installed
                else f"interposer.explain(model).why({op!r})"
            )
            line += f". Try: {next_step}"
        _log.warning(
            "The kernel %r of %s is not used for %r: %s",
            candidate.name,
            candidate.origin,
            op,
            line,
        )

    def _arguments(
        self, candidate: Candidate, record: Kernel, request: Request, source: Source
    ) -> dict[str, Any]:
        return {
            "op": self._registry.ops[record.op].target,
            # Changes with the code that defines the op, so that a stored verdict becomes invalid.
            "definition": source.installed.fingerprint if source.installed else source.origin,
            "target": record.target,
            "prepare": record.prepare,
            "extra_roundings": record.extra_roundings,
            "dtype": request.dtype,
            "dims": dict(request.dims),
            "device": self._device.torch_device,
            "plugin": self._registry.owner(candidate).source.value,
            "kernel": record.name,
            "platform": request.platform,
            "capability": request.capability.to_json(),
        }


class BecomesAnOp:
    """Refuses a kernel that torch.compile can neither trace nor treat as an opaque op."""

    def __call__(self, request: Request, candidate: Candidate) -> Verdict:
        """Accept a kernel that can be traced, or that takes the op's own arguments unprepared."""
        prepares = getattr(candidate.record, "prepare", "")
        if not prepares or "traceable" in candidate.properties:
            return _ACCEPTED
        return Verdict.refuse(
            "is not traceable by torch.compile, and prepares constants, so the op's reference "
            "cannot compute the result's shape for the compiler"
        )


class TakesStoredConstants:
    """Refuses a kernel with ``prepare``, because a running model passes constants as stored."""

    def __call__(self, request: Request, candidate: Candidate) -> Verdict:
        """Accept a kernel that takes the constants as stored in the checkpoint."""
        if getattr(candidate.record, "prepare", ""):
            return Verdict.refuse("needs prepared constants, which a running model lacks")
        return _ACCEPTED


Form = tuple[str, str]
"""Id of a memory layout of an op's constants: provider and name; empty for the stored layout."""


def form_of(candidate: Candidate) -> Form:
    """Return an id of the memory layout in which a kernel keeps the op's constants.

    Kernels without preparation share the stored form, also across providers. A kernel with a
    preparation and without a declared form has a unique form.
    """
    if not getattr(candidate.record, "prepare", ""):
        return ("", "")
    return candidate.provider, getattr(candidate.record, "form", "") or candidate.name


class IsReadByLookup:
    """Accepts an lm_head kernel whose weight layout some embedding-lookup kernel also reads."""

    def __init__(self, forms: Collection[Form], lookup: str) -> None:
        self._forms = forms
        self._lookup = lookup

    def __call__(self, request: Request, candidate: Candidate) -> Verdict:
        """Refuse a weight layout that would need a second copy of the table for the lookup."""
        if form_of(candidate) in self._forms:
            return _ACCEPTED
        return Verdict.refuse(
            f"prepares a copy of the table that no kernel of {self._lookup!r} reads here, so the "
            "table would be stored twice"
        )


class ReadsFormOf:
    """Accepts an embedding-lookup kernel that reads the weight in the layout of lm_head."""

    def __init__(self, matmul: Choice) -> None:
        self._matmul = matmul.chosen

    def __call__(self, request: Request, candidate: Candidate) -> Verdict:
        """Refuse a lookup kernel that would need a second copy of the table."""
        if form_of(candidate) == form_of(self._matmul):
            return _ACCEPTED
        return Verdict.refuse(
            f"reads another copy of the table than {self._matmul.name} multiplies by, so the "
            "table would be stored twice"
        )
