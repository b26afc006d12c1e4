"""The policy for one request, which combines all matching rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from interposer._config.config import Config
from interposer._config.rules import Rule
from interposer._contract.request import Kind, Request

FIELDS: dict[Kind, str] = {
    "kernel": "kernels",
    "layer": "layers",
    "attention": "attention",
    "scheme": "quantization",
    "model": "models",
    "communicator": "communicators",
}
"""The fields of a ``Config`` that hold rules, by kind of request."""
# Kinds whose records have properties.
_KINDS_WITH_PROPERTIES = frozenset({"kernel", "attention", "communicator"})
_NO_RULE = Rule()


def pin_matches(key: str, name: str, prefix: str) -> bool:
    """Tell whether the key of a rule matches op or layer ``name`` at the module ``prefix``."""
    key_name, at, glob = key.partition("@")
    return key_name in (name, "*") and (not at or fnmatchcase(prefix, glob))


@dataclass(frozen=True, slots=True)
class Policy:
    """The effective constraints and preferences for one request, with the fields of a ``Rule``.

    ``strict`` refuses an unmet preference, and a tie that only names could decide. Without
    ``emulation`` no emulation may be chosen. ``default`` is the platform's preference: it ranks
    after the user's preferences, and is optional even if ``strict``.
    """

    pin: str | None = None
    prefer: tuple[str, ...] = ()
    forbid: frozenset[str] = frozenset()
    require: frozenset[str] = frozenset()
    strict: bool = False
    emulation: bool = True
    default: str = ""


def policy_for(
    config: Config, request: Request, defaults: Mapping[str, str] | None = None
) -> Policy:
    """Combine the rules of ``config`` that match ``request``.

    The most specific matching rule with a pin or a preference decides on both. Forbidden candidates
    and required properties are collected from all matching rules.

    Args:
        defaults: the platform's preferred kernel by op.
    """
    if request.kind == "platform":
        rules = [] if config.platform is None else [config.platform]
    else:
        by_key: Mapping[str, Rule] = getattr(config, FIELDS[request.kind])
        matching = [key for key in by_key if pin_matches(key, request.name, request.prefix)]
        rules = [by_key[key] for key in sorted(matching, key=_specificity, reverse=True)]
    pin_or_preference = next(
        (rule for rule in rules if rule.pin is not None or rule.prefer), _NO_RULE
    )
    required = config.require if request.kind in _KINDS_WITH_PROPERTIES else frozenset()
    return Policy(
        pin_or_preference.pin,
        pin_or_preference.prefer,
        frozenset().union(*(rule.forbid for rule in rules)),
        required.union(*(rule.require for rule in rules)),
        config.strict,
        config.emulation,
        defaults.get(request.name, "") if defaults and request.kind == "kernel" else "",
    )


def _specificity(key: str) -> tuple[bool, int, str]:
    """Return the sort key of a rule key: names rank above ``*``, longer globs above shorter."""
    name, _, glob = key.partition("@")
    return name != "*", len(glob), glob
