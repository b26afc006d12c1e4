"""Checks the header of a packed file: types, bounds, and the exact form of a written header.

A checksum without a secret finds accidents only, no manipulated files. Before anything is mapped or
built, the header is therefore compared with the file: memories lie inside the file without overlap,
tensors lie inside their memories, and memories are used in the order in which a writer numbers
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

ALIGNMENT = 64
_MAX_LEVELS = 32  # of nested lists and dicts in the state of a layer
_MAX_DIMS = 16
_MAX_NUMBER = 1 << 62
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_PLAIN = (bool, int, float, str)
_DTYPES = {
    name: dtype
    for name, dtype in sorted(vars(torch).items())
    if isinstance(dtype, torch.dtype) and not dtype.is_complex and not name.startswith("q")
}


def dtype_of(name: object) -> torch.dtype:
    """Return the torch dtype with the given name.

    Raises: ValueError: no dtype has the name.
    """
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"{name!r:.80} is no dtype")
    return dtype


def is_number(value: object, minimum: int = 0) -> bool:
    """Say whether a value is an int (not a bool) from ``minimum`` to the largest address."""
    return type(value) is int and minimum <= value <= _MAX_NUMBER


def check_texts(name: str, value: Any) -> None:
    """Refuse a value that is not a dict of texts.

    Raises: ValueError: with the name of the field.
    """
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise ValueError(f"{name} holds {value!r:.80}, not texts by name")


def check_memories(memories: Any, digests: Any, num_bytes: int) -> None:
    """Refuse tensor storages that overlap or exceed ``num_bytes``, and malformed digests.

    Raises: ValueError: with the first fault.
    """
    if type(memories) is not list or type(digests) is not list or len(memories) != len(digests):
        raise ValueError("memories and digests are no lists of one length")
    for number, (memory, digest) in enumerate(zip(memories, digests, strict=True)):
        is_pair = type(memory) in (list, tuple) and len(memory) == 2
        if not is_pair or not all(map(is_number, memory)) or memory[0] % ALIGNMENT:
            raise ValueError(f"memory {number} lies at {memory!r:.80}, no aligned pair of numbers")
        if memory[0] + memory[1] > num_bytes:
            raise ValueError(f"memory {number} at {memory!r:.80} ends after {num_bytes} bytes")
        if type(digest) is not str or not _DIGEST.fullmatch(digest):
            raise ValueError(f"memory {number} has the digest {digest!r:.80}")
    end = 0
    # Overlapping memories would let a write to one tensor change another.
    for start, size in sorted(memories):
        if size and start < end:
            raise ValueError(f"memories overlap at byte {start}")
        end = max(end, start + size)


def check_states(states: Any, memories: list[tuple[int, int]]) -> None:
    """Refuse layer states that ``StateWriter`` would not write.

    Raises: ValueError: with the location of the first fault.
    """
    if type(states) is not dict:
        raise ValueError(f"states are {type(states).__name__}")
    checker = _StateChecker(memories)
    for number, layers in states.items():
        if not _NUMBER.fullmatch(number) or type(layers) is not list:
            raise ValueError(f"states hold {number!r:.80}: {type(layers).__name__}")
        checker.group(number, layers)
    if checker.num_used != len(memories):
        raise ValueError(f"{checker.num_used} of {len(memories)} memories are used")


class _StateChecker:
    """Checks layer states in the order in which ``StateWriter`` numbers tensor storages."""

    def __init__(self, memories: list[tuple[int, int]]) -> None:
        self._memories = memories
        self._group_memories: set[int] = set()
        self.num_used = 0

    def group(self, number: str, layers: list[Any]) -> None:
        self._group_memories.clear()
        for place, changes in enumerate(layers):
            self._changes(changes, f"group {number}, layer {place}", 0)

    def _changes(self, changes: Any, at: str, level: int) -> None:
        if type(changes) is not dict:
            self._refuse(at, "is no dict", changes)
        for name, data in changes.items():
            # Attributes such as ``__class__`` would change the layer itself.
            if not _NAME.fullmatch(name) or (name.startswith("__") and name.endswith("__")):
                self._refuse(at, "has an attribute of that name", name)
            self._data(data, f"{at}, {name}", level + 1)

    def _data(self, data: Any, at: str, level: int) -> None:
        if level > _MAX_LEVELS:
            self._refuse(at, f"has more than {_MAX_LEVELS} levels", "")
        if type(data) is not list or len(data) != 2 or type(data[0]) is not str:
            self._refuse(at, "is no kind with a value", data)
        kind, content = data[0], data[1]
        match kind:
            case "plain":
                if content is not None and type(content) not in _PLAIN:
                    self._refuse(at, "is no plain value", content)
            case "tensor" | "parameter":
                self._tensor(content, at)
            case "dtype":
                dtype_of(content)
            case "tuple" | "list":
                self._parts(content, at, level)
            case "dict":
                if type(content) is not dict:
                    self._refuse(at, "is no dict", content)
                for name, part in content.items():
                    self._data(part, f"{at}, {name:.80}", level + 1)
            case "built":
                self._path(content, at)
            case "partial":
                self._parts(content, at, level, 3)
                if [part[0] for part in content[1:]] != ["tuple", "dict"]:
                    self._refuse(at, "is no function with arguments", content)
            case "product":
                self._pair(content, at)
                if type(content[0]) is not str:
                    self._refuse(at, "has no name", content[0])
                self._parts(content[1], at, level)
            case "method":
                self._pair(content, at)
                if type(content[1]) is not str or not _NAME.fullmatch(content[1]):
                    self._refuse(at, "is no name of a method", content[1])
                self._data(content[0], at, level + 1)
            case "copy":
                self._pair(content, at)
                self._path(content[0], at)
                self._changes(content[1], at, level + 1)
            case _:
                self._refuse(at, "is of no known kind", kind)

    def _parts(self, parts: Any, at: str, level: int, num_parts: int | None = None) -> None:
        if type(parts) is not list or (num_parts is not None and len(parts) != num_parts):
            self._refuse(at, "is no list of its parts", parts)
        for part in parts:
            self._data(part, at, level + 1)

    def _pair(self, pair: Any, at: str) -> None:
        if type(pair) is not list or len(pair) != 2:
            self._refuse(at, "is no pair", pair)

    def _path(self, path: Any, at: str) -> None:
        if type(path) is not list or not path or type(path[0]) is not str:
            self._refuse(at, "is no path", path)
        if not all(type(step) is str or is_number(step) for step in path):
            self._refuse(at, "is no path", path)

    def _tensor(self, pair: Any, at: str) -> None:
        self._pair(pair, at)
        number, form = pair
        if not is_number(number) or type(form) is not list or len(form) != 4:
            self._refuse(at, "is no tensor", pair)
        # A writer numbers a memory when it first meets the memory in a group.
        if number == self.num_used and number < len(self._memories):
            self.num_used += 1
            self._group_memories.add(number)
        elif number not in self._group_memories:
            self._refuse(at, "uses a memory out of turn", number)
        check_view(form, self._memories[number][1], at)

    def _refuse(self, at: str, reason: str, value: object) -> NoReturn:
        raise ValueError(f"{at} {reason}: {value!r:.80}")


def check_view(form: list[Any], num_bytes: int, at: str) -> None:
    """Refuse a tensor description that exceeds its storage of ``num_bytes``.

    Args:
        form: dtype, shape, strides and offset of the tensor.
        at: location of the tensor, for the message.
    Raises: ValueError: with the reason.
    """
    name, shape, strides, offset = form
    itemsize = dtype_of(name).itemsize
    has_lists = type(shape) is list and type(strides) is list and len(shape) == len(strides)
    if (
        not has_lists
        or len(shape) > _MAX_DIMS
        or not all(map(is_number, [*shape, *strides, offset]))
    ):
        raise ValueError(f"{at} has the shape {shape!r:.80} and strides {strides!r:.80}")
    # An empty tensor needs an empty memory, as a writer stores it.
    if 0 in shape:
        if num_bytes:
            raise ValueError(f"{at} has the shape {shape!r:.80} in {num_bytes} bytes")
        return
    # Strides are not negative, so that the last element has the largest offset.
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if (last + 1) * itemsize > num_bytes:
        raise ValueError(f"{at}: a tensor {shape!r:.80} does not lie in {num_bytes} bytes")
    if any(n > 1 and not step for n, step in zip(shape, strides, strict=True)):
        raise ValueError(f"{at} repeats elements: shape {shape!r:.80}, strides {strides!r:.80}")


def check_findings(findings: Any) -> None:
    """Refuse findings of the weight check that are neither None nor a list of lines.

    Raises: ValueError: the value is another one.
    """
    if findings is None:
        return
    if type(findings) is not list or not all(type(line) is str for line in findings):
        raise ValueError(f"non_finite holds {findings!r:.80}, not lines")


def check_fields(value: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``value`` as a dict, which must have exactly the fields ``names``.

    Raises: ValueError: the value is not such a dict.
    """
    if type(value) is not dict or value.keys() != names.keys():
        fields = sorted(value) if type(value) is dict else value
        raise ValueError(f"it has the fields {fields!r:.80}")
    fields_by_name: dict[str, Any] = dict(value)
    return fields_by_name
