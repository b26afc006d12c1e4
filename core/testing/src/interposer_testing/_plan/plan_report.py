"""Report of ``interposer verify --plan``: the state and the fitting devices of each record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

PlanState = Literal["wrong", "unresolved", "fits nowhere", "sound"]
# From the worst to the best.
STATES: tuple[PlanState, ...] = ("wrong", "unresolved", "fits nowhere", "sound")
VERSION = 1
"""Version of the format that ``PlanReport.to_dict`` returns."""


@dataclass(frozen=True, slots=True)
class PlannedRecord:
    """The result for one record: faults, and the described devices that it fits.

    Attributes:
        kind: class of the record.
        subject: op, layer id, quantization method or file suffix of the record; may be empty.
        faults: descriptions of everything wrong with the record.
        unresolved: third-party package that is missing here; not a fault.
        fits: described devices on which the record accepts at least one request; also empty for
            records that are not bound to devices.
        refusals: (device, reason) for every other device.
        notes: required names that no described device has, which may be misspelt; not faults.
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
        """Worst state that applies: "wrong", "unresolved", "fits nowhere" or "sound"."""
        if self.faults:
            return "wrong"
        if self.unresolved:
            return "unresolved"
        return "fits nowhere" if self.refusals and not self.fits else "sound"

    @property
    def title(self) -> str:
        """Kind, name and subject of the record in one line."""
        subject = f" for {self.subject!r}" if self.subject and self.subject != self.name else ""
        return f"{self.kind} {self.name!r}{subject}"


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The results for all records of a distribution.

    Attributes:
        devices: names of all described devices, of all plugins.
    """

    distribution: str
    version: str
    devices: tuple[str, ...]
    records: tuple[PlannedRecord, ...]

    @property
    def sound(self) -> bool:
        """True if no record is wrong; records that fit no described device may fit others."""
        return not self.in_state("wrong")

    def in_state(self, state: PlanState) -> list[PlannedRecord]:
        """Return the records whose state is ``state``."""
        return [record for record in self.records if record.state == state]

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to lists and dictionaries, with the same facts as the text."""
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
        """Return the report as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n\n".join("\n".join(block) for block in self._blocks())

    def _blocks(self) -> Iterator[list[str]]:
        devices = ", ".join(self.devices) or "none is described"
        head = f"{self.distribution} {self.version}: planned, nothing was run"
        yield [head, f"devices: {devices}"]
        # Group records by the devices that they fit, the widest support first.
        fitting: dict[tuple[str, ...], list[str]] = {}
        for record in self.in_state("sound"):
            fitting.setdefault(record.fits, []).append(record.title)
        for fits, titles in sorted(fitting.items(), key=lambda item: -len(item[0])):
            fits_all = len(fits) == len(self.devices)
            names = "every device" if fits_all else ", ".join(fits)
            head = f"fits {names}:" if fits else "correct, and not bound to a device:"
            yield [head, *(f"  {title}" for title in titles)]
        notes = [
            f"  {record.title}: {note}"
            for record in self.in_state("sound")
            for note in record.notes
        ]
        if notes:
            yield ["please check:", *notes]
        for record in self.in_state("fits nowhere"):
            # Most devices refuse for the same reason, so list devices by reason.
            reasons: dict[str, list[str]] = {}
            for device, reason in record.refusals:
                reasons.setdefault(reason, []).append(device)
            lines = (f"  {', '.join(devices)}: {reason}" for reason, devices in reasons.items())
            note_lines = (f"  {note}" for note in record.notes)
            yield [f"{record.title} fits no described device:", *note_lines, *lines]
        for record in self.in_state("unresolved"):
            yield [f"{record.title} cannot be checked here: {record.unresolved}"]
        for record in self.in_state("wrong"):
            yield [f"WRONG {record.title}", *(f"  {fault}" for fault in record.faults)]
        counts = ((len(self.in_state(state)), state) for state in reversed(STATES))
        yield [", ".join(f"{count} {state}" for count, state in counts if count) or "no records"]
