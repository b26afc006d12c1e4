"""The check of a packed file's header: types, bounds, and that it is what a writer would write.

A checksum without a secret only finds accidents. What a header says is therefore compared with the
file before anything is mapped or built: memories lie inside of it and apart, tensors lie inside
of their memories, and the numbers of memories are used in the order in which a writer gives them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

ALIGNMENT = 64
_MOST_LEVELS = 32  # of lists and dicts in the state of a layer
_MOST_DIMS = 16
_MOST_NUMBER = 1 << 62
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_PLAIN = (bool, int, float, str)
_DTYPES = {
    name: each
    for name, each in sorted(vars(torch).items())
    if isinstance(each, torch.dtype) and not each.is_complex and not name.startswith("q")
}


def dtype_of(name: object) -> torch.dtype:
    """Return the dtype of that name.

    Raises: ValueError: there is none.
    """
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"{name!r:.80} is no dtype")
    return dtype


def is_number(value: object, least: int = 0) -> bool:
    """Return True for an int, and no bool, of a size that the system can address."""
    return type(value) is int and least <= value <= _MOST_NUMBER


def check_texts(name: str, value: Any) -> None:
    """Refuse all but a dict of texts.

    Raises: ValueError: with the name of the field.
    """
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise ValueError(f"{name} holds {value!r:.80}, not texts by name")


def check_memories(memories: Any, digests: Any, num_bytes: int) -> None:
    """Refuse memories that overlap, or do not lie in ``num_bytes``, and wrong digests.

    Raises: ValueError: with the first that is wrong.
    """
    if type(memories) is not list or type(digests) is not list or len(memories) != len(digests):
        raise ValueError("memories and digests are no lists of one length")
    for number, (memory, digest) in enumerate(zip(memories, digests, strict=True)):
        pair = type(memory) in (list, tuple) and len(memory) == 2
        if not pair or not all(map(is_number, memory)) or memory[0] % ALIGNMENT:
            raise ValueError(f"memory {number} lies at {memory!r:.80}, no aligned pair of numbers")
        if memory[0] + memory[1] > num_bytes:
            raise ValueError(f"memory {number} at {memory!r:.80} ends behind {num_bytes} bytes")
        if type(digest) is not str or not _DIGEST.fullmatch(digest):
            raise ValueError(f"memory {number} has the digest {digest!r:.80}")
    end = 0
    for start, size in sorted(memories):
        if size and start < end:
            raise ValueError(f"memories overlap at byte {start}")
        end = max(end, start + size)


def check_states(states: Any, memories: list[tuple[int, int]]) -> None:
    """Refuse states that are no data of ``layer_states`` over these memories.

    Raises: ValueError: with the place of the first fault.
    """
    if type(states) is not dict:
        raise ValueError(f"states are {type(states).__name__}")
    walk = _Walk(memories)
    for number, layers in states.items():
        if not _NUMBER.fullmatch(number) or type(layers) is not list:
            raise ValueError(f"states hold {number!r:.80}: {type(layers).__name__}")
        walk.group(number, layers)
    if walk.num_used != len(memories):
        raise ValueError(f"{walk.num_used} of {len(memories)} memories are used")


class _Walk:
    """A walk of the states in the order in which a writer numbers memories."""

    def __init__(self, memories: list[tuple[int, int]]) -> None:
        self._memories = memories
        self._of_group: set[int] = set()
        self._at = ""
        self.num_used = 0

    def group(self, number: str, layers: list[Any]) -> None:
        self._of_group.clear()
        for place, changes in enumerate(layers):
            self._changes(changes, f"group {number}, layer {place}", 0)

    def _changes(self, changes: Any, at: str, level: int) -> None:
        if type(changes) is not dict:
            self._refuse(at, "is no dict", changes)
        for name, data in changes.items():
            if not _NAME.fullmatch(name) or (name.startswith("__") and name.endswith("__")):
                self._refuse(at, "has an attribute of that name", name)
            self._data(data, f"{at}, {name}", level + 1)

    def _data(self, data: Any, at: str, level: int) -> None:
        if level > _MOST_LEVELS:
            self._refuse(at, f"has more than {_MOST_LEVELS} levels", "")
        if type(data) is not list or len(data) != 2 or type(data[0]) is not str:
            self._refuse(at, "is no kind with a value", data)
        kind, held = data[0], data[1]
        match kind:
            case "plain":
                if held is not None and type(held) not in _PLAIN:
                    self._refuse(at, "is no plain value", held)
            case "tensor" | "parameter":
                self._tensor(held, at)
            case "dtype":
                dtype_of(held)
            case "tuple" | "list":
                self._parts(held, at, level)
            case "dict":
                if type(held) is not dict:
                    self._refuse(at, "is no dict", held)
                for name, part in held.items():
                    self._data(part, f"{at}, {name:.80}", level + 1)
            case "built":
                self._path(held, at)
            case "partial":
                self._parts(held, at, level, 3)
                if [part[0] for part in held[1:]] != ["tuple", "dict"]:
                    self._refuse(at, "is no function with arguments", held)
            case "product":
                self._pair(held, at)
                if type(held[0]) is not str:
                    self._refuse(at, "has no name", held[0])
                self._parts(held[1], at, level)
            case "method":
                self._pair(held, at)
                if type(held[1]) is not str or not _NAME.fullmatch(held[1]):
                    self._refuse(at, "is no name of a method", held[1])
                self._data(held[0], at, level + 1)
            case "copy":
                self._pair(held, at)
                self._path(held[0], at)
                self._changes(held[1], at, level + 1)
            case _:
                self._refuse(at, "is of no known kind", kind)

    def _parts(self, held: Any, at: str, level: int, count: int | None = None) -> None:
        if type(held) is not list or (count is not None and len(held) != count):
            self._refuse(at, "is no list of its parts", held)
        for part in held:
            self._data(part, at, level + 1)

    def _pair(self, held: Any, at: str) -> None:
        if type(held) is not list or len(held) != 2:
            self._refuse(at, "is no pair", held)

    def _path(self, held: Any, at: str) -> None:
        if type(held) is not list or not held or type(held[0]) is not str:
            self._refuse(at, "is no path", held)
        if not all(type(step) is str or is_number(step) for step in held):
            self._refuse(at, "is no path", held)

    def _tensor(self, held: Any, at: str) -> None:
        self._pair(held, at)
        number, form = held
        if not is_number(number) or type(form) is not list or len(form) != 4:
            self._refuse(at, "is no tensor", held)
        if number == self.num_used and number < len(self._memories):
            self.num_used += 1
            self._of_group.add(number)
        elif number not in self._of_group:
            self._refuse(at, "uses a memory out of turn", number)
        check_view(form, self._memories[number][1], at)

    def _refuse(self, at: str, reason: str, value: object) -> NoReturn:
        raise ValueError(f"{at} {reason}: {value!r:.80}")


def check_view(form: list[Any], num_bytes: int, at: str) -> None:
    """Refuse a tensor that does not lie in a memory of ``num_bytes``.

    Args:
        form: dtype, shape, strides and offset.
        at: the tensor's place, for the message.
    Raises: ValueError: with the reason.
    """
    name, shape, strides, offset = form
    itemsize = dtype_of(name).itemsize
    both = type(shape) is list and type(strides) is list and len(shape) == len(strides)
    if not both or len(shape) > _MOST_DIMS or not all(map(is_number, [*shape, *strides, offset])):
        raise ValueError(f"{at} has the shape {shape!r:.80} and strides {strides!r:.80}")
    if 0 in shape:
        if num_bytes:
            raise ValueError(f"{at} has the shape {shape!r:.80} in {num_bytes} bytes")
        return
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if (last + 1) * itemsize > num_bytes:
        raise ValueError(f"{at}: a tensor {shape!r:.80} does not lie in {num_bytes} bytes")
    if any(n > 1 and not step for n, step in zip(shape, strides, strict=True)):
        raise ValueError(f"{at} repeats elements: shape {shape!r:.80}, strides {strides!r:.80}")


def check_findings(findings: Any) -> None:
    """Refuse all but None or a list of lines.

    Raises: ValueError: it is neither.
    """
    if findings is None:
        return
    if type(findings) is not list or not all(type(line) is str for line in findings):
        raise ValueError(f"non_finite holds {findings!r:.80}, not lines")


def check_fields(value: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with exactly these fields.

    Raises: ValueError: it is none.
    """
    if type(value) is not dict or value.keys() != names.keys():
        fields = sorted(value) if type(value) is dict else value
        raise ValueError(f"it has the fields {fields!r:.80}")
    fields_by_name: dict[str, Any] = dict(value)
    return fields_by_name
