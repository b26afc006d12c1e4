"""One quantization scheme."""

from __future__ import annotations

from interposer import SchemeEntry, hookimpl

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records() -> list[SchemeEntry]:
    """Return the scheme."""
    return [SchemeEntry(method="acme", name="acme_steps", target="acme_scheme.scheme:Steps")]
