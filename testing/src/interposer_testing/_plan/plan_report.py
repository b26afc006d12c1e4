"""The report of a plan: the state of every record, and the described devices that it fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

PlanState = Literal["wrong", "unresolved", "fits nowhere", "sound"]
STATES: tuple[PlanState, ...] = ("wrong", "unresolved", "fits nowhere", "sound")
VERSION = 1
"""Of what ``PlanReport.to_dict`` returns."""


@dataclass(frozen=True, slots=True)
class PlannedRecord:
    """One record.

    Attributes:
        kind: class of the record.
        subject: op, layer id, quantization method or suffix that it is for; empty for others.
        faults: what is wrong with it.
        unresolved: why what it names cannot be imported here, though that is no fault.
        fits: described devices that it accepts something on; empty also where no device is asked.
        refusals: why each other device was refused, by name of the device.
        notes: what may be for hardware that nobody describes, or misspelt; no fault.
    """

    kind: str
    subject: str
    name: str
    platform: str = ""
    faults: tuple[str, ...] = ()
    unresolved: str = ""
    fits: tuple[str, ...] = ()
    refusals: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> PlanState:
        """The worst that is to be said of it."""
        if self.faults:
            return "wrong"
        if self.unresolved:
            return "unresolved"
        return "fits nowhere" if self.refusals and not self.fits else "sound"

    @property
    def title(self) -> str:
        """The record in a few words."""
        what = f" for {self.subject!r}" if self.subject and self.subject != self.name else ""
        return f"{self.kind} {self.name!r}{what}"


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All records of a distribution.

    Attributes:
        devices: described devices that were asked, of all plugins.
    """

    distribution: str
    version: str
    devices: tuple[str, ...]
    records: tuple[PlannedRecord, ...]

    @property
    def sound(self) -> bool:
        """True if nothing is wrong; a record that fits no described device may be for others."""
        return not self.in_state("wrong")

    def in_state(self, state: PlanState) -> list[PlannedRecord]:
        """Return the records of which this is the worst to be said."""
        return [record for record in self.records if record.state == state]

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and dictionaries, the same facts as the text."""
        records = [
            {**asdict(record), "state": record.state, "refusals": dict(record.refusals)}
            for record in self.records
        ]
        facts = {"distribution": self.distribution, "distribution_version": self.version}
        return {
            "version": VERSION,
            **facts,
            "sound": self.sound,
            "devices": list(self.devices),
            "records": records,
        }

    def to_json(self) -> str:
        """Return ``to_dict()`` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n\n".join("\n".join(block) for block in self._blocks())

    def _blocks(self) -> Iterator[list[str]]:
        asked = ", ".join(self.devices) or "none is described"
        yield [f"{self.distribution} {self.version}: planned, nothing was run", f"devices: {asked}"]
        fitting: dict[tuple[str, ...], list[str]] = {}
        for record in self.in_state("sound"):
            fitting.setdefault(record.fits, []).append(record.title)
        for fits, titles in sorted(fitting.items(), key=lambda item: -len(item[0])):
            everywhere = len(fits) == len(self.devices)
            where = "every device" if everywhere else ", ".join(fits)
            head = f"fits {where}:" if fits else "resolves, and is bound to no device:"
            yield [head, *(f"  {title}" for title in titles)]
        noted = [record for record in self.in_state("sound") if record.notes]
        if noted:
            told = [f"  {record.title}: {note}" for record in noted for note in record.notes]
            yield ["to look at:", *told]
        for record in self.in_state("fits nowhere"):
            reasons: dict[str, list[str]] = {}
            for device, reason in record.refusals:
                reasons.setdefault(reason, []).append(device)
            lines = (f"  {', '.join(devices)}: {reason}" for reason, devices in reasons.items())
            notes = (f"  {note}" for note in record.notes)
            yield [f"{record.title} fits no described device:", *notes, *lines]
        for record in self.in_state("unresolved"):
            yield [f"{record.title} cannot be looked at here: {record.unresolved}"]
        for record in self.in_state("wrong"):
            yield [f"WRONG {record.title}", *(f"  {fault}" for fault in record.faults)]
        counts = ((len(self.in_state(state)), state) for state in reversed(STATES))
        yield [", ".join(f"{count} {state}" for count, state in counts if count) or "no records"]
