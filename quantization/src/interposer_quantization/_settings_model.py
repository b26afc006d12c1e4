"""Base model of checkpoint settings, with errors that list the supported settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from reprlib import repr as shortened
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from interposer.errors import ConfigError, UnknownNameError

SEARCH_SETTINGS = frozenset(
    {
        "act_group_aware",
        "amp",
        "autoround_version",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "damp_auto_increment",
        "damp_percent",
        "dataset",
        "enable_minmax_tuning",
        "enable_norm_bias_tuning",
        "enable_quanted_input",
        "exllama_config",
        "gradient_accumulate_steps",
        "iters",
        "low_gpu_mem_usage",
        "lr",
        "max_input_length",
        "meta",
        "minmax_lr",
        "model_seqlen",
        "module_name_preceding_first_block",
        "mse",
        "nsamples",
        "pad_token_id",
        "provider",
        "quant_block_list",
        "scale_dtype",
        "seqlen",
        "static_groups",
        "supported_types",
        "tokenizer",
        "true_sequential",
    }
)
"""Calibration settings of transformers, GPTQModel and auto-round; they do not affect decoding."""


def check_regex(pattern: str) -> str:
    """Return ``pattern``; raise ValueError unless it is a regular expression.

    Raises: ValueError: the pattern is invalid.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


def _group_size(size: int) -> int:
    if size < 1 and size != -1:
        raise ValueError("must be positive, or -1 for one group of all inputs")
    return size


GroupSize = Annotated[int, AfterValidator(_group_size)]
"""The number of inputs that share a scale; -1 means all inputs."""


class SettingsModel(BaseModel):
    """Strictly validated settings: unknown fields are errors and no value is converted.

    Attributes:
        supported: description of the supported settings, for error messages.
        without_effect: names of settings that are ignored because they do not affect decoding.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    supported: ClassVar[str] = ""
    without_effect: ClassVar[Collection[str]] = ()

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Validate the raw settings and return the parsed settings.

        Raises: ConfigError: a setting is unknown, contradictory or not supported.
        """
        return cls.parsed(settings, cls.without_effect, cls.supported)

    @classmethod
    def parsed(
        cls, settings: Mapping[str, Any], without_effect: Collection[str], supported: str
    ) -> Self:
        """Validate raw settings, except the ignored names, and return the parsed settings.

        Args:
            without_effect: names of settings to ignore.
            supported: description of the supported settings, for error messages.
        Raises: ConfigError: a setting is unknown, contradictory or not supported.
        """
        # Checked before pydantic does, for an error that suggests the nearest known name.
        for name in settings:
            if name not in cls.model_fields and name not in without_effect:
                where = "in quantization_config"
                raise UnknownNameError("setting", name, cls.model_fields, supported, where)
        recognized = {name: value for name, value in settings.items() if name in cls.model_fields}
        try:
            return cls.model_validate(recognized)
        except ValidationError as error:
            # One line per invalid field, so that the user can fix all of them at once.
            problems = "\n".join(map(_problem, error.errors()))
            raise ConfigError(
                f"The quantization of this checkpoint is not supported:\n{problems}\n{supported}"
            ) from error


def _problem(error: Any) -> str:
    field = ".".join(("quantization_config", *map(str, error["loc"])))
    value = "missing" if error["type"] == "missing" else shortened(error["input"])
    return f"  {field} = {value}: {error['msg'].removeprefix('Value error, ')}"
