"""Uses of a host's names in a plugin, and those that one version of the host does not support."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Finding", "Reading", "Use", "UseKind"]


class UseKind(StrEnum):
    """How a plugin uses a name of its host."""

    IMPORT = "import"
    ATTRIBUTE = "attribute"
    CALL = "call"
    OVERRIDE = "override"
    ABSTRACT = "abstract"
    PATCH = "patch"
    DECLARED = "declared"


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """One place in the plugin that uses a name of the host.

    Attributes:
        file: path inside the plugin's distribution.
        line: starts at 1.
        target: ``module:name`` in the host.
    """

    file: str
    line: int
    kind: UseKind
    target: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A use that one version of the host does not support.

    Attributes:
        name: the name that the plugin writes.
        reason: the difference, such as ``takes no argument 'scale'``.
        is_definite: True if the finding stands without a version of the host that the plugin is
            known to work with.
    """

    file: str
    line: int
    column: int
    kind: UseKind
    name: str
    reason: str
    is_definite: bool = True

    @property
    def key(self) -> tuple[str, int, int, UseKind, str, str]:
        """Identity of the finding among versions of the host."""
        # An override can differ in several ways; a known difference must not hide another one.
        is_signature = self.kind in (UseKind.OVERRIDE, UseKind.PATCH)
        reason = self.reason.partition(";")[0] if is_signature else ""
        return self.file, self.line, self.column, self.kind, self.name, reason


@dataclass(slots=True)
class Reading:
    """The result of reading a plugin against one version of its host.

    Attributes:
        originals: signature of the host's method that an override or a patch replaces, by file,
            line and name in the plugin.
    """

    uses: set[Use] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    originals: dict[tuple[str, int, str], str] = field(default_factory=dict)
