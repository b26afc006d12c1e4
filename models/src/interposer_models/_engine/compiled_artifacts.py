"""What torch.compile made in former processes, in the store of this host."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Mapping
from typing import Any

import torch

from interposer import Resolver
from interposer.errors import StorageError
from interposer.tooling import Store, checksum

_KIND = "compiled"
_log = logging.getLogger("interposer")


class CompiledArtifacts:
    """Kernels and graphs of torch's compiler for one model, device and set of choices.

    torch checks each of them by what it was made from before it is used, so that what does not fit
    costs time and nothing else. They hold code: whoever can write to the store can run code, as in
    torch's own cache.
    """

    def __init__(self, store: Store, key: Mapping[str, Any]) -> None:
        self._store = store
        self._key = dict(key)

    def load(self) -> bool:
        """Hand what is kept to torch's own cache, and say whether there was something."""
        try:
            kept = self._store.read(_KIND, self._key)
            if kept is None:
                return False
            info = torch.compiler.load_cache_artifacts(base64.b64decode(str(kept), validate=True))
        except (StorageError, binascii.Error) as error:
            _log.warning("%s; the model is compiled anew", error)
            return False
        return info is not None

    def save(self) -> None:
        """Keep all that torch's compiler made in this process."""
        made = torch.compiler.save_cache_artifacts()
        if made is None:  # by a backend that keeps nothing
            return
        try:
            self._store.write(_KIND, self._key, base64.b64encode(made[0]).decode("ascii"))
        except StorageError as error:
            _log.warning("%s; later processes compile again", error)


def artifacts_key(resolver: Resolver, backend: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what compiled code depends on: versions, device, backend, model and choices.

    Args:
        model: sizes and options.
    """
    device = resolver.device
    choices = sorted(
        [*map(str, choice.request.key), choice.chosen.qualified_name, choice.chosen.version]
        for choice, _ in resolver.choices.values()
    )
    return {
        "torch": torch.__version__,
        "platform": device.platform,
        "device": device.name,
        "capability": checksum(device.capability.to_json()),
        "backend": backend,
        "model": checksum(model),
        "choices": checksum(choices),
    }
