"""The search for weights that are NaN or infinite, while they load or are exchanged."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from interposer import Planned, Platform
from interposer.errors import CheckpointError
from interposer_models._checkpoint.checkpoint import file_of
from interposer_models._checkpoint.tensor_places import plain_copy

_POLICY = "Config(weight_check='warn')"
_log = logging.getLogger("interposer")


class WeightCheck:
    """A check that every weight is a finite number, as the policy ``weight_check`` wants it.

    A tensor that no layer uses is not checked: masks hold infinity on purpose.

    Attributes:
        policy: ``"refuse"``, ``"warn"`` or ``"off"``.
        findings: what was logged, a line for each tensor.
    """

    def __init__(self, policy: str, platform: Platform) -> None:
        self.policy = policy
        self.findings: list[str] = []
        self._platform = platform

    @classmethod
    def of(cls, planned: Planned) -> WeightCheck:
        """Return the check that the policy of a plan wants, on the plan's platform."""
        return cls(planned.resolver.config.weight_check, planned.placement.platform)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Copy a tensor, and say whether all numbers that were searched are finite."""
        if self.policy == "off":
            return plain_copy(target, source)
        return self._platform.copy_finite(target, source)

    def check(self, name: str, values: torch.Tensor, path: object) -> None:
        """Refuse or log the values of a tensor unless all of them are finite.

        Raises: CheckpointError: one is not finite, and the policy is ``"refuse"``.
        """
        error = self.refusal(name, values, path)
        if error is not None:
            raise error

    def refusal(
        self,
        name: str,
        values: torch.Tensor,
        path: object,
        stored: torch.Tensor | None = None,
        is_finite: bool | None = None,
    ) -> CheckpointError | None:
        """Return the error for the values of a tensor, or log it if the policy is ``"warn"``.

        Args:
            name: of the tensor in the checkpoint.
            values: as they will be computed with, on the device of the model.
            path: of the checkpoint.
            stored: as the checkpoint holds them, if known.
            is_finite: what ``copy`` said of them; None where it did not copy them.
        Returns: None if all values are finite or the policy is another than ``"refuse"``.
        """
        if self.policy == "off":
            return None
        if self._platform.all_finite(values) if is_finite is None else is_finite:
            return None
        error = _refusal(name, values, file_of(name, path), stored)
        if self.policy == "refuse":
            return error
        self.add([f"{error.path} {error.reason}"])
        return None

    def check_parameters(self, model: nn.Module, path: object) -> None:
        """Check all parameters of a model that another library loaded; see ``check``."""
        for name, parameter in model.named_parameters():
            self.check(name, parameter.data, path)

    def add(self, findings: Iterable[str]) -> None:
        """Log findings, of which none is known yet."""
        for finding in findings:
            if finding not in self.findings:
                self.findings.append(finding)
                _log.warning("%s", finding)


def _refusal(
    name: str, values: torch.Tensor, file: object, stored: torch.Tensor | None
) -> CheckpointError:
    """Return the error for values that are not all finite."""
    source = values if stored is None else stored
    places = _non_finite_places(source)
    if len(places):
        first = places[0].tolist()
        value = source[tuple(first)].item()
        mend = (
            "copy the file again, or save the model again"
            if isinstance(file, Path)
            else "look for the step of the training that made them"
        )
        return CheckpointError(
            file,
            f"holds the tensor {name!r}, {len(places)} of whose {source.numel()} numbers are NaN "
            f"or infinite, so that every answer of the model would mean nothing (the first is "
            f"{value} at {first})",
            f"{mend}; {_POLICY} loads it all the same",
        )
    dtype = str(values.dtype).removeprefix("torch.")
    return CheckpointError(
        file,
        f"holds the tensor {name!r}, {len(_non_finite_places(values))} of whose {source.numel()} "
        f"numbers are too large for {dtype}: they would become infinite",
        f"load it with dtype='bfloat16' or 'float32'; {_POLICY} loads it all the same",
    )


def _non_finite_places(tensor: torch.Tensor) -> torch.Tensor:
    """Return the indices ``[N, dimensions]`` of what is NaN or infinite."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return (~wide.isfinite()).nonzero()
