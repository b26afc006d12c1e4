"""What was chosen where, and why everything else was not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from interposer.choice import Choice
from interposer.resolver import Resolver

__all__ = ["Explainable", "Explanation", "explain"]


class Explainable(Protocol):
    """Whatever was built through a resolver and still holds it."""

    @property
    def resolver(self) -> Resolver:
        """The resolver that made the choices."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One distinct choice with the places in the model that share it."""

    choice: Choice
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """All choices made for one model; prints as text, converts to plain data and to JSON."""

    device: str
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and dictionaries, the same facts as the text."""
        return {
            "device": self.device,
            "choices": [
                {
                    "kind": row.choice.request.kind,
                    "name": row.choice.request.name,
                    "dtype": row.choice.request.dtype,
                    "dims": dict(row.choice.request.dims),
                    "chosen": row.choice.chosen.name,
                    "provider": row.choice.chosen.provider,
                    "version": row.choice.chosen.version,
                    "why": row.choice.why,
                    "places": list(row.prefixes),
                    "refused": [
                        {"candidate": r.candidate, "provider": r.provider, "reason": r.reason}
                        for r in row.choice.refusals
                    ],
                }
                for row in self.rows
            ],
        }

    def to_json(self) -> str:
        """Return ``to_dict()`` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        lines = [f"device: {self.device}"]
        for row in self.rows:
            choice = row.choice
            places = row.prefixes[0] or "(model)"
            if len(row.prefixes) > 1:
                places += f" and {len(row.prefixes) - 1} more"
            lines.append(f"\n{choice.request}, at {places}")
            lines.append(f"  -> {choice.chosen.name} ({choice.chosen.origin}): {choice.why}")
            lines += [f"     not {refusal}" for refusal in choice.refusals]
        return "\n".join(lines)


def explain(model: Explainable) -> Explanation:
    """Return every distinct choice that was made while ``model`` was built."""
    resolver = model.resolver
    device = f"{resolver.device.torch_device} ({resolver.device.name})"
    rows = (Row(choice, tuple(prefixes)) for choice, prefixes in resolver.choices.values())
    return Explanation(device, tuple(rows))
