"""Digests of sampled bytes, which identify large weight files quickly."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLES = 32
_SAMPLE_BYTES = 4096


def sampled_digest(path: Path) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of 32 samples at equal distances in a file.

    A digest of all bytes would take as long as loading the weights.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            # The first sample covers the header, which differs between most files.
            file.seek(size * number // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
