"""Stages and steps: what is run on the accelerator, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stage", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """A program of ``benchmarks`` that runs in a process of its own.

    Attributes:
        name: of its results' files; no other step has it.
        arguments: beside ``--json FILE`` and ``--seconds N``, which every program takes.
        tiny: those of a rehearsal, in place of ``arguments``.
        limit_s: after which it is killed; it is told to cut itself a little earlier.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    tiny: tuple[str, ...] = ()
    limit_s: int = 60


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps that answer one question, under a letter and a name to ask for."""

    letter: str
    name: str
    subject: str
    steps: tuple[Step, ...]

    @property
    def limit_s(self) -> int:
        """Return the seconds that all steps together may take."""
        return sum(step.limit_s for step in self.steps)
