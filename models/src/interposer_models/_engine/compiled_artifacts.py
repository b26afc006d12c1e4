"""Store of code that torch.compile generated in earlier processes on this host."""

from __future__ import annotations

import base64
import binascii
import json
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
    """Kernels and graphs of torch's compiler for one model, device and set of kernel choices.

    torch validates the inputs of each artifact before use, so that a stale artifact only costs
    time. Artifacts contain code: write access to the store allows running code, as with torch's own
    cache.
    """

    def __init__(self, store: Store, key: Mapping[str, Any]) -> None:
        self._store = store
        self._key = dict(key)
        self._parts = 0
        self._stored_names: set[str] = set()

    def load(self) -> int:
        """Load the stored artifacts into torch's cache, and return the number of stored parts."""
        try:
            while (encoded := self._store.read(_KIND, self._part())) is not None:
                code = base64.b64decode(str(encoded), validate=True)
                self._stored_names |= _names(torch.compiler.load_cache_artifacts(code))
                self._parts += 1
        except (StorageError, binascii.Error) as error:
            _log.warning("%s; the model is compiled anew", error)
        return self._parts

    def save(self) -> None:
        """Store the artifacts that this process compiled since the last call, as another part.

        torch reads only the last artifacts of a file that was saved in several turns, so each call
        writes a separate part.
        """
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None:  # the backend generates nothing that can be stored
            return
        code, info = artifacts
        # Artifacts of an earlier part are in the result again, so store only if there are new ones.
        new_names = _names(info) - self._stored_names
        if not new_names:
            return
        try:
            self._store.write(_KIND, self._part(), base64.b64encode(code).decode("ascii"))
        except StorageError as error:
            _log.warning("%s; later processes compile again", error)
            return
        self._stored_names |= new_names
        self._parts += 1

    def _part(self) -> dict[str, Any]:
        return {**self._key, "part": self._parts}


def _names(info: Any) -> set[str]:
    """Return the names of artifacts; each name is a digest of all inputs of the artifact."""
    kinds = ("inductor_artifacts", "autotune_artifacts", "aot_autograd_artifacts")
    return {name for kind in kinds for name in getattr(info, kind, ())}


def artifacts_key(resolver: Resolver, backend: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the store key of compiled code: versions, device, backend, model and kernel choices.

    Args:
        model: Sizes and options of the model.
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
        # Configurations of models may hold infinity, which a checksum of values refuses.
        "model": checksum(json.dumps(model, sort_keys=True)),
        "choices": checksum(choices),
    }
