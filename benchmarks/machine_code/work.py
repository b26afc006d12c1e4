"""The work that a loop does: multiply-adds, or bytes of memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from machine_code.listing import Loop

__all__ = ["multiply_adds", "vector_bytes"]

# Multiply-adds of one instruction over 128 bits; wider registers do as much more.
_PRODUCTS = {
    # ARM
    r"f?ml[as]|fn?m[as]d": 4,
    r"[su]dot|usdot|sudot": 16,
    r"[su]mmla|usmmla": 32,
    r"bfdot": 8,
    r"bfmmla": 16,
    # s390x
    r"vfm[as]sb|vmlf": 4,
    # x86
    r"vfn?m(?:add|sub)\d+ps|vpmulld": 4,
    r"vdpbf16ps|vpmaddwd": 8,
    r"vpdp[bw]us?d|vpdpbusd|vpmaddubsw": 16,
}
_MOVED = re.compile(
    r"(?:ld[rp1-4]|ldur|ld1r|vl|vmov(?:[au]p[sd]|dq[au](?:\d+)?)|vpmov[sz]x\w+|vcvtph2ps|vbroadcastss)$"
)
_STORED = re.compile(
    r"(?:st[rp1-4]|stur|vst|vmov(?:[au]p[sd]|dq[au](?:\d+)?)|vpmov[us]*[dqw][bw]|vcvtps2ph)$"
)
_TILES = {"tdpbf16ps": 16 * 16 * 32, "tdpbusd": 16 * 16 * 64, "tdpbsud": 16 * 16 * 64,
          "tdpbssd": 16 * 16 * 64, "tdpbuud": 16 * 16 * 64}  # fmt: skip


def _mnemonic(text: str) -> str:
    parts = text.split()
    return parts[1] if parts[0] == "{vex}" else parts[0]


def _width(text: str) -> int:
    """Return the bytes of the widest vector register of an instruction, 0 without one."""
    if re.search(r"%zmm", text):
        return 64
    # Registers of SVE are as long as they are compiled for; see `objects.SVE_BITS`.
    if re.search(r"%ymm|\bz\d+\b", text):
        return 32
    if re.search(r"%xmm|%v\d|\bq\d+\b|\.(?:16b|8h|4s|2d)\b", text):
        return 16
    return 8 if re.search(r"\bd\d+\b|\.(?:8b|4h|2s)\b", text) else 0


def multiply_adds(loop: Loop) -> int:
    """Return how many pairs of numbers a round multiplies and adds."""
    total = 0
    for text in loop.instructions:
        name = _mnemonic(text)
        total += _TILES.get(name, 0)
        for pattern, count in _PRODUCTS.items():
            if re.fullmatch(pattern, name):
                total += count * _width(text) // 16
    return total


def vector_bytes(loop: Loop) -> int:
    """Return how many bytes a round stores from vector registers, or loads where it stores none.

    What lies on the stack does not count.
    """
    moved = list(_moved(loop))
    stored = sum(count for is_store, count in moved if is_store)
    return stored or sum(count for is_store, count in moved if not is_store)


def _moved(loop: Loop) -> Iterator[tuple[bool, int]]:
    """Yield whether an instruction stores, and how many bytes it moves."""
    for text in loop.instructions:
        name = _mnemonic(text)
        places = re.findall(r"\[(\w+)|\(?(%r\w+)[,)]", text)
        bases = {a or b for a, b in places}
        if not bases or bases & loop.on_stack or "(%rip)" in text:
            continue
        is_store = bool(_STORED.match(name))
        if name.startswith("v") and "mm" in text:
            # x86 writes to what it names last.
            is_store = text.endswith(")")
        if is_store or _MOVED.match(name):
            # A pair of registers, or a list of them, is one instruction.
            named = re.search(r"\{(.*?)\}", text)
            count = 2 if name in {"ldp", "stp"} else len(named.group(1).split(",")) if named else 1
            yield is_store, count * _width(text)
