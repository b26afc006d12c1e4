"""The sum of the rules that hold for one request."""

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
"""The fields of a ``Config`` that hold rules, by what they are on."""
_PROMISING = frozenset(
    {"kernel", "attention", "communicator"}
)  # kinds whose records have properties
_NO_RULE = Rule()


def pin_matches(key: str, name: str, prefix: str) -> bool:
    """Say whether the key of a rule speaks of ``name`` at the place ``prefix``."""
    named, at, glob = key.partition("@")
    return named in (name, "*") and (not at or fnmatchcase(prefix, glob))


@dataclass(frozen=True, slots=True)
class Policy:
    """The wishes of the configuration for one request; the fields are those of a ``Rule``.

    ``strict`` refuses what is otherwise tolerated: a preference that nothing meets, and a tie
    that only names could decide. Without ``emulation`` none may be chosen. ``default`` is what the
    platform prefers: it stands behind the user's preferences, and ``strict`` does not ask for it.
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
    """Return what ``config`` wants of ``request``.

    The most specific of the rules that match and have a pin or a preference decides on both; what
    is forbidden or required by any of them is forbidden or required.

    Args:
        defaults: the kernel that the platform prefers for an op.
    """
    if request.kind == "platform":
        rules = [] if config.platform is None else [config.platform]
    else:
        by_key: Mapping[str, Rule] = getattr(config, FIELDS[request.kind])
        matching = [key for key in by_key if pin_matches(key, request.name, request.prefix)]
        rules = [by_key[key] for key in sorted(matching, key=_specificity, reverse=True)]
    wish = next((rule for rule in rules if rule.pin is not None or rule.prefer), _NO_RULE)
    required = config.require if request.kind in _PROMISING else frozenset()
    return Policy(
        wish.pin,
        wish.prefer,
        frozenset().union(*(rule.forbid for rule in rules)),
        required.union(*(rule.require for rule in rules)),
        config.strict,
        config.emulation,
        defaults.get(request.name, "") if defaults and request.kind == "kernel" else "",
    )


def _specificity(key: str) -> tuple[bool, int, str]:
    """Order the keys that match one request: by name before ``*``, then by length of the glob."""
    name, _, glob = key.partition("@")
    return name != "*", len(glob), glob
