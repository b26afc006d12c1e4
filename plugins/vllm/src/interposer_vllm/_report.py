"""Reports of workers: what runs on kernels that were chosen here, and why the rest does not."""

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
from interposer_vllm._taking import TAKEN

if TYPE_CHECKING:
    from interposer_vllm._session import Session

__all__ = ["Report"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class Report:
    """One worker: its seams, its layers and the explanation of every choice.

    Attributes:
        process: id of the worker.
        seams: why a seam was refused, by name; empty where it was taken.
        taken: places whose weights are held in the form of a kernel that was chosen here.
        kept: why a layer stays vLLM's own, by place.
        explanation: as ``interposer explain --json`` prints it.
        notes: what another plugin holds of a seam that was taken, by name.
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
        """Return what was taken over in a session up to now, and why the rest was not."""
        seams = {name: "" if verdict else verdict.reason for name, verdict in TAKEN.items()}
        notes = {name: v.reason for name, v in TAKEN.items() if v and v.reason}
        explained = explain(session).to_dict()
        # A process may build several models, with layers of equal names.
        taken = list(dict.fromkeys(session.taken))
        return cls(os.getpid(), seams, taken, dict(session.kept), explained, notes=notes)

    @classmethod
    def read(cls, path: Path) -> Report:
        """Return the report that a worker wrote.

        Raises: StorageError: the file cannot be read, or holds none of this version.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StorageError(path, f"cannot be read: {error}") from error
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise StorageError(path, f"holds no report of a worker of version {VERSION}")
        return cls(**found)

    def write(self) -> Path:
        """Write it as JSON to this process's file, and return that.

        Raises: StorageError: it cannot be written.
        """
        path = _folder() / "worker.json"
        write_text(path, self.to_json())
        return path

    def to_json(self) -> str:
        """Return the same facts as JSON."""
        return json.dumps(asdict(self), indent=2)

    @property
    def reasons(self) -> dict[str, list[str]]:
        """The places that stay vLLM's own, by reason."""
        places: dict[str, list[str]] = {}
        for place, reason in self.kept.items():
            places.setdefault(reason, []).append(place)
        return places

    def _taken(self, seam: str) -> str:
        return f"taken {self.notes.get(seam, '')}".rstrip()

    def __str__(self) -> str:
        lines = [f"worker {self.process}, {self.explanation['device']['name']}", "", "seams:"]
        lines += [f"  {name}: {reason or self._taken(name)}" for name, reason in self.seams.items()]
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
    """Return a folder of this process alone: several workers, and users, share a machine."""
    return Path(tempfile.mkdtemp(prefix="interposer-vllm-"))
