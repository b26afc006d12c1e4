"""Plain weights that become integers while they load, as ``interposer quantize`` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import PositiveInt

from interposer import LinearMethod, Site
from interposer_quantization._online.head import HeadSettings, OnlineScheme
from interposer_quantization._online.integer_linear import OnlineIntegerLinear, largest_group
from interposer_quantization.writing._integer_formats import IntegerFormat
from interposer_quantization.writing._schemes import weight_format

_ONLINE = "online_"
_INT4 = ("int4", "w4a8")
# The first one that divides the inputs of a layer, where no size is stated.
_GROUP_SIZES = (128, 64, 32, 16)
_MEND = "name all of them in 'modules_to_not_convert', or none"
_SUPPORTED = """\
Supported: 'group_size' and 'asymmetric' of int4 and w4a8, 'activations' 'int8' or 'none' of int8 \
and int4; 'head' 'int8', 'int4' or 'plain' with a 'head_group_size' and 'head_activations'; \
layers left out by 'modules_to_not_convert'.
Try: load(..., quantization={"quant_method": "int4", "group_size": 32})"""


class OnlineSettings(HeadSettings):
    """Settings of online integers; each means what it does in ``weight_format``.

    Without ``group_size``, groups of 4-bit integers have 128 inputs, or the next of 64, 32 and 16
    that divides the inputs of a layer.
    """

    supported: ClassVar[str] = _SUPPORTED
    quant_method: Literal["online_int8", "online_int4", "online_w4a8"]
    group_size: PositiveInt | None = None
    asymmetric: bool = False
    activations: Literal["int8", "none"] | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Return the settings.

        Raises: ConfigError: a setting is unknown, contradictory or not supported.
        """
        parsed = super().parse(settings)
        parsed.format(None)
        return parsed

    @property
    def scheme(self) -> str:
        """Return the scheme as ``interposer quantize`` names it."""
        return self.quant_method.removeprefix(_ONLINE)

    def format(self, group_size: int | None) -> IntegerFormat:
        """Return the format of weights, with groups of that size unless another one is stated.

        Raises: ConfigError: the settings contradict each other.
        """
        chosen = weight_format(
            self.scheme,
            self.group_size or group_size,
            asymmetric=self.asymmetric,
            activations=self.activations,
        )
        assert isinstance(chosen, IntegerFormat)
        return chosen.in_bytes()

    def layer_format(self, site: Site, in_features: int) -> IntegerFormat:
        """Return the format of the linear layer at a site.

        Raises: ConfigError: no size of groups is stated, and none of the default ones divides.
        """
        stated = self.scheme not in _INT4 or self.group_size is not None
        return self.format(None if stated else largest_group(site, in_features, _GROUP_SIZES))

    def stored(self, name: str) -> str | None:
        """Return the scheme of the linear layer ``name``, None if left out."""
        return None if self.leaves_out(name) else self.scheme


class _OnlineIntegers(OnlineScheme):
    """Weights rounded to nearest when a layer is finalized, and inputs as the format says."""

    settings_class = OnlineSettings
    settings: OnlineSettings
    mend = _MEND

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Return the scheme for these settings.

        Raises: ConfigError: a setting is unknown, contradictory or not supported; the text says
            what is.
        """
        return super().parse({"quant_method": cls.method, **settings})

    def _method(self, stored: str) -> LinearMethod:
        """Return the method for linear layers that are stored so."""
        return OnlineIntegerLinear(self.settings.layer_format)


class OnlineInt8(_OnlineIntegers):
    """Weights and, unless ``activations`` is ``"none"``, inputs of 8 bits."""

    method = "online_int8"


class OnlineInt4(_OnlineIntegers):
    """Weights of 4 bits in groups; inputs of 8 where ``activations`` is ``"int8"``."""

    method = "online_int4"


class OnlineW4A8(_OnlineIntegers):
    """Weights of 4 bits in groups, inputs of 8."""

    method = "online_w4a8"


def online_int8_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return settings with inputs of 8 bits and as they are, by label."""
    return _examples(
        "int8",
        {"inputs int8": {}, "inputs as they are": {"activations": "none"}},
    )


def online_int4_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return settings of several sizes of groups, by label."""
    return _examples(
        "int4",
        {
            "largest groups that fit": {},
            "groups of 32, asymmetric": {"group_size": 32, "asymmetric": True},
            "inputs int8": {"activations": "int8", "modules_to_not_convert": ["lm_head"]},
        },
    )


def online_w4a8_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return settings of several sizes of groups, by label."""
    return _examples(
        "w4a8",
        {
            "largest groups that fit": {},
            "groups of 32, asymmetric": {"group_size": 32, "asymmetric": True},
        },
    )


def _examples(
    scheme: str, settings: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Mapping[str, Any]]:
    method = f"{_ONLINE}{scheme}"
    return {label: {"quant_method": method, **rest} for label, rest in settings.items()}
