"""Merge the spellings of the rotary fields of config.json into one ``rope_parameters``.

Old configs have ``rope_scaling`` and ``rope_theta``. transformers 5 writes both into
``rope_parameters``, which some families nest by layer type. The rules of precedence are those of
transformers. Where transformers would silently drop a stated value, the config is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from interposer_models._decoder.field_error import FieldError

FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)
# Fields that may be inside of rope_parameters or at the top level of config.json.
LIFTED = ("rope_theta", "partial_rotary_factor")


class LayerTypeBases(NamedTuple):
    """The rotary bases of a family with different angles in sliding-window and full layers.

    Attributes:
        full: base of full-attention layers, unless ``rope_theta`` states it.
        sliding: base of sliding-window layers, unless ``sliding_field`` states it.
        sliding_field: name of a field of config.json; empty if there is no such field.
    """

    full: float
    sliding: float
    sliding_field: str = ""


def one_rotation(fields: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the rotary fields of a family with the same angles in all layers.

    A non-empty ``rope_scaling`` replaces ``rope_parameters``, ``rope_theta`` included.

    Args:
        fields: of config.json.
        base: the value that each of ``LIFTED`` has without ``rope_parameters``.
    Raises: FieldError: the replacement would change a value that only ``rope_parameters`` states.
    """
    parameters, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling")
    if not scaling:
        return dict(parameters)
    if nested := [kind for kind in LAYER_TYPES if kind in parameters]:
        raise FieldError(
            f"rope_scaling stands beside rope_parameters, which is nested by {', '.join(nested)}",
            "move the content of rope_scaling into rope_parameters, and remove rope_scaling",
        )
    # rope_scaling wins; refuse values that only rope_parameters states and that would be lost.
    for name in LIFTED if parameters else ():
        value = parameters.get(name, base[name])
        if scaling.get(name, base[name]) != value:
            raise FieldError(
                f"rope_scaling stands beside rope_parameters and replaces it, but {name} "
                f"{value!r} is in rope_parameters alone; without it, {name} would be "
                f"{scaling.get(name, base[name])!r}",
                "move the content of rope_scaling into rope_parameters, and remove rope_scaling",
            )
    return dict(scaling)


def rotation_by_layer_type(fields: Mapping[str, Any], bases: LayerTypeBases) -> dict[str, Any]:
    """Merge the rotary fields of a family with angles per layer type, nested by type.

    ``rope_scaling`` applies to full-attention layers.

    Raises: FieldError: a value is stated where transformers does not look.
    """
    parameters, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    nested = {kind: dict(parameters.get(kind) or {}) for kind in LAYER_TYPES}
    base = fields.get("rope_theta", bases.full)
    if parameters and not any(kind in parameters for kind in LAYER_TYPES):
        _refuse_flat(parameters, base)
    if any(kind in scaling for kind in LAYER_TYPES):
        raise FieldError(
            f"rope_scaling is nested by layer types ({', '.join(scaling)}), and is read flat",
            "name the field rope_parameters",
        )
    if "type" in scaling and "rope_type" not in scaling:
        raise FieldError(
            f"rope_scaling has the type under 'type' ({scaling['type']!r}), which transformers "
            "ignores for this architecture, and with it the scaling",
            "name it 'rope_type'",
        )
    nested[FULL] |= scaling
    full, sliding = nested[FULL], nested[SLIDING]
    if not bases.sliding_field and "rope_theta" not in {**full, **sliding} and base != bases.full:
        raise FieldError(
            f"rope_theta is {base!r} outside of rope_parameters; some releases of transformers "
            f"take it for layers of {SLIDING}, others {bases.sliding!r}",
            f"state rope_theta within {FULL} and within {SLIDING} of rope_parameters",
        )
    # A base inside of a nested entry wins over the fields at the top level.
    full.setdefault("rope_theta", base)
    local = fields.get(bases.sliding_field) if bases.sliding_field else None
    sliding.setdefault("rope_theta", bases.sliding if local is None else local)
    return nested


def nested_rotation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Check that ``rope_parameters`` is nested by layer type, the only spelling this family reads.

    Raises: FieldError: another spelling is used.
    """
    parameters, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling")
    flat = [name for name, value in parameters.items() if not isinstance(value, Mapping)]
    if scaling or flat:
        raise FieldError(
            f"{'rope_scaling' if scaling else 'a flat rope_parameters'} is not read for this "
            "architecture, whose layer types differ in angles",
            f"state the angles within {FULL} and within {SLIDING} of rope_parameters",
        )
    return dict(parameters)


def _refuse_flat(parameters: Mapping[str, Any], base: Any) -> None:
    """Raise FieldError if a flat ``rope_parameters`` differs from the defaults."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    # A flat field that states only defaults is harmless.
    other_fields = parameters.keys() - {"rope_type", "type", "rope_theta"}
    if kind == "default" and parameters.get("rope_theta", base) == base and not other_fields:
        return
    raise FieldError(
        f"rope_parameters is flat (rope_type {kind!r}), but layers of {FULL} and of {SLIDING} "
        "have angles of their own in this architecture; transformers ignores what is not within "
        "one of them",
        f"state the angles within {FULL} and within {SLIDING} of rope_parameters",
    )


def long_factors_note(scaling: Mapping[str, Any]) -> str:
    """Return a note that ``longrope`` uses the long factors for all sequences, or ""."""
    if scaling.get("rope_type", scaling.get("type")) != "longrope":
        return ""
    # transformers chooses the factors per sequence; here one table of angles serves all sequences.
    longest = scaling["max_position_embeddings"]
    original = scaling["original_max_position_embeddings"]
    if longest <= original or scaling.get("long_factor") == scaling.get("short_factor"):
        return ""
    return (
        f"longrope: all sequences have the long factors, as max_position_embeddings {longest:,} is "
        f"above the original context; transformers takes the short ones for sequences of up to "
        f"{original:,} tokens. For these, set max_position_embeddings to {original}"
    )
