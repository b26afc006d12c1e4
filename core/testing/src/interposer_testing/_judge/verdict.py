"""The verdict on a solution, and its report as JSON and text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

SCHEMA = 1
"""Version of the report's schema, which grows when a field changes its meaning or is removed."""

State = Literal["accepted", "refused", "impossible"]
Stage = Literal["loading", "correctness", "timing", "rerun"]
Tier = Literal["gate", "triage", "advisory"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason to reject a solution, such as a wrong value.

    Attributes:
        stage: stage that found it.
        workload: label of the inputs; empty if it does not depend on inputs.
        check: violated rule, such as "value", "alias", "process" or "floor".
        where: output, argument or call.
        reason: description with the wrong value.
        error, bound: largest error and its bound, if values were compared.
    """

    stage: Stage
    workload: str
    check: str
    where: str
    reason: str
    error: float | None = None
    bound: float | None = None

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.stage, self.workload, self.where)))
        return f"{place}: {self.reason} ({self.check})"


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured time of one call on one workload, in seconds, with roofline and floor.

    Attributes:
        median, low, high: median and quartiles of the batches.
        num_batches, calls_per_batch: number of measurements, and of calls in each.
        roofline: time at the rates of memory and arithmetic that torch reaches on this machine.
        floor: time that no kernel can beat on this machine.
        limit: limit that determines the roofline: "memory" or "arithmetic".
    """

    workload: str
    median: float
    low: float
    high: float
    num_batches: int
    calls_per_batch: int
    roofline: float
    floor: float
    limit: str

    @property
    def share_of_roofline(self) -> float:
        """Fraction of the roofline that the median call reaches: roofline time over median time."""
        return self.roofline / self.median


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a solution: state, findings, errors and times.

    Attributes:
        state: "accepted"; "refused" if a result is wrong or a rule is broken; "impossible" if the
            results are right but the time is shorter than the machine allows.
        tier: what the verdict can be used for: "gate" if every stage ran with secret inputs,
            "triage" after a quick run, "advisory" if the seed was known beforehand.
        task, solution: name, origin and SHA-256 of the task and of the solution.
        seed: seed of all inputs.
        findings: reasons against the solution.
        largest_error: largest error of a correct result, as a fraction of its bound.
        gradient_error: largest error of a correct gradient, as a fraction of its bound; None if the
            backward pass was not judged.
        caches: "cold" if arguments lay in memory when a timed call began, "warm" if in the caches.
        timings: times by workload.
        num_calls, num_calls_afterwards: calls in judging, and in the rerun after it.
        versions: versions of the judge, Python and torch.
        device: name of the device.
        seconds: duration.
        output: end of the output of the kernel's process.
        notes: limits of this verdict, such as a machine that cannot time the kernel.
    """

    state: State
    tier: Tier
    task: Mapping[str, str]
    solution: Mapping[str, str]
    seed: int
    findings: tuple[Finding, ...]
    largest_error: float
    timings: tuple[Timing, ...]
    num_calls: int
    num_calls_afterwards: int
    versions: Mapping[str, str]
    device: str
    date: str
    seconds: float
    output: str = ""
    notes: tuple[str, ...] = ()
    gradient_error: float | None = None
    caches: str = "cold"

    def to_json(self) -> str:
        """Convert the verdict to JSON, with the version of the schema."""
        content: dict[str, Any] = {"schema": SCHEMA, **asdict(self)}
        for timing, facts in zip(self.timings, content["timings"], strict=True):
            facts["share_of_roofline"] = timing.share_of_roofline
        return json.dumps(content, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        """Return the verdict as text for a terminal."""
        lines = [f"{self.solution['name']} for {self.task['name']}: {self.state} ({self.tier})"]
        lines += [f"  {finding}" for finding in self.findings]
        if self.state != "refused":
            lines.append(f"  largest error: {self.largest_error:.2f} of the bound")
            if self.gradient_error is not None:
                lines.append(
                    f"  largest error of gradients: {self.gradient_error:.2f} of the bound"
                )
        for timing in self.timings:
            spread = f"{_duration(timing.low)} to {_duration(timing.high)}"
            lines.append(
                f"  {timing.workload}: {_duration(timing.median)} ({spread}), "
                f"{timing.share_of_roofline:.0%} of the roofline ({timing.limit})"
            )
        if self.timings and self.caches == "warm":
            lines.append("  the arguments of timed calls lay in the caches")
        lines.append(
            f"  {self.num_calls} calls, then {self.num_calls_afterwards} in a rerun; "
            f"seed {self.seed}; {self.seconds:.1f} s"
        )
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
