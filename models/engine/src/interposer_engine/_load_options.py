"""The arguments of ``load``, collected in one object and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from interposer import Config, Rule, effective_config
from interposer_engine._kv_cache_budget import check_sizes
from interposer_engine._kv_cache_size import check_fraction
from interposer_engine._prefix_settings import PrefixCache
from interposer_engine._speculation.settings import Speculation

if TYPE_CHECKING:
    from interposer_ops.layers.moe.placement import ExpertParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The arguments of ``load``, except the ranks and the path; see ``load`` for each.

    Attributes:
        config: the policy in force, with the platform that was requested by name.
    """

    dtype: str | torch.dtype
    config: Config
    quantization: str | Mapping[str, Any] | None
    cache_tokens: int | None
    memory_fraction: float | None
    max_sequences: int
    max_step_tokens: int
    prefix_cache: bool | PrefixCache
    adapters: Mapping[str, str | Path]
    speculation: str | Path | Speculation | None
    expert_parallel: bool | ExpertParallel
    offload: bool | int | str | None
    progress: Callable[[int, int], None] | None

    def check(self) -> None:
        """Check the sizes and settings that need no model.

        Raises: ConfigError: a size is no positive integer, a fraction is not between 0 and 1, or
            the settings of a prefix cache or of speculative decoding contradict each other.
        """
        check_sizes(**self.sizes, cache_tokens=self.cache_tokens)
        check_fraction(self.memory_fraction, self.cache_tokens)
        _ = self.speculation_settings, self.prefix_settings

    @property
    def sizes(self) -> dict[str, int]:
        """``max_sequences`` and ``max_step_tokens``, as keyword arguments of the engine's parts."""
        return {"max_sequences": self.max_sequences, "max_step_tokens": self.max_step_tokens}

    @property
    def speculation_settings(self) -> Speculation | None:
        """The settings of speculative decoding; None if draft tokens are not requested."""
        return None if self.speculation is None else Speculation.of(self.speculation)

    @property
    def prefix_settings(self) -> PrefixCache | None:
        """The settings of the prefix cache, None without one."""
        return PrefixCache.of(self.prefix_cache)

    def for_loader(self) -> dict[str, Any]:
        """Return the arguments of a loader of the entry points ``interposer.loaders``, by name."""
        names = [field.name for field in fields(self) if field.name != "config"]
        return {name: getattr(self, name) for name in names}


def policy_in_force(config: Config | None, platform: str | None) -> Config:
    """Return the policy in force, with the platform that was requested by name."""
    config = effective_config(config)
    if platform is not None:
        config = config.model_copy(update={"platform": Rule(pin=platform)})
    return config
