"""The selection of one worker: the resolver that all of its layers ask."""

from __future__ import annotations

from functools import cache

import torch

from interposer import Config, Resolver, Site, place

__all__ = ["Session", "session"]


class Session:
    """The resolver of this process, and what it could not take over.

    Attributes:
        kept: what stays vLLM's own, by place, with the reason.
    """

    def __init__(self, config: Config | None = None) -> None:
        self.placement = place(config)
        self.resolver = Resolver.at(self.placement, config)
        self.kept: dict[str, str] = {}

    def site(self, prefix: str, dtype: torch.dtype) -> Site:
        """Return the site of a layer at ``prefix``."""
        return Site(self.resolver, prefix, dtype)


@cache
def session() -> Session:
    """Return the session of this process, which the first layer opens.

    Raises: PlatformUnavailableError: no platform can be used.
    """
    return Session()
