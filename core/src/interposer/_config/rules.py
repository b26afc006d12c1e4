"""Rules: how a user pins, prefers, forbids or requires candidates in the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WrapSerializer,
    model_serializer,
    model_validator,
)

from interposer._contract.errors import ConfigError, UnknownNameError

REQUIRABLE = frozenset(
    {"batch_invariant", "deterministic", "differentiable", "graph_safe", "traceable"}
)
"""The properties that can be required of a kernel or an attention backend."""


class Exact(BaseModel):
    """Base of models with immutable fields of exact types, without extra fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Settings(Exact):
    """Base class of settings; constructors raise ``interposer.errors``, not pydantic's errors."""

    if not TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise config_error(error, type(self)) from error


# A plain string would become a set of letters, so only collections pass.
def _as_set(names: Any) -> Any:
    if isinstance(names, list | tuple | Set):
        return frozenset(names)
    raise ValueError("must be a list or a set of names")


def _as_tuple(names: Any) -> Any:
    if isinstance(names, list | tuple):
        return tuple(names)
    raise ValueError("must be a list of names, the first choice first")


def _known_properties(names: frozenset[str]) -> frozenset[str]:
    if names <= REQUIRABLE:
        return names
    raise UnknownNameError("property", min(names - REQUIRABLE), REQUIRABLE)


Name = Annotated[str, Field(min_length=1)]
Names = Annotated[
    frozenset[Name],
    BeforeValidator(_as_set),
    PlainSerializer(lambda names: sorted(names), return_type=list[str], when_used="json"),
]
Required = Annotated[Names, AfterValidator(_known_properties)]

AnyNames = Set[str] | list[str] | tuple[str, ...]
"""Every accepted form of a collection of names."""


class Rule(Settings):
    """Constraints and preferences of a user for one choice; a plain string is a rule with that pin.

    Attributes:
        pin: name or ``provider/name`` of the only candidate that may be chosen.
        prefer: globs over names and ``provider/name``: matches of the first glob rank before
            matches of the second, and so on; other candidates rank last.
        forbid: globs over names and ``provider/name`` of candidates that may not be chosen.
        require: properties that the chosen candidate must promise, out of ``REQUIRABLE``.

    Raises:
        ConfigError: a value cannot be used, or there are both a pin and a preference.
        UnknownNameError: a field or a property is unknown.
    """

    pin: Name | None = None
    prefer: Annotated[tuple[Name, ...], BeforeValidator(_as_tuple)] = ()
    forbid: Names = frozenset()
    require: Required = frozenset()

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            pin: str | None = None,
            prefer: list[str] | tuple[str, ...] = (),
            forbid: AnyNames = (),
            require: AnyNames = (),
        ) -> None: ...

    @model_validator(mode="after")
    def _one_wish(self) -> Rule:
        if self.pin is not None and self.prefer:
            raise ConfigError("a pin leaves nothing to prefer. Try: one of the two")
        return self

    @model_serializer
    def _shortened(self) -> str | dict[str, Any]:
        """Serialize the rule as its pin if only the pin is set, else as the fields that are set."""
        fields = dict(self.__repr_args__())
        return fields["pin"] if fields.keys() == {"pin"} else fields

    def __repr_args__(self) -> Iterable[tuple[str, Any]]:
        for name in Rule.model_fields:
            value = getattr(self, name)
            if value:
                yield name, sorted(value) if isinstance(value, Set) else value

    def __str__(self) -> str:
        parts = [self.pin] if self.pin is not None else []
        parts += [f"+{name}" for name in self.prefer]
        parts += [f"-{name}" for name in sorted(self.forbid)]
        parts += [f"requires {name}" for name in sorted(self.require)]
        return ", ".join(parts) or "nothing"


AnyRule = Rule | str | Mapping[str, Any]
"""Every accepted form of a rule; a mapping holds the rule's fields."""


def read_rule(value: Any) -> Rule:
    """Convert ``value`` to a rule; raise ConfigError for an unusable value."""
    match value:
        case Rule():
            return value
        case str():
            return Rule(pin=value)
        case Mapping():
            return Rule(**{str(name): field for name, field in value.items()})
    raise ValueError("must be a name or a rule, as 'reference' or {'forbid': ['acme/*']}")


def first_fault(error: ValidationError) -> str:
    """Return the field path and the message of the first validation failure in ``error``."""
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}"


def config_error(error: ValidationError, model: type[BaseModel]) -> ConfigError:
    """Convert a pydantic error about the fields of ``model`` to a ConfigError about one fault."""
    errors = error.errors()
    # Report an unknown field first: a misspelled name often causes the other faults.
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    parts = [str(part) for part in first["loc"]]
    # For an invalid key of a mapping, pydantic appends the key and "[key]" to the location.
    place = ".".join(parts[:-2] if parts[-1:] == ["[key]"] else parts)
    if first["type"] == "extra_forbidden":
        return UnknownNameError("field", place, model.model_fields, where=f"of {model.__name__}")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UnknownNameError):
        kind = "key" if cause.kind == "field" else cause.kind
        return UnknownNameError(kind, cause.name, cause.known, where=f"in {place}")
    if isinstance(cause, ConfigError):
        return ConfigError(f"{place}: {cause}" if place else str(cause))
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        literals = get_args(model.model_fields[place].annotation)
        return UnknownNameError("value", first["input"], literals, where=f"of {place}")
    return ConfigError(
        f"{place} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"
    )


def check_key(key: str) -> str:
    """Check that a rule's key has one of the four forms, and return the key."""
    name, at, glob = key.partition("@")
    if not name or (at and not glob) or (name != "*" and set(name) & set("*?[")):
        raise ConfigError(f"the key {key!r} is none of NAME, NAME@GLOB, * and *@GLOB")
    return key


def _as_dict(rules: Any) -> Any:
    return dict(rules) if isinstance(rules, Mapping) else rules


Rules = Annotated[
    Mapping[Annotated[str, AfterValidator(check_key)], Annotated[Rule, BeforeValidator(read_rule)]],
    BeforeValidator(_as_dict),
    AfterValidator(MappingProxyType),
    WrapSerializer(lambda rules, serialize: serialize(dict(rules))),
    Field(default_factory=lambda: MappingProxyType({})),
]
"""Immutable rules by key."""


def parse_rules(items: Iterable[str], source: str) -> dict[str, dict[str, Any]]:
    """Parse texts such as ``rms_norm=reference`` to the fields of rules by key.

    ``KEY=NAME`` pins, ``KEY=+NAME`` prefers, ``KEY=-NAME`` forbids; several texts with one key are
    combined.

    Args:
        source: origin of the texts, for errors.
    Raises: ConfigError: a text has another form, or a key has two pins.
    """
    rules: dict[str, dict[str, Any]] = {}
    for item in items:
        key, _, choice = (part.strip() for part in item.partition("="))
        sign = choice[:1] if choice[:1] in ("+", "-") else ""
        name = choice.removeprefix(sign).strip()
        if not (key and name):
            raise ConfigError(
                f"{source}: {item!r} is not of the form NAME=CHOICE, as in rms_norm=reference; "
                "NAME=+CHOICE prefers, NAME=-CHOICE forbids"
            )
        rule = rules.setdefault(key, {})
        if sign:
            rule.setdefault("prefer" if sign == "+" else "forbid", []).append(name)
        elif rule.setdefault("pin", name) != name:
            raise ConfigError(f"{source}: {key!r} is set to {rule['pin']!r} and to {name!r}")
    return rules
