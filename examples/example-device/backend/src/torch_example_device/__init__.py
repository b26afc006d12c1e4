"""The device ``example`` of torch, in host memory that the host cannot access."""

from __future__ import annotations

import torch

__all__ = ["register"]


def register() -> None:
    """Name torch's private backend ``example``, and add the module ``torch.example``.

    torch calls this function when it is imported, through the entry point ``torch.backends``.

    Raises: ImportError: the extension does not fit the installed torch.
    """
    from torch.utils.backend_registration import (
        generate_methods_for_privateuse1_backend,
        rename_privateuse1_backend,
    )

    from torch_example_device import device

    rename_privateuse1_backend(device.NAME)
    torch._register_device_module(device.NAME, device)
    generate_methods_for_privateuse1_backend(for_storage=True)
