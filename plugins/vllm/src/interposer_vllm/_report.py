"""The report of a worker: layers on kernels of interposer, and the reasons for all others."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interposer import explain
from interposer.errors import StorageError
from interposer.tooling import write_text
from interposer_vllm._patching import VERDICTS

if TYPE_CHECKING:
    from interposer_vllm._session import Session

__all__ = ["Report"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class Report:
    """Report of one worker: applied patches, layers, and the explanation of every choice.

    Attributes:
        process: id of the worker's process.
        seams: the reason why a patch was refused, by name of the patch; empty for applied patches.
        taken: prefixes of the layers that run on a kernel of interposer.
        kept: the reason why a layer keeps running on vLLM's kernels, by prefix.
        explanation: the output of ``interposer explain --json``.
        notes: classes that another plugin has extended although a patch was applied, by name of
            the patch.
    """

    process: int
    seams: Mapping[str, str]
    taken: Sequence[str]
    kept: Mapping[str, str]
    explanation: Mapping[str, Any]
    version: int = VERSION
    notes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> Report:
        """Build the report of a session in its present state."""
        seams = {name: "" if verdict else verdict.reason for name, verdict in VERDICTS.items()}
        notes = {name: v.reason for name, v in VERDICTS.items() if v and v.reason}
        explanation = explain(session).to_dict()
        # A process may build several models, with layers of equal names.
        adopted_prefixes = list(dict.fromkeys(session.taken))
        return cls(
            os.getpid(), seams, adopted_prefixes, dict(session.kept), explanation, notes=notes
        )

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read the report that a worker wrote.

        Raises: StorageError: the file cannot be read, or is no report of this version.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StorageError(path, f"cannot be read: {error}") from error
        if not isinstance(fields, dict) or fields.get("version") != VERSION:
            raise StorageError(path, f"holds no report of a worker of version {VERSION}")
        return cls(**fields)

    def write(self) -> Path:
        """Write the report as JSON to this process's file, and return the path.

        Raises: StorageError: the file cannot be written.
        """
        path = _folder() / "worker.json"
        write_text(path, self.to_json())
        return path

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self), indent=2)

    @property
    def reasons(self) -> dict[str, list[str]]:
        """The prefixes of the layers that stay vLLM's own, by reason."""
        places: dict[str, list[str]] = {}
        for place, reason in self.kept.items():
            places.setdefault(reason, []).append(place)
        return places

    def _applied_note(self, patch: str) -> str:
        return f"applied {self.notes.get(patch, '')}".rstrip()

    def __str__(self) -> str:
        lines = [f"worker {self.process}, {self.explanation['device']['name']}", "", "patches:"]
        lines += [
            f"  {name}: {reason or self._applied_note(name)}" for name, reason in self.seams.items()
        ]
        lines += ["", f"layers on kernels of interposer: {len(self.taken)}"]
        lines.append(f"layers that stay vLLM's own: {len(self.kept)}")
        for reason, places in self.reasons.items():
            lines.append(f"  {', '.join(places[:3])}{_more(places[3:])}: {reason}")
        for choice in self.explanation["choices"]:
            places = choice["places"]
            lines += ["", f"{choice['kind']} {choice['name']} {choice['dtype'] or ''}".rstrip()]
            lines.append(f"  at {', '.join(places[:3])}{_more(places[3:])}")
            lines.append(f"  {choice['chosen']} ({choice['provider']}): {choice['why']}")
            lines += [f"  - {r['candidate']}: {r['reason']}" for r in choice["refused"]]
        return "\n".join(lines)


def _more(places: list[str]) -> str:
    return f" and {len(places)} more" if places else ""


@cache
def _folder() -> Path:
    """Create a private folder for this process, since several users may share the machine."""
    return Path(tempfile.mkdtemp(prefix="interposer-vllm-"))
