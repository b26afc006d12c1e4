"""The resolver: runs the selection once per distinct request and remembers every choice."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any, ParamSpec, TypeVar, cast

import torch

from interposer._config.config import Config, effective_config
from interposer._config.policy import Policy, pin_matches, policy_for
from interposer._contract.attention import AttentionBackend, AttentionSpec
from interposer._contract.capability import Device
from interposer._contract.choice import Candidate, Choice, Measured
from interposer._contract.communicator import Communicator, Ranks
from interposer._contract.errors import (
    ConfigError,
    NoCandidateError,
    UnknownNameError,
    near_names,
)
from interposer._contract.layer import BoundKernel, PluggableLayer, Site
from interposer._contract.model import ModelFamily
from interposer._contract.op import CustomOp, Dims
from interposer._contract.platform import Placement
from interposer._contract.quantization import QuantizationScheme
from interposer._contract.request import Kind, Request
from interposer._contract.verdict import Refusal
from interposer._plugins.registry import Registry, current_registry
from interposer._selection.gates import (
    AgreesWithReference,
    BecomesAnOp,
    Confirms,
    HasNotFailed,
    IsReadByLookup,
    ReadsFormOf,
    TakesStoredConstants,
    form_of,
)
from interposer._selection.loading import (
    ModelLoader,
    backend_loader,
    communicator_loader,
    kernel_loader,
    layer_loader,
    scheme_loader,
)
from interposer._selection.measurements import Measurements
from interposer._selection.select import Gate, Loader, acceptable, select_and_load

_log = logging.getLogger("interposer")

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")
L = TypeVar("L", bound=PluggableLayer)

_DECODE_ROW_BYTES = 8192
"""Bytes of one row of a decode step, whose size decides which communicator all-reduces it."""


class Resolver:
    """Makes the choices for one model on one device.

    Args:
        defaults: the platform's preferred kernel by op, which ``config`` can override.

    Attributes:
        choices: every distinct choice with the prefixes that share it, in order of construction.
        failures: kernels that failed at run time and were replaced.
        notes: notes on the model in general.
        scheme: the checkpoint's quantization scheme, or None if weights are not quantized.
        described: the device is only described, so kernels are chosen but never loaded.
        ranks: the processes that compute the model together; None for a single process.
        communicators: the chosen communicators by qualified name; the model's owner closes the
            communicators.
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
        defaults: Mapping[str, str] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        registry.check_rules(config)
        self.registry = registry
        self.device = device
        self.config = config
        self.scheme = scheme
        self.described = described
        self.ranks = ranks
        self.communicators: dict[str, Communicator] = {}
        self.choices: dict[tuple[object, ...], tuple[Choice, list[str]]] = {}
        self.failures: list[Refusal] = []
        self.notes: list[str] = []
        self._defaults = defaults or {}
        self._loaded: dict[tuple[object, ...], Any] = {}
        self._replacing = RLock()
        self._backends: dict[tuple[str, AttentionSpec], AttentionBackend] = {}
        self._all_reduce_names: dict[torch.dtype, str] = {}
        self._measurements = Measurements(registry, device, config)
        self._gates: tuple[Gate, ...] = (HasNotFailed(registry),)
        # Order matters: cheap gates run before the canary, which starts a process.
        if config.compile != "off":
            self._gates += (BecomesAnOp(),)
        if not described:
            canary = AgreesWithReference(registry, device, config.canary, trusted)
            self._gates += (Confirms(registry), canary)

    @classmethod
    def at(
        cls, placement: Placement, config: Config | None = None, ranks: Ranks | None = None
    ) -> Resolver:
        """Create a resolver for the device of ``placement``, with the platform's defaults."""
        config = effective_config(config)
        resolver = cls(
            current_registry(config),
            placement.device,
            config,
            trusted=frozenset({placement.choice.chosen.provider}),
            described=placement.described,
            defaults=placement.default_kernels,
            ranks=ranks,
        )
        resolver.record(placement.choice)
        return resolver

    def kernel(
        self, op: CustomOp[P, R], dtype: torch.dtype, dims: Dims, prefix: str
    ) -> BoundKernel[P, R]:
        """Choose and load the kernel for ``op``.

        Raises: NoCandidateError: every kernel was refused, or the pinned kernel was.
        """
        request = self._request("kernel", op.name, Site(self, prefix, dtype), dims)
        choice, loaded = self._choose(request, self._gates, self._kernel_loader(op))
        return self._bound(op, request, choice, *loaded)

    def check(self, request: Request) -> Choice:
        """Choose a kernel after all checks, without loading the code of the kernel.

        Raises: NoCandidateError: every kernel was refused, or the pinned kernel was.
        """
        return self._select(request, self._gates, lambda candidate: None)[0]

    def table(
        self,
        lookup: tuple[CustomOp[P, R], Dims, str],
        product: tuple[CustomOp[Q, S], Dims, str],
        dtype: torch.dtype,
    ) -> tuple[BoundKernel[P, R], BoundKernel[Q, S]]:
        """Choose lookup and matmul kernels that share one copy of a table.

        The matmul's kernel is chosen first, among kernels with a form of the table that some lookup
        kernel reads. A kernel that the configuration pins is chosen in any case.

        Args:
            lookup: the op with its dims and prefix.
            product: the op with its dims and prefix.
        Raises: NoCandidateError: every kernel was refused, or a pinned kernel was.
        """
        lookup_request, matmul_request = (
            self._request("kernel", op.name, Site(self, prefix, dtype), dims)
            for op, dims, prefix in (lookup, product)
        )
        forms = {
            form_of(c)
            for c in acceptable(
                lookup_request, self._candidates(lookup_request), self._policy(lookup_request)
            )
        }
        gates: tuple[Gate, ...] = (IsReadByLookup(forms, lookup[0].name), *self._gates)
        if self._policy(matmul_request).pin is not None:
            gates = self._gates
        choice, loaded = self._choose(matmul_request, gates, self._kernel_loader(product[0]))
        matmul_kernel = self._bound(product[0], matmul_request, choice, *loaded)
        gates = (ReadsFormOf(choice), *self._gates)
        if self._policy(lookup_request).pin is not None:
            gates = self._gates
        try:
            choice, loaded = self._choose(lookup_request, gates, self._kernel_loader(lookup[0]))
        except NoCandidateError:
            # Every lookup kernel that reads this form failed its checks. A second copy of the
            # table still works.
            choice, loaded = self._choose(
                lookup_request, self._gates, self._kernel_loader(lookup[0])
            )
        return self._bound(lookup[0], lookup_request, choice, *loaded), matmul_kernel

    def layer(self, standard: type[L], site: Site) -> type[L]:
        """Choose the class to build for ``standard``: the standard layer or a replacement."""
        dims = self._all_reduce_dims(site.dtype) if standard.reduces else {}
        request = self._request("layer", standard.layer_id, site, dims)
        load = layer_loader(self.registry, standard, self.ranks is not None)
        return cast("type[L]", self._choose(request, (), load)[1])

    def attention(self, spec: AttentionSpec, site: Site) -> AttentionBackend:
        """Choose the backend for ``spec``, shared by all layers with an equal spec."""
        at = Site(self, site.prefix, spec.dtype)
        request = self._request("attention", spec.type, at, spec.dims(), spec)
        load = backend_loader(self.registry, spec, site, self._backends)
        return cast(AttentionBackend, self._choose(request, (), load)[1])

    def communicator(
        self, collective: str, dtype: torch.dtype, num_bytes: int, prefix: str
    ) -> tuple[Choice, Communicator | None]:
        """Choose the communicator for a collective; None if the ranks are only described.

        Args:
            num_bytes: bytes on one rank.
        Raises: NoCandidateError: every communicator was refused, or the pinned one was.
        """
        return self._choose(*self._communicator_request(collective, dtype, num_bytes, prefix))

    def choose_scheme(self, settings: Mapping[str, Any]) -> None:
        """Choose the scheme for ``quantization_config`` and store the scheme as ``scheme``.

        Raises:
            UnknownNameError: no installed plugin has a scheme for the ``quant_method``.
            ConfigError: the scheme refuses the settings.
        """
        request = Request("scheme", str(settings.get("quant_method")))
        _, scheme = self._choose(request, (), scheme_loader(self.registry))
        self.scheme = scheme.parse(settings)

    def choose_model(
        self, architecture: str, config: Mapping[str, Any], source: object
    ) -> ModelFamily:
        """Choose the family for an architecture and parse config.json with it.

        Args:
            source: origin of ``config``, which errors name.
        Raises:
            UnknownNameError: no installed plugin has the architecture.
            CheckpointError: the family refuses the content of ``config``.
            NoCandidateError: every family for the architecture was refused.
        """
        load = ModelLoader(self.registry, config, source)
        try:
            return cast(ModelFamily, self._choose(Request("model", architecture), (), load)[1])
        except NoCandidateError as error:
            if load.first_error is None or len(error.refusals) > 1:
                raise
            raise load.first_error from None

    def accepted(self, request: Request) -> list[Candidate]:
        """Return the candidates that accept ``request``, regardless of the policy."""
        return [c for c in self._candidates(request) if c.judge(request)]

    def record(self, choice: Choice) -> None:
        """Add a choice made outside of the resolver to the explanations of this model."""
        self.choices[choice.request.key, choice.why] = (choice, [choice.request.prefix])

    def annotate(self, key: tuple[object, ...], note: str, *, idle: bool = False) -> None:
        """Add a note to the choice of ``key``; ``idle`` marks the kernel as never called."""
        choice, prefixes = self.choices[key]
        self.choices[key] = (replace(choice, notes=(*choice.notes, note), idle=idle), prefixes)

    def check_places(self) -> None:
        """Raise ConfigError for a rule with a glob that matches no module of the built model.

        A strict configuration raises for any rule about a thing that this model never requests.
        """
        config = self.config
        sources = {"kernel": config.kernels, "layer": config.layers, "attention": config.attention}
        for kind, rules in sources.items():
            requested = [
                (choice.request.name, prefix)
                for choice, prefixes in self.choices.values()
                if choice.request.kind == kind
                for prefix in prefixes
            ]
            # A rule without a glob may name an op that this model does not use, unless strict.
            for key in (key for key in rules if "@" in key or config.strict):
                if not any(pin_matches(key, name, place) for name, place in requested):
                    name, _, glob = key.partition("@")
                    places = {
                        place
                        for requested_name, place in requested
                        if name in ("*", requested_name)
                    }
                    if not places:
                        raise ConfigError(
                            f"The rule {key!r} matches nothing, because this model does not "
                            f"request {name!r}. Try: remove the rule"
                        )
                    raise ConfigError(
                        f"The rule {key!r} matches no place where this model requests {name!r}. "
                        f"Places, nearest first: {near_names(glob, places)}"
                    )

    def _choose(
        self, request: Request, gates: tuple[Gate, ...], load: Loader, *, anew: bool = False
    ) -> tuple[Choice, Any]:
        """Return the choice for ``request`` and the loaded object, from the cache if possible.

        Args:
            anew: replace a remembered choice.
        """
        # The policy is part of the key, because rules may differ between places of the model.
        key = (*request.key, self._policy(request))
        _, prefixes = self.choices.get(key, (None, []))
        if anew or key not in self.choices:
            choice, self._loaded[key] = self._select(request, gates, load)
            self.choices[key] = (choice, prefixes)
        if not anew:
            prefixes.append(request.prefix)
        return self.choices[key][0], self._loaded[key]

    def _select(
        self, request: Request, gates: tuple[Gate, ...], load: Loader
    ) -> tuple[Choice, Any]:
        """Select a candidate for ``request`` and load it, without caching the result."""
        # A model may be built on the meta device, but modules of plugins that are imported here
        # must be able to create real tensors.
        with torch.device("cpu"), self._observing(request) as choices:
            choice, loaded = select_and_load(
                request,
                self._candidates(request),
                self._policy(request),
                measured=self._measured(request),
                gates=gates,
                load=load,
            )
            choices.append(choice)
        return choice, loaded

    def _communicator_request(
        self, collective: str, dtype: torch.dtype, num_bytes: int, prefix: str
    ) -> tuple[Request, tuple[Gate, ...], Loader]:
        """Build the request for a collective; return request, gates and loader."""
        assert self.ranks is not None
        site = Site(self, prefix, dtype)
        request = self._request("communicator", collective, site, self.ranks.dims(num_bytes))
        gates = () if self.described else (Confirms(self.registry),)
        torch_device = self.device.torch_device
        load = communicator_loader(self.registry, self.ranks, torch_device, self.communicators)
        return request, gates, load

    def _all_reduce_dims(self, dtype: torch.dtype) -> Dims:
        """Return the dims of a layer with an all-reduce: number of ranks and communicator name."""
        if self.ranks is None:
            return {}
        if dtype not in self._all_reduce_names:
            # The choice is not remembered: the layer requests its communicator itself later.
            arguments = self._communicator_request("all_reduce", dtype, _DECODE_ROW_BYTES, "")
            self._all_reduce_names[dtype] = self._select(*arguments)[0].chosen.name
        return {"ranks": self.ranks.size, "all_reduce": self._all_reduce_names[dtype]}

    @contextmanager
    def _observing(self, request: Request) -> Iterator[list[Choice]]:
        """Report the choice or the error of a ``with`` block to the plugins' observer hooks."""
        start, plugins = time.time_ns(), self.registry.plugins
        choices: list[Choice] = []
        try:
            try:
                yield choices
            except UnknownNameError as error:
                failures = plugins.refusals()
                if not failures:
                    raise
                # The plugin that provides the name may be among the plugins that failed.
                what = (
                    f"{request.kind} {error.name!r} for {request}; known, nearest first: "
                    f"{near_names(error.name, error.known)}"
                )
                raise NoCandidateError(what, failures, "fix the plugins that failed") from error
        except NoCandidateError as error:
            plugins.observe("interposer_refused", error=error)
            raise
        (choice,) = choices
        plugins.observe("interposer_selected", choice=choice)
        plugins.observe(
            "interposer_finished",
            activity="selection",
            subject=str(request),
            start_ns=start,
            end_ns=time.time_ns(),
            facts={"chosen": choice.chosen.qualified_name, "why": choice.why},
        )

    def _bound(
        self,
        op: CustomOp[P, R],
        request: Request,
        choice: Choice,
        function: Callable[P, R],
        prepare: Callable[..., Any] | None,
        restore: Callable[..., None] | None,
    ) -> BoundKernel[P, R]:
        """Bind the kernel's own function, or wrap it in a fallback if the policy requests one."""
        # Writes to arguments and prepared constants cannot be undone, so a call of such a kernel
        # cannot be repeated with another kernel.
        can_repeat = self.config.fallback and not (op.mutates or prepare)
        if can_repeat and function is not op.reference and self._policy(request).pin is None:
            # Imported here because the module imports the compiler, which takes a second.
            from interposer._selection.fallback import Fallback

            replace = partial(self._replace, op, request)
            function = Fallback(function, choice.chosen, op.reference, replace)
        return BoundKernel(function, prepare, choice, restore)

    def _replace(
        self, op: CustomOp[..., Any], request: Request, failed: Candidate, reason: str, trace: str
    ) -> tuple[Callable[..., Any], Candidate]:
        """Quarantine ``failed`` and return the next kernel for ``request``."""
        with self._replacing:
            key = (*request.key, self._policy(request))
            choice, _ = self.choices[key]
            # Layers share a choice, so the call of another layer may have replaced it already.
            if choice.chosen.qualified_name == failed.qualified_name:
                failures = self.registry.blame(failed).failures
                failures.setdefault(failed.qualified_name, reason)
                self.failures.append(Refusal(failed.name, failed.origin, reason, trace))
                gates: tuple[Gate, ...] = (TakesStoredConstants(), *self._gates)
                choice, _ = self._choose(request, gates, self._kernel_loader(op), anew=True)
                name = choice.chosen.name
                _log.warning("%s %s; %s takes over", failed.qualified_name, reason, name)
            return self._loaded[key][0], choice.chosen

    def _kernel_loader(self, op: CustomOp[..., Any]) -> Loader:
        return kernel_loader(self.registry, op, self.described)

    def _request(
        self, kind: Kind, name: str, site: Site, dims: Dims, detail: AttentionSpec | None = None
    ) -> Request:
        device, dtype = self.device, str(site.dtype).removeprefix("torch.")
        place = device.platform, device.capability
        return Request(kind, name, *place, dtype, dims, detail, site.prefix)

    def _policy(self, request: Request) -> Policy:
        return policy_for(self.config, request, self._defaults)

    def _candidates(self, request: Request) -> list[Candidate]:
        subject = "" if request.kind == "attention" else request.name
        return self.registry.candidates(request.kind, subject)

    def _measured(self, request: Request) -> Measured | str | None:
        measured = self._measurements.lookup(request, partial(self.accepted, request))
        if isinstance(measured, str) and self.config.strict:
            raise ConfigError(
                f"{measured}. Try: `interposer tune` again, or Config(tables=False), "
                "because a strict configuration uses only tables that match"
            )
        return measured
