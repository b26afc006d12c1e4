"""Presence of a GPU of Intel that torch can use, or the reason of its absence.

No step initialises torch.xpu or loads Level Zero in this process, see ``level_zero_inquiry``; the
driver is asked in another one, and only where the system shows a device file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from interposer import Verdict
from interposer_xpu._hardware import level_zero
from interposer_xpu._hardware.architectures import architecture_of
from interposer_xpu._hardware.level_zero import Answer
from interposer_xpu._hardware.system import System
from interposer_xpu._hardware.torch_build import TorchBuild
from interposer_xpu._hardware.visibility import explained, shown

# A probe has to return; the process that examines plugins stops it after five seconds.
_LIMIT_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Presence:
    """The facts that decide: files of the system, the build of torch, the environment.

    Attributes:
        limit_seconds: how long the driver may take to answer.
    """

    system: System
    build: TorchBuild
    variables: Mapping[str, str]
    limit_seconds: float = _LIMIT_SECONDS

    def judge(self) -> Verdict:
        """Say whether there is a GPU to use, cheapest questions first.

        Raises: DriverLostError: there may be one, but its driver crashes or hangs.
        """
        if sys.platform != "linux":
            return Verdict.refuse(
                f"finds GPUs on Linux, and in Windows inside WSL; this is {sys.platform}"
            )
        verdict = self.system.judge()
        if verdict:
            verdict = self.build.judge(self._seen())
        if not verdict:
            return verdict
        try:
            answer = level_zero.ask(limit_seconds=self.limit_seconds)
        except level_zero.DriverLostError:
            raise  # not to be taken for a machine that has no GPU
        except level_zero.DriverError as failure:
            return Verdict.refuse(f"{self._seen()}, but {failure}")
        return self._by_answer(answer)

    def _seen(self) -> str:
        nodes = ", ".join(self.system.nodes)
        if self.system.wsl:
            return f"there may be a GPU of Intel behind {nodes}"
        displays = "; ".join(map(str, self.system.displays))
        where = f" at {displays}" if displays else ""
        return f"there is a GPU of Intel ({nodes}){where}"

    def _by_answer(self, answer: Answer) -> Verdict:
        told = explained(self.variables)
        if not answer.devices:
            why = f": {told} hides every GPU, or names none" if told else ""
            return Verdict.refuse(f"Level Zero shows no GPU to this process{why}")
        found = shown(len(answer.devices), self.variables)
        if not found.ordinals:
            count = len(answer.devices)
            return Verdict.refuse(f"none of {count} GPUs is visible to SYCL: {found.note}")
        devices = [answer.devices[ordinal] for ordinal in found.ordinals]
        known = [device for device in devices if architecture_of(device.ip_version).computes]
        names = ", ".join(sorted({device.name for device in devices}))
        if not known:
            return Verdict.refuse(
                f"{names} is of an architecture before Xe-HPG (Arc A-series), for which torch has "
                "no kernels"
            )
        what = f"{len(devices)} visible of {len(answer.devices)}: {names}"
        parts = [what, f"driver {answer.driver}", *filter(None, (told, found.note))]
        return Verdict.accept("; ".join(parts))
