"""Resolution: asks the selection once per distinct request and remembers every choice."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import torch

from interposer._config.config import Config
from interposer._config.policy import pin_matches, policy_for
from interposer._contract.attention import AttentionBackend, AttentionSpec
from interposer._contract.capability import Device
from interposer._contract.choice import Candidate, Choice, Measured
from interposer._contract.errors import (
    FOREIGN_ERRORS,
    ConfigError,
    InterposerError,
    NoCandidateError,
    PluginError,
    UnknownNameError,
    described,
    nearest_first,
)
from interposer._contract.layer import BoundKernel, PluggableLayer, Site, check_replacement
from interposer._contract.op import CustomOp
from interposer._contract.quantization import QuantizationScheme
from interposer._contract.records import AttentionEntry, Kernel, LayerEntry, OpEntry, SchemeEntry
from interposer._contract.request import Kind, Request
from interposer._contract.verdict import Refusal, Verdict
from interposer._plugins.registry import Registry
from interposer._selection.canary import Canary
from interposer._selection.measurements import Measurements
from interposer._selection.select import acceptable, select
from interposer._selection.tied_weights import form_of, judge_lookup, judge_product

_log = logging.getLogger("interposer")

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")
E = TypeVar("E")
L = TypeVar("L", bound=PluggableLayer)
Dims = Mapping[str, int | float | str | bool]
Confirm = Callable[[Candidate], Verdict]


class Resolver:
    """Makes the choices for one model on one device.

    Attributes:
        choices: every distinct choice with the prefixes that share it, in order of construction.
        failures: kernels that failed at run time and were replaced.
        scheme: the checkpoint's quantization scheme, or None where weights are plain.
        described: the device is only described, so kernels are chosen but never loaded.
    """

    def __init__(
        self,
        registry: Registry,
        device: Device,
        config: Config,
        scheme: QuantizationScheme | None = None,
        *,
        trusted: frozenset[str] = frozenset(),
        described: bool = False,
    ) -> None:
        registry.check_rules(config)
        self.registry = registry
        self.device = device
        self.config = config
        self.scheme = scheme
        self.described = described
        self.choices: dict[tuple[object, ...], tuple[Choice, list[str]]] = {}
        self.failures: list[Refusal] = []
        self._replacing = RLock()
        self._backends: dict[tuple[object, ...], AttentionBackend] = {}
        self._canary = Canary(registry, device, config.canary, trusted)
        self._measurements = Measurements(registry, device, config)

    def kernel(
        self, op: CustomOp[P, R], dtype: torch.dtype, dims: Dims, prefix: str
    ) -> BoundKernel[P, R]:
        """Return the kernel for ``op``, loaded.

        Raises: NoCandidateError: every kernel was refused, or the pinned one.
        """
        request = self._request("kernel", op.name, prefix, dtype=dtype, dims=dims)
        return self._bind(op, request)

    def table(
        self,
        lookup: tuple[CustomOp[P, R], Dims, str],
        product: tuple[CustomOp[Q, S], Dims, str],
        dtype: torch.dtype,
    ) -> tuple[BoundKernel[P, R], BoundKernel[Q, S]]:
        """Return kernels that look rows of a table up and multiply by it, and hold it once.

        The product decides, among those whose form of the table some lookup reads; a kernel that
        the configuration pins is taken in any case.

        Args:
            lookup: the op with its dims and prefix.
            product: the op with its dims and prefix.
        Raises: NoCandidateError: every kernel was refused, or a pinned one.
        """
        rows, multiply = (
            self._request("kernel", op.name, prefix, dtype=dtype, dims=dims)
            for op, dims, prefix in (lookup, product)
        )
        policy = policy_for(self.config, rows)
        forms = {form_of(c) for c in acceptable(rows, self._candidates(rows), policy)}
        multiplies = self._bind(product[0], multiply, partial(judge_product, forms, lookup[0].name))
        try:
            looks_up = self._bind(lookup[0], rows, partial(judge_lookup, multiplies.choice))
        except NoCandidateError:
            # All that read this form failed their checks: held twice, it still works.
            looks_up = self._bind(lookup[0], rows)
        return looks_up, multiplies

    def layer(self, standard: type[L], site: Site) -> type[L]:
        """Return the class to build for ``standard``: itself or its replacement."""
        request = self._request("layer", standard.layer_id, site.prefix, dtype=site.dtype)

        def confirm(candidate: Candidate) -> Verdict:
            replacement = self.registry.load(candidate, _entry(candidate, LayerEntry).target)
            check_replacement(standard, replacement, candidate.qualified_name)
            return Verdict.accept()

        chosen = self._choose(request, confirm).chosen
        return self.registry.load(chosen, _entry(chosen, LayerEntry).target)  # type: ignore[no-any-return]

    def attention(self, spec: AttentionSpec, site: Site) -> AttentionBackend:
        """Return the backend for ``spec``, shared by all layers with an equal spec."""
        request = self._request(
            "attention", spec.type, site.prefix, dtype=spec.dtype, dims=spec.dims(), detail=spec
        )

        def confirm(candidate: Candidate) -> Verdict:
            key = (candidate.qualified_name, spec)
            if key not in self._backends:
                target = _entry(candidate, AttentionEntry).target
                self._backends[key] = self.registry.load(candidate, target)(spec, site)
            return Verdict.accept()

        chosen = self._choose(request, confirm).chosen
        return self._backends[chosen.qualified_name, spec]

    def choose_scheme(self, settings: Mapping[str, Any]) -> None:
        """Set ``scheme`` to the one for a checkpoint's ``quantization_config``.

        Raises:
            UnknownNameError: no installed plugin knows the ``quant_method``.
            ConfigError: the scheme does not take the settings.
        """
        method = str(settings.get("quant_method"))

        def confirm(candidate: Candidate) -> Verdict:
            self.registry.load(candidate, _entry(candidate, SchemeEntry).target)
            return Verdict.accept()

        chosen = self._choose(Request("scheme", method), confirm).chosen
        target = _entry(chosen, SchemeEntry).target
        self.scheme = self.registry.load(chosen, target).parse(settings)

    def accepted(self, request: Request) -> list[Candidate]:
        """Return the candidates that accept ``request``, whatever the policy says of them."""
        return [c for c in self._candidates(request) if c.judge(request)]

    def record(self, choice: Choice) -> None:
        """Add a choice that was made elsewhere for this model, so that it is explained as well."""
        self.choices[choice.request.key, choice.why] = (choice, [choice.request.prefix])

    def check_places(self) -> None:
        """Raise ConfigError for a rule whose glob matched no place, now that the model is built.

        A strict configuration raises for any rule on what this model never asks for.
        """
        config = self.config
        sources = {"kernel": config.kernels, "layer": config.layers, "attention": config.attention}
        for kind, rules in sources.items():
            asked = [
                (choice.request.name, prefix)
                for choice, prefixes in self.choices.values()
                if choice.request.kind == kind
                for prefix in prefixes
            ]
            for key in (key for key in rules if "@" in key or config.strict):
                if not any(pin_matches(key, name, place) for name, place in asked):
                    name, _, glob = key.partition("@")
                    places = {place for asker, place in asked if name in ("*", asker)}
                    nearest = ", ".join(nearest_first(glob, places)[:5]) or "(none)"
                    raise ConfigError(
                        f"The rule {key!r} matches no place where this model asks for {name!r}. "
                        f"Places, nearest first: {nearest}"
                    )

    def _bind(
        self, op: CustomOp[P, R], request: Request, also: Confirm | None = None
    ) -> BoundKernel[P, R]:
        """Return the kernel that is chosen among those that ``also`` confirms, or pinned."""
        confirm: Confirm = partial(self._confirm_kernel, request)
        if also is not None and policy_for(self.config, request).pin is None:
            confirm = partial(_both, also, confirm)
        choice = self._choose(request, confirm)
        record = choice.chosen.record
        if self.described or isinstance(record, OpEntry):
            return BoundKernel(op.reference, None, choice)
        load = partial(self.registry.load, choice.chosen)
        entry = _entry(choice.chosen, Kernel)
        prepare = load(entry.prepare) if entry.prepare else None
        function = load(entry.target)
        # What was written or prepared cannot be taken back, so only the rest is tried again.
        can_repeat = self.config.fallback and not (op.mutates or prepare)
        if can_repeat and policy_for(self.config, request).pin is None:
            replace = partial(self._replace, op, request)
            # It imports the compiler, which takes a second, for those alone who ask for it.
            from interposer._selection.fallback import Fallback

            function = Fallback(function, choice.chosen, op.reference, replace)
        return BoundKernel(function, prepare, choice)

    def _confirm_kernel(self, request: Request, candidate: Candidate) -> Verdict:
        record = candidate.record
        failure = self.registry.blame(candidate).failures.get(candidate.qualified_name)
        if failure is not None:
            return Verdict.refuse(failure)
        if self.described or isinstance(record, OpEntry):
            return Verdict.accept()
        entry = _entry(candidate, Kernel)
        if entry.confirm:
            found: Verdict = self.registry.load(candidate, entry.confirm)(request)
            if not found:
                return found
        verdict = self._canary.check(candidate, request)
        if verdict:
            for target in filter(None, (entry.target, entry.prepare)):
                self.registry.load(candidate, target)
        return verdict

    def _replace(
        self, op: CustomOp[..., Any], request: Request, failed: Candidate, reason: str, trace: str
    ) -> tuple[Callable[..., Any], Candidate]:
        """Quarantine ``failed`` and return what takes over for ``request``."""
        with self._replacing:
            key = self._key(request)
            choice, prefixes = self.choices[key]
            # Layers share a choice, and another one may have replaced it already.
            if choice.chosen.qualified_name == failed.qualified_name:
                failures = self.registry.blame(failed).failures
                failures.setdefault(failed.qualified_name, reason)
                self.failures.append(Refusal(failed.name, failed.origin, reason, trace))
                with torch.device("cpu"):
                    choice = self._select(request, partial(self._confirm_raw, request))
                self.choices[key] = (choice, prefixes)
                self.registry.plugins.observe("interposer_selected", choice=choice)
                name = choice.chosen.name
                _log.warning("%s %s; %s takes over", failed.qualified_name, reason, name)
        record = choice.chosen.record
        target = record.target if isinstance(record, Kernel) else ""
        function = self.registry.load(choice.chosen, target) if target else op.reference
        return function, choice.chosen

    def _confirm_raw(self, request: Request, candidate: Candidate) -> Verdict:
        """Confirm a kernel that takes the constants as they are in the checkpoint."""
        if getattr(candidate.record, "prepare", ""):
            return Verdict.refuse("wants prepared constants, which a running model lacks")
        return self._confirm_kernel(request, candidate)

    def _request(
        self,
        kind: Kind,
        name: str,
        prefix: str,
        *,
        dtype: torch.dtype,
        dims: Dims | None = None,
        detail: AttentionSpec | None = None,
    ) -> Request:
        return Request(
            kind,
            name,
            self.device.platform,
            self.device.capability,
            str(dtype).removeprefix("torch."),
            dims or {},
            detail,
            prefix,
        )

    def _candidates(self, request: Request) -> list[Candidate]:
        subject = "" if request.kind == "attention" else request.name
        return self.registry.candidates(request.kind, subject)

    def _key(self, request: Request) -> tuple[object, ...]:
        return (*request.key, policy_for(self.config, request))

    def _choose(self, request: Request, confirm: Confirm) -> Choice:
        key = self._key(request)
        if key in self.choices:
            choice, prefixes = self.choices[key]
            prefixes.append(request.prefix)
            return choice
        start = time.time_ns()
        plugins = self.registry.plugins
        try:
            # A model may be built without memory, but the modules of plugins are imported with it.
            with torch.device("cpu"):
                choice = self._select(request, confirm)
        except NoCandidateError as error:
            plugins.observe("interposer_refused", error=error)
            raise
        self.choices[key] = (choice, [request.prefix])
        plugins.observe("interposer_selected", choice=choice)
        facts = {"chosen": choice.chosen.qualified_name, "why": choice.why}
        plugins.observe(
            "interposer_finished",
            activity="selection",
            subject=str(request),
            start_ns=start,
            end_ns=time.time_ns(),
            facts=facts,
        )
        return choice

    def _select(self, request: Request, confirm: Confirm) -> Choice:
        known = self._measured(request)
        try:
            choice = select(
                request,
                self._candidates(request),
                policy_for(self.config, request),
                measured=known if isinstance(known, Measured) else None,
                confirm=partial(_guard, confirm),
            )
        except UnknownNameError as error:
            failures = self.registry.plugins.refusals()
            if not failures:
                raise
            # The plugin that would provide it may be among those that failed.
            what = f"{request.kind} {error.name!r} for {request}; known: {', '.join(error.known)}"
            raise NoCandidateError(what, failures, "mend what failed") from error
        return replace(choice, notes=(*choice.notes, known)) if isinstance(known, str) else choice

    def _measured(self, request: Request) -> Measured | str | None:
        known = self._measurements.lookup(request, partial(self.accepted, request))
        if isinstance(known, str) and self.config.strict:
            raise ConfigError(
                f"{known}. Try: `interposer tune` again, or Config(tables=False), "
                "for a strict configuration takes no table that does not fit"
            )
        return known


def _entry(candidate: Candidate, kind: type[E]) -> E:
    assert isinstance(candidate.record, kind)
    return candidate.record


def _both(first: Confirm, then: Confirm, candidate: Candidate) -> Verdict:
    verdict = first(candidate)
    return then(candidate) if verdict else verdict


def _guard(confirm: Confirm, candidate: Candidate) -> Verdict:
    """Turn what the code of a candidate raises when it is loaded into a refusal."""
    try:
        return confirm(candidate)
    except PluginError as error:
        trace = error.trace or "".join(traceback.format_exception(error))
        return Verdict.refuse(error.reason, trace)
    except NoCandidateError as error:
        return Verdict.refuse(f"cannot be built: {error}")
    except FOREIGN_ERRORS as error:
        reason = str(error) if isinstance(error, InterposerError) else f"raised {described(error)}"
        return Verdict.refuse(reason, traceback.format_exc())
