"""Online integer schemes: weights are quantized at loading as by ``interposer quantize``."""

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
# Default group sizes; the first that divides a layer's inputs is used.
_GROUP_SIZES = (128, 64, 32, 16)
_MEND = "name all of them in 'modules_to_not_convert', or none"
_SUPPORTED = """\
Supported: 'group_size' and 'asymmetric' of int4 and w4a8, 'activations' 'int8' or 'none' of int8 \
and int4; 'head' 'int8', 'int4' or 'plain' with a 'head_group_size' and 'head_activations'; \
layers left out by 'modules_to_not_convert'.
Try: load(..., quantization={"quant_method": "int4", "group_size": 32})"""


class OnlineSettings(HeadSettings):
    """Settings of online integer quantization; each field means the same as in ``weight_format``.

    The default group size of 4-bit weights is the first of 128, 64, 32 and 16 that divides the
    layer's inputs.
    """

    supported: ClassVar[str] = _SUPPORTED
    quant_method: Literal["online_int8", "online_int4", "online_w4a8"]
    group_size: PositiveInt | None = None
    asymmetric: bool = False
    activations: Literal["int8", "none"] | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Validate the raw settings and return the parsed settings.

        Raises: ConfigError: a setting is unknown, contradictory or not supported.
        """
        parsed = super().parse(settings)
        # Raises if the options contradict each other.
        parsed.format(None)
        return parsed

    @property
    def scheme(self) -> str:
        """Return the name of this scheme in ``interposer quantize``."""
        return self.quant_method.removeprefix(_ONLINE)

    def format(self, group_size: int | None) -> IntegerFormat:
        """Return the weight format, with ``group_size`` as the default group size.

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
        """Return the weight format of the linear layer at ``site``.

        Raises: ConfigError: no group size is stated, and no default divides the number of inputs.
        """
        needs_no_default = self.scheme not in _INT4 or self.group_size is not None
        return self.format(
            None if needs_no_default else largest_group(site, in_features, _GROUP_SIZES)
        )

    def stored(self, name: str) -> str | None:
        """Return the quantization scheme of the linear layer ``name``, or None if excluded."""
        return None if self.leaves_out(name) else self.scheme


class _OnlineIntegers(OnlineScheme):
    """Base of the online integer schemes: ``finalize`` rounds weights to the nearest integer."""

    settings_class = OnlineSettings
    settings: OnlineSettings
    mend = _MEND

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Create the scheme from the settings.

        Raises: ConfigError: a setting is unknown, contradictory or not supported; the message lists
            the supported settings.
        """
        return super().parse({"quant_method": cls.method, **settings})

    def _method(self, stored: str) -> LinearMethod:
        return OnlineIntegerLinear(self.settings.layer_format)


class OnlineInt8(_OnlineIntegers):
    """Online scheme of 8-bit weights; inputs are 8-bit too unless ``activations`` is ``"none"``."""

    method = "online_int8"


class OnlineInt4(_OnlineIntegers):
    """Online scheme of 4-bit weights in groups; 8-bit inputs if ``activations`` is ``"int8"``."""

    method = "online_int4"


class OnlineW4A8(_OnlineIntegers):
    """Online scheme of 4-bit weights in groups with 8-bit inputs."""

    method = "online_w4a8"


def online_int8_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return settings with int8 inputs and with unquantized inputs, by label."""
    return _examples(
        "int8",
        {"inputs int8": {}, "inputs as they are": {"activations": "none"}},
    )


def online_int4_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return int4 settings of several group sizes, by label."""
    return _examples(
        "int4",
        {
            "largest groups that fit": {},
            "groups of 32, asymmetric": {"group_size": 32, "asymmetric": True},
            "inputs int8": {"activations": "int8", "modules_to_not_convert": ["lm_head"]},
        },
    )


def online_w4a8_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return w4a8 settings of several group sizes, by label."""
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
    return {label: {"quant_method": method, **fields} for label, fields in settings.items()}
