"""The session of one vLLM worker: the resolver that selects kernels for all layers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from interposer import Config, QuantizationScheme, Resolver, Site, place
from interposer.errors import ConfigError, InterposerError, UnknownNameError

__all__ = ["Session", "closed_session", "opened_session", "session"]

_log = logging.getLogger("vllm.interposer")


class Session:
    """The resolver of one vLLM worker, and a list of layers that run on interposer's kernels.

    Attributes:
        taken: prefixes of the layers that run on a kernel of interposer.
        kept: the reason why a layer keeps running on vLLM's kernels, by prefix.

    Args:
        device_type: the device that vLLM computes on, as torch names it.
    Raises:
        PlatformUnavailableError: no platform can be used.
        ConfigError: the platform in force is for other hardware than vLLM's, or the configuration
            sets ``kv_cache``.
    """

    def __init__(self, device_type: str, config: Config | None = None) -> None:
        self.placement = place(config)
        device = torch.device(self.placement.device.torch_device)
        if device.type != device_type:
            raise ConfigError(
                f"vLLM computes on {device_type!r}, the platform in force is "
                f"{self.placement.platform.name!r} for {device.type!r}. Try: INTERPOSER_PLATFORM "
                f"with the name of one for {device_type!r}"
            )
        self.resolver = Resolver.at(self.placement, config)
        if (kv_cache := self.resolver.config.kv_cache) != "auto":
            raise ConfigError(
                f"kv_cache={kv_cache!r} is for interposer's own caches, vLLM lays out its own. "
                "Try: vLLM's option kv_cache_dtype, and leave kv_cache out"
            )
        self.taken: list[str] = []
        self.kept: dict[str, str] = {}
        self._schemes: dict[str, QuantizationScheme | ConfigError] = {}

    def site(self, prefix: str, dtype: torch.dtype) -> Site:
        """Return the site of a layer at ``prefix``, which requests kernels from the resolver."""
        return Site(self.resolver, prefix, dtype)

    def is_traceable(self, prefix: str) -> bool:
        """Return whether torch's compiler can trace every kernel chosen at ``prefix``."""
        chosen = [c.chosen for c, places in self.resolver.choices.values() if prefix in places]
        return bool(chosen) and all("traceable" in kernel.properties for kernel in chosen)

    def scheme(self, settings: Mapping[str, Any]) -> QuantizationScheme:
        """Return the scheme for a checkpoint's ``quantization_config``, cached by the settings.

        Raises: UnknownNameError, ConfigError: see ``Resolver.choose_scheme``.
        """
        # Settings are mappings and may contain lists, so they are not hashable.
        key = json.dumps(settings, sort_keys=True, default=str)
        if key not in self._schemes:
            try:
                self.resolver.choose_scheme(settings)
                assert self.resolver.scheme is not None  # set by choose_scheme
                self._schemes[key] = self.resolver.scheme
            except (ConfigError, UnknownNameError) as error:
                # Cached like a scheme: every layer of the checkpoint requests it again.
                self._schemes[key] = error
        scheme = self._schemes[key]
        if isinstance(scheme, Exception):
            raise scheme
        return scheme


@cache
def _cached_session() -> Session | InterposerError:
    from vllm.platforms import current_platform

    try:
        return Session(current_platform.device_type)
    except InterposerError as error:
        _log.warning("interposer: nothing is taken over: %s", error)
        return error


def session() -> Session:
    """Return the session of this process, opened for the first layer.

    Raises: PlatformUnavailableError, ConfigError: see ``Session``; logged once per process.
    """
    opened = _cached_session()
    if isinstance(opened, InterposerError):
        raise opened
    return opened


def opened_session() -> Session | None:
    """Return the session of this process, None if no layer has opened one."""
    if not _cached_session.cache_info().currsize:
        return None
    opened = _cached_session()
    return opened if isinstance(opened, Session) else None


@contextmanager
def closed_session() -> Iterator[None]:
    """Discard the session before and after a ``with`` block; its first layer opens a new one."""
    _cached_session.cache_clear()
    try:
        yield
    finally:
        _cached_session.cache_clear()
