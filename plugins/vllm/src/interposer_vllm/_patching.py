"""Application of the patches to vLLM, once per process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from packaging.specifiers import SpecifierSet

from interposer import Verdict
from interposer.errors import described, foreign_errors, install_command
from interposer_vllm._patch import Patch

__all__ = ["DECLARED", "TESTED", "VERDICTS", "apply_patches"]

DECLARED = SpecifierSet(">=0.32,<0.33", prereleases=True)
"""Versions of vLLM that the patches support; in others an equal name may mean something else."""

TESTED = ("0.32.0",)

VERDICTS: dict[str, Verdict] = {}
"""The verdicts on the patches that this process has tried, by name."""

# A child of the logger "vllm", so that vLLM's handler and log level apply.
_log = logging.getLogger("vllm.interposer")


def apply_patches(
    patches: Iterable[Patch], version: str, verdicts: dict[str, Verdict] = VERDICTS
) -> None:
    """Apply all ``patches`` that were not tried before, and log each refusal once.

    No error is raised: a patch that fails is refused, and the engine runs without the patch.

    Args:
        version: version of vLLM.
        verdicts: verdicts on the patches tried before; the new verdicts are added.
    """
    for patch in patches:
        if patch.name in verdicts:
            continue
        verdict = verdicts[patch.name] = _apply(patch, version, verdicts)
        if not verdict:
            _log.warning(
                "interposer: patch %r of vLLM %s is refused: %s. %s.",
                patch.name,
                version,
                verdict.reason,
                f"{patch.scope} stay vLLM's own",
            )


def _apply(patch: Patch, version: str, verdicts: Mapping[str, Verdict]) -> Verdict:
    if version not in DECLARED:
        return Verdict.refuse(
            f"this version of interposer-vllm declares vLLM {DECLARED}. "
            f"Try: {install_command('interposer-vllm', '--upgrade')}"
        )
    for name in patch.needs:
        if not verdicts.get(name):
            return Verdict.refuse(f"it needs the patch {name!r}")
    try:
        return patch.check() and patch.apply()
    except foreign_errors() as error:
        return Verdict.refuse(described(error))
