"""Taking of seams, once per process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from packaging.specifiers import SpecifierSet

from interposer import Verdict
from interposer.errors import described, foreign_errors
from interposer_vllm._seam import Seam

__all__ = ["DECLARED", "TAKEN", "TESTED", "take_seams"]

DECLARED = SpecifierSet(">=0.32,<0.33", prereleases=True)
"""Versions of vLLM that seams were written for; in others a name may mean another thing."""

TESTED = ("0.32.0",)

TAKEN: dict[str, Verdict] = {}
"""The seams of this process that were tried, by name."""

# Below vLLM's own logger, so that its handler and level hold.
_log = logging.getLogger("vllm.interposer")


def take_seams(seams: Iterable[Seam], version: str, taken: dict[str, Verdict] = TAKEN) -> None:
    """Take those of ``seams`` that were not tried before, and log once what is refused.

    Nothing is raised: whatever fails here costs the seam, never the engine.

    Args:
        version: of vLLM.
        taken: what was tried before, to which the verdicts are added.
    """
    for seam in seams:
        if seam.name in taken:
            continue
        verdict = taken[seam.name] = _taken(seam, version, taken)
        if not verdict:
            _log.warning(
                "interposer: seam %r of vLLM %s is refused: %s. %s.",
                seam.name,
                version,
                verdict.reason,
                f"{seam.stays} stay vLLM's own",
            )


def _taken(seam: Seam, version: str, taken: Mapping[str, Verdict]) -> Verdict:
    if version not in DECLARED:
        return Verdict.refuse(
            f"this version of interposer-vllm declares vLLM {DECLARED}. Try: pip install -U "
            "interposer-vllm"
        )
    for name in seam.needs:
        if not taken.get(name):
            return Verdict.refuse(f"it needs the seam {name!r}")
    try:
        return seam.check() and seam.take()
    except foreign_errors() as error:
        return Verdict.refuse(described(error))
