"""The module ``torch.example``.

torch looks up these names in the module of a backend. Everything else has a device-independent
form: ``torch.accelerator``, ``torch.Stream``, ``torch.Event`` and ``torch.Generator``.
"""

from __future__ import annotations

import atexit
import contextlib

import torch

from torch_example_device import _C

NAME = "example"


def is_available() -> bool:
    """Tell whether this process has a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Tell whether the device can be used; importing the extension is enough."""
    return True


def device_count() -> int:
    """Return the number of devices: the variable EXAMPLE_DEVICES, or 2."""
    return _C.device_count()


def current_device() -> int:
    """Return the index of this thread's device."""
    return _C.current_device()


def set_device(device: torch.device | str | int) -> None:
    """Select this thread's device."""
    _C.set_device(_index(device))


def device(device: torch.device | str | int) -> contextlib.AbstractContextManager[object]:
    """Return a context that selects a device; ``torch.load`` enters it."""
    return torch.accelerator.device_index(_index(device))


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Wait for all streams of a device, by default of the current one.

    Raises: RuntimeError: an operator on one of the streams has failed.
    """
    _C.synchronize(_index(device))


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _C.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices; ``torch.manual_seed`` calls this function."""
    for index in range(device_count()):
        _C.default_generator(index).manual_seed(seed)


def get_rng_state(device: torch.device | str | int = NAME) -> torch.Tensor:
    """Return the state of a device's generator."""
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: torch.device | str | int = NAME) -> None:
    """Set the state of a device's generator."""
    _C.default_generator(_index(device)).set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast can use."""
    return [torch.bfloat16, torch.float16]


def fallback_calls() -> dict[str, int]:
    """Return how often the CPU computed operators that the device lacks, by operator."""
    return _C.fallback_calls()


def clear_fallback_calls() -> None:
    """Forget the calls that ``fallback_calls`` returns."""
    _C.clear_fallback_calls()


def allow_fallback(allowed: bool) -> bool:
    """Allow or forbid the CPU fallback of all operators that the device lacks.

    Without the fallback, such an operator raises ``NotImplementedError``.

    Returns: whether the fallback was allowed before.
    """
    before = _C.fallback_allowed()
    _C.allow_fallback(allowed)
    return before


def _index(device: torch.device | str | int | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def _is_in_bad_fork() -> bool:
    return _C.in_bad_fork()


def _finish() -> None:
    # Tasks may use host tensors, which are freed when the interpreter ends.
    if not _is_in_bad_fork():
        for index in range(device_count()):
            _C.synchronize(index)


atexit.register(_finish)
