"""The check for NaN and infinite weights while weights are loaded or updated."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from interposer import Planned, Platform
from interposer.errors import CheckpointError
from interposer_engine._checkpoint.files import file_of
from interposer_engine._checkpoint.tensors import plain_copy

_POLICY = "Config(weight_check='warn')"
_log = logging.getLogger("interposer")


class WeightCheck:
    """A check that every weight is finite, under the policy ``weight_check``.

    Tensors that no layer uses are not checked: masks hold infinity on purpose.

    Attributes:
        policy: ``"refuse"``, ``"warn"`` or ``"off"``.
        findings: logged messages, one line for each tensor.
    """

    def __init__(self, policy: str, platform: Platform) -> None:
        self.policy = policy
        self.findings: list[str] = []
        self._platform = platform

    @classmethod
    def of(cls, planned: Planned) -> WeightCheck:
        """Return the check for the policy of a plan, on the plan's platform."""
        return cls(planned.resolver.config.weight_check, planned.placement.platform)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Copy a tensor, and return whether all numbers are finite; True if the check is off."""
        if self.policy == "off":
            return plain_copy(target, source)
        return self._platform.copy_finite(target, source)

    def check(self, name: str, values: torch.Tensor, path: object) -> None:
        """Refuse or log a tensor that contains NaN or infinity.

        Raises: CheckpointError: a number is not finite, and the policy is ``"refuse"``.
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
        """Return the error for a tensor with NaN or infinity; under ``"warn"``, log it instead.

        Args:
            name: the tensor's name in the checkpoint.
            values: the values that the model will use, on the device of the model.
            path: path of the checkpoint.
            stored: the values in the checkpoint, if known.
            is_finite: the result of ``copy`` for the tensor; None if ``copy`` was not called.
        Returns: None if all values are finite or the policy is not ``"refuse"``.
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
        """Check all parameters of a model that another library has loaded; see ``check``."""
        for name, parameter in model.named_parameters():
            self.check(name, parameter.data, path)

    def add(self, findings: Iterable[str]) -> None:
        """Log findings of non-finite weights that have not been logged yet."""
        for finding in findings:
            if finding not in self.findings:
                self.findings.append(finding)
                _log.warning("%s", finding)


def _refusal(
    name: str, values: torch.Tensor, file: object, stored: torch.Tensor | None
) -> CheckpointError:
    """Return the error for a tensor with NaN or infinite values."""
    source = values if stored is None else stored
    indices = _non_finite_indices(source)
    if len(indices):
        first = indices[0].tolist()
        value = source[tuple(first)].item()
        mend = (
            "copy the file again, or save the model again"
            if isinstance(file, Path)
            else "look for the step of the training that made them"
        )
        return CheckpointError(
            file,
            f"holds the tensor {name!r}, {len(indices)} of whose {source.numel()} numbers are NaN "
            f"or infinite, so no answer of the model would mean anything (the first is "
            f"{value} at {first})",
            f"{mend}; {_POLICY} loads it all the same",
        )
    dtype = str(values.dtype).removeprefix("torch.")
    return CheckpointError(
        file,
        f"holds the tensor {name!r}, {len(_non_finite_indices(values))} of whose {source.numel()} "
        f"numbers are too large for {dtype}: they would become infinite",
        f"load it with dtype='bfloat16' or 'float32'; {_POLICY} loads it all the same",
    )


def _non_finite_indices(tensor: torch.Tensor) -> torch.Tensor:
    """Return the indices ``[N, dimensions]`` of the NaN and infinite values of a tensor."""
    # Not every dtype, such as 8-bit floats, has isfinite.
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return (~wide.isfinite()).nonzero()
