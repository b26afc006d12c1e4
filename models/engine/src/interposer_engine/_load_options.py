"""The arguments of ``load`` as one checked object, with their command-line options.

This module imports no torch, because the commands read the options for ``--help``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interposer import Config, Rule, effective_config

if TYPE_CHECKING:
    import torch

    from interposer_engine._prefix_settings import PrefixCache
    from interposer_engine._speculation.settings import Speculation
    from interposer_ops.layers.moe.placement import ExpertParallel

DEFAULT_MAX_SEQUENCES = 64
"""Default of ``max_sequences`` of ``load``."""
DEFAULT_MAX_STEP_TOKENS = 2048
"""Default of ``max_step_tokens`` of ``load``."""


@dataclass(frozen=True, slots=True)
class CommandOption:
    """The command-line option by which commands take an argument of ``load``.

    Attributes:
        kind: type of the value, without None.
        help: description for ``--help``.
        flag: the option, if it has another name than the argument.
        metavar: name of the value in ``--help``; None for the name of the type.
        min: least value.
    """

    kind: type
    help: str
    flag: str | None = None
    metavar: str | None = None
    min: int | None = None

    @classmethod
    def of(cls, name: str) -> CommandOption | None:
        """Return the command-line option of an argument of ``load``; None if there is none."""
        option: CommandOption | None = LoadOptions.__dataclass_fields__[name].metadata.get(cls)
        return option


def _option(kind: type, help_text: str, **details: Any) -> dict[Any, Any]:
    return {CommandOption: CommandOption(kind, help_text, **details)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The arguments of ``load``, except the ranks and the path, with the defaults of ``load``.

    Commands take the arguments that have a ``CommandOption``, with the defaults of ``load``.

    Attributes:
        config: the policy in force, with the platform that was requested by name.
    """

    config: Config
    # The options of these three are in ``interposer_tools.options``: ``explain`` has them too.
    dtype: str | torch.dtype = "auto"
    quantization: str | Mapping[str, Any] | None = None
    expert_parallel: bool | ExpertParallel = False
    speculation: str | Path | Speculation | None = field(
        default=None,
        metadata=_option(
            str,
            "Source of draft tokens: prompt lookup (ngram), the checkpoint's MTP head (heads), "
            "or the path of an EAGLE-3 head or a smaller model.",
            flag="--speculate",
            metavar="ngram|heads|PATH",
        ),
    )
    max_sequences: int = field(
        default=DEFAULT_MAX_SEQUENCES,
        metadata=_option(int, "Maximum number of answers that run at once.", min=1),
    )
    max_step_tokens: int = field(
        default=DEFAULT_MAX_STEP_TOKENS,
        metadata=_option(int, "Most tokens that one step of the model or encoder computes.", min=1),
    )
    cache_tokens: int | None = field(
        default=None,
        metadata=_option(
            int, "Size of the KV cache in tokens; the default uses free memory.", min=1
        ),
    )
    memory_fraction: float | None = field(
        default=None,
        metadata=_option(
            float, "Fraction of the free memory for the KV cache, above 0 and at most 1."
        ),
    )
    prefix_cache: bool | PrefixCache = field(
        default=False, metadata=_option(bool, "Compute shared prefixes of prompts only once.")
    )
    offload: bool | int | str | None = field(
        default=None,
        metadata=_option(
            str,
            "Amount of weights to keep in memory, such as 8GiB or 50%; the others are streamed.",
            metavar="SIZE",
        ),
    )
    text_only: bool = field(
        default=False,
        metadata=_option(bool, "Load no encoder of images or sounds."),
    )
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    progress: Callable[[int, int], None] | None = None

    def check(self) -> None:
        """Check the sizes and settings that can be checked without a model.

        Raises: ConfigError: a size is no positive integer, a fraction is not between 0 and 1, or
            the settings of a prefix cache or of speculative decoding contradict each other.
        """
        from interposer_engine._kv_cache_budget import check_sizes
        from interposer_engine._kv_cache_size import check_fraction

        check_sizes(**self.sizes, cache_tokens=self.cache_tokens)
        check_fraction(self.memory_fraction, self.cache_tokens)
        _ = self.speculation_settings, self.prefix_settings

    @property
    def sizes(self) -> dict[str, int]:
        """The options ``max_sequences`` and ``max_step_tokens``, as keyword arguments."""
        return {"max_sequences": self.max_sequences, "max_step_tokens": self.max_step_tokens}

    @property
    def speculation_settings(self) -> Speculation | None:
        """The settings of speculative decoding; None if draft tokens are not requested."""
        from interposer_engine._speculation.settings import Speculation

        return None if self.speculation is None else Speculation.of(self.speculation)

    @property
    def prefix_settings(self) -> PrefixCache | None:
        """The settings of the prefix cache; None without a prefix cache."""
        from interposer_engine._prefix_settings import PrefixCache

        return PrefixCache.of(self.prefix_cache)

    def for_loader(self) -> dict[str, Any]:
        """Return the arguments for loaders of the entry points ``interposer.loaders``, by name."""
        names = [field.name for field in fields(self) if field.name != "config"]
        return {name: getattr(self, name) for name in names}


def policy_in_force(config: Config | None, platform: str | None) -> Config:
    """Return the current policy, changed to the platform that was requested by name."""
    config = effective_config(config)
    if platform is not None:
        config = config.model_copy(update={"platform": Rule(pin=platform)})
    return config
