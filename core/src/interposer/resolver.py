"""Resolution: asks the selection once per distinct request and remembers every choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch

from interposer.attention import AttentionBackend, AttentionSpec
from interposer.capability import Device
from interposer.choice import Choice
from interposer.config import Config
from interposer.errors import ConfigError, NoCandidateError, nearest_first
from interposer.layer import PluggableLayer, Site, check_replacement
from interposer.op import CustomOp
from interposer.quantization import QuantizationScheme
from interposer.records import AttentionEntry, Kernel, LayerEntry, SchemeEntry
from interposer.registry import Registry
from interposer.request import Kind, Request
from interposer.selection import pin_matches, pinned_name, select

__all__ = ["BoundKernel", "Resolver"]

P = ParamSpec("P")
R = TypeVar("R")
Dims = Mapping[str, int | float | str | bool]


class BoundKernel(NamedTuple, Generic[P, R]):
    """A kernel's own function, its preparation of constant operands if it has one, its choice."""

    function: Callable[P, R]
    prepare: Callable[..., Any] | None
    choice: Choice

    def prepared(self, **constants: Any) -> dict[str, Any]:
        """Return the op's constant tensors as the kernel wants them; once, after loading."""
        return constants if self.prepare is None else self.prepare(**constants)


class Resolver:
    """Makes the choices for one model on one device.

    Attributes:
        choices: every distinct choice with the prefixes that share it, in order of construction.
        scheme: the checkpoint's quantization scheme, or None where weights are plain.
    """

    def __init__(
        self,
        registry: Registry,
        device: Device,
        config: Config,
        scheme: QuantizationScheme | None = None,
    ) -> None:
        registry.check_pins(config)
        self.registry = registry
        self.device = device
        self.config = config
        self.choices: dict[tuple[object, ...], tuple[Choice, list[str]]] = {}
        self._backends: dict[tuple[object, ...], AttentionBackend] = {}
        self.scheme = scheme

    def kernel(
        self, op: CustomOp[P, R], dtype: torch.dtype, dims: Dims, prefix: str
    ) -> BoundKernel[P, R]:
        """Return the kernel for ``op``, loaded.

        Raises:
            NoCandidateError: every kernel was refused, or the pinned one.
            PluginError: the chosen one cannot be imported.
        """
        request = self._request("kernel", op.name, prefix, dtype=dtype, dims=dims)
        choice = self._choose(request, op.name, self.config.kernels)
        record = choice.chosen.record
        if not isinstance(record, Kernel):
            return BoundKernel(op.reference, None, choice)
        load = partial(self.registry.load, choice.chosen)
        prepare = load(record.prepare) if record.prepare else None
        return BoundKernel(load(record.target), prepare, choice)

    def layer(self, standard: type[PluggableLayer], site: Site) -> type[PluggableLayer]:
        """Return the class to build for ``standard``: itself or its replacement."""
        request = self._request("layer", standard.layer_id, site.prefix, dtype=site.dtype)
        choice = self._choose(request, standard.layer_id, self.config.layers)
        record = choice.chosen.record
        assert isinstance(record, LayerEntry)
        replacement = self.registry.load(choice.chosen, record.target)
        check_replacement(standard, replacement, choice.chosen.qualified_name)
        return replacement  # type: ignore[no-any-return]

    def attention(self, spec: AttentionSpec, site: Site) -> AttentionBackend:
        """Return the backend for ``spec``, shared by all layers with an equal spec."""
        request = self._request(
            "attention", spec.type, site.prefix, dtype=spec.dtype, dims=spec.dims(), detail=spec
        )
        choice = self._choose(request, "", self.config.attention)
        key = (choice.chosen.qualified_name, spec)
        if key not in self._backends:
            record = choice.chosen.record
            assert isinstance(record, AttentionEntry)
            backend = self.registry.load(choice.chosen, record.target)
            self._backends[key] = backend(spec, site)
        return self._backends[key]

    def check_places(self) -> None:
        """Raise ConfigError for a pin whose glob matched no place, now that the model is built."""
        config = self.config
        sources = {"kernel": config.kernels, "layer": config.layers, "attention": config.attention}
        for kind, pins in sources.items():
            for key in (key for key in pins if "@" in key):
                name, _, glob = key.partition("@")
                places = [
                    prefix
                    for choice, prefixes in self.choices.values()
                    if (choice.request.kind, choice.request.name) == (kind, name)
                    for prefix in prefixes
                ]
                if not any(pin_matches(key, name, place) for place in places):
                    nearest = ", ".join(nearest_first(glob, places)[:5]) or "(none)"
                    raise ConfigError(
                        f"The pin {key!r} matches no place where this model asks for {name!r}. "
                        f"Places, nearest first: {nearest}"
                    )

    def record(self, choice: Choice) -> None:
        """Add a choice that was made elsewhere for this model, so that it is explained as well."""
        self.choices[choice.request.key, choice.why] = (choice, [choice.request.prefix])

    def choose_scheme(self, settings: Mapping[str, Any]) -> None:
        """Set ``scheme`` to the one for a checkpoint's ``quantization_config``.

        Raises:
            UnknownNameError: no installed plugin knows the ``quant_method``.
            ConfigError: the scheme does not take the settings.
        """
        method = str(settings.get("quant_method"))
        choice = self._choose(Request("scheme", method), method, {})
        record = choice.chosen.record
        assert isinstance(record, SchemeEntry)
        self.scheme = self.registry.load(choice.chosen, record.target).parse(settings)

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

    def _choose(self, request: Request, subject: str, pins: Mapping[str, str]) -> Choice:
        pinned = pinned_name(pins, request)
        key = (*request.key, pinned)
        if key in self.choices:
            choice, prefixes = self.choices[key]
            prefixes.append(request.prefix)
            return choice
        try:
            choice = select(request, self.registry.candidates(request.kind, subject), pinned)
        except NoCandidateError as error:
            self.registry.plugins.observe("interposer_refused", error=error)
            raise
        self.choices[key] = (choice, [request.prefix])
        self.registry.plugins.observe("interposer_selected", choice=choice)
        return choice
