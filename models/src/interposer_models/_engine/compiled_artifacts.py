"""The code that torch.compile made in former processes, in the store of this host."""

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
    """Kernels and graphs of torch's compiler for one model, device and set of choices.

    torch checks each of them by what it was made from before it is used, so that what does not fit
    costs time and nothing else. They hold code: whoever can write to the store can run code, as in
    torch's own cache.
    """

    def __init__(self, store: Store, key: Mapping[str, Any]) -> None:
        self._store = store
        self._key = dict(key)
        self._parts = 0
        self._known: set[str] = set()

    def load(self) -> int:
        """Hand what is kept to torch's own cache, and return of how many parts it was."""
        try:
            while (kept := self._store.read(_KIND, self._part())) is not None:
                code = base64.b64decode(str(kept), validate=True)
                self._known |= _names(torch.compiler.load_cache_artifacts(code))
                self._parts += 1
        except (StorageError, binascii.Error) as error:
            _log.warning("%s; the model is compiled anew", error)
        return self._parts

    def save(self) -> None:
        """Keep what torch's compiler made in this process and is not kept yet, as another part.

        Of everything that is saved in several turns, torch reads what came last alone, so that each
        turn is a part of its own.
        """
        made = torch.compiler.save_cache_artifacts()
        if made is None:  # by a backend that keeps nothing
            return
        code, info = made
        new = _names(info) - self._known
        if not new:
            return
        try:
            self._store.write(_KIND, self._part(), base64.b64encode(code).decode("ascii"))
        except StorageError as error:
            _log.warning("%s; later processes compile again", error)
            return
        self._known |= new
        self._parts += 1

    def _part(self) -> dict[str, Any]:
        return {**self._key, "part": self._parts}


def _names(info: Any) -> set[str]:
    """Return the names of what torch read or made, each a digest of all that it depends on."""
    kinds = ("inductor_artifacts", "autotune_artifacts", "aot_autograd_artifacts")
    return {name for kind in kinds for name in getattr(info, kind, ())}


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
        # Configurations of models may hold infinity, which a checksum of values refuses.
        "model": checksum(json.dumps(model, sort_keys=True)),
        "choices": checksum(choices),
    }
