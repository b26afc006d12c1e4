"""The numerics check of a kernel when it is first bound on this host for a dtype."""

from __future__ import annotations

from typing import Any, Literal

from interposer._contract.capability import Device
from interposer._contract.choice import Candidate
from interposer._contract.records import Kernel, OpEntry
from interposer._contract.request import Request
from interposer._contract.verdict import Verdict
from interposer._plugins.registry import Registry
from interposer._sandbox.task import Task
from interposer._validation.distribution import STANDARD

_STRIKES = 3


class Canary:
    """Compares kernels with the reference before they serve a model.

    A kernel runs on cases of its op in the examining process, so that one that crashes or hangs
    costs a refusal. Parts of the SDK and the distribution that provides the platform in force
    are trusted unless the policy says ``all``: whoever drives the device is in the process anyway.
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
        self._trusted = trusted | STANDARD

    def check(self, candidate: Candidate, request: Request) -> Verdict:
        """Say whether the kernel computes what its op defines; asked again it remembers.

        What departs once is refused for the dtype, whatever the dims.
        """
        provider = candidate.provider
        if self._scope == "off" or (self._scope == "third_party" and provider in self._trusted):
            return Verdict.accept()
        known = self._registry.blame(candidate).departures
        key = (candidate.qualified_name, request.dtype)
        if key in known:
            return known[key]
        if sum(name.startswith(f"{provider}/") for name, _ in known) >= _STRIKES:
            return Verdict.refuse(
                f"{_STRIKES} kernels of {provider} departed from their reference, "
                "so that its others are not tried"
            )
        task = Task("kernel", self._arguments(candidate, request))
        verdict = self._registry.examine(candidate, task)
        if not verdict:
            known[key] = verdict
        return verdict

    def _arguments(self, candidate: Candidate, request: Request) -> dict[str, Any]:
        record = candidate.record
        assert isinstance(record, Kernel)
        return {
            "op": self._registry.ops[record.op].target,
            "definition": self._definition(record.op),
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

    def _definition(self, op: str) -> str:
        """Return what changes with the code that defines ``op``."""
        (plugin,) = [p for p, entry in self._registry.records(OpEntry) if entry.name == op]
        installed = plugin.source.installed
        return plugin.source.origin if installed is None else installed.fingerprint
