"""Encoding of messages to other ranks: tagged values of bounded length that contain no code.

A value is a byte that names the kind, followed by the content; lengths have 8 bytes. Instances of
the classes in ``_classes`` are sent as values of fields, which the constructor checks.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import torch

from interposer import Config
from interposer.errors import ConfigError

_MAX_LEVELS = 64  # of nested containers
_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_INT = struct.Struct("<q")
_TEXT = "utf-8", "surrogatepass"  # a text may contain a lone surrogate
_CONTAINERS: dict[bytes, Callable[[list[Any]], Any]] = {
    b"l": list,
    b"t": tuple,
    b"s": set,
    b"z": frozenset,
}
_TAGS: dict[type[Any], bytes] = {list: b"l", tuple: b"t", set: b"s", frozenset: b"z"}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class CodecError(ValueError):
    """Received bytes that no rank of this version sends; the text says why."""


@cache
def _classes() -> dict[str, type[Any]]:
    """Return the classes whose instances can be sent, by class name."""
    # Imported at first use: these modules load the engine.
    from interposer_engine._distributed.estimate import ExpertLoads
    from interposer_engine._embedded_input import EmbeddedInput
    from interposer_engine._encoder_features import EncoderFeatures
    from interposer_engine._prefix_settings import PrefixCache
    from interposer_engine._sampling_params import Constraint, SamplingParams
    from interposer_engine._speculation.settings import Speculation
    from interposer_engine._speech.rules import TranscriptRules
    from interposer_engine._weight_transfer.protocol import Meeting
    from interposer_engine._weight_transfer.receiver import WeightsFrom
    from interposer_ops.layers.moe.placement import ExpertParallel, ExpertPlacement

    classes = (
        *(Constraint, EmbeddedInput, EncoderFeatures, ExpertLoads, ExpertParallel, ExpertPlacement),
        *(Meeting, PrefixCache, SamplingParams, Speculation, TranscriptRules, WeightsFrom),
    )
    return {kind.__name__: kind for kind in classes}


def encode(value: Any) -> bytes:
    """Encode a value of a supported type as bytes.

    Raises: ConfigError: the type of the value, or of a part, cannot be sent.
    """
    parts: list[bytes] = []
    _write(value, parts, 0)
    return b"".join(parts)


def decode(content: bytes) -> Any:
    """Decode the value that ``encode`` converted to bytes.

    Raises: CodecError: the bytes are truncated, too deeply nested, or of an unknown kind or class.
    """
    reader = _Reader(content)
    value = reader.value(0)
    if reader.at != len(content):
        raise CodecError(f"{len(content) - reader.at} bytes follow the value")
    return value


def _write(value: Any, parts: list[bytes], level: int) -> None:
    if level > _MAX_LEVELS:
        raise ConfigError(f"values in more than {_MAX_LEVELS} levels cannot cross to other ranks")
    kind = type(value)
    if value is None:
        parts.append(b"n")
    elif kind is bool:
        parts.append(b"T" if value else b"F")
    elif kind is int:
        if -(2**63) <= value < 2**63:
            parts += b"i", _INT.pack(value)
        else:
            _append(b"I", b"%d" % value, parts)
    elif kind is float:
        parts += b"f", _FLOAT.pack(value)
    elif kind is str:
        _append(b"u", value.encode(*_TEXT), parts)
    elif kind is bytes:
        _append(b"b", value, parts)
    elif kind in _TAGS:
        # Token ids are sent as an array of 64-bit integers, which is much faster.
        if kind in (list, tuple) and len(value) > 1 and set(map(type, value)) == {int}:
            try:
                numbers = array("q", value)
            except OverflowError:
                pass
            else:
                _append(b"L" if kind is list else b"U", numbers.tobytes(), parts)
                return
        parts += _TAGS[kind], _LENGTH.pack(len(value))
        for part in value:
            _write(part, parts, level + 1)
    elif isinstance(value, Config):
        parts.append(b"C")
        _write(value.model_dump(mode="json", exclude_unset=True), parts, level + 1)
    elif _classes().get(kind.__name__) is kind:
        _append(b"o", kind.__name__.encode(), parts)
        _write(_fields(value), parts, level + 1)
    elif isinstance(value, Mapping):
        parts += b"d", _LENGTH.pack(len(value))
        for key, part in value.items():
            _write(key, parts, level + 1)
            _write(part, parts, level + 1)
    elif isinstance(value, torch.Tensor):
        _write_tensor(value, parts)
    elif isinstance(value, torch.dtype):
        _append(b"D", str(value).encode(), parts)
    elif isinstance(value, PurePath):
        _append(b"P", str(value).encode(*_TEXT), parts)
    else:
        raise ConfigError(
            f"{value!r:.80} of the type {kind.__module__}.{kind.__qualname__} cannot be sent to "
            "other ranks. Try: plain values, tensors and the classes that interposer_engine takes"
        )


def _append(tag: bytes, content: bytes, parts: list[bytes]) -> None:
    parts += tag, _LENGTH.pack(len(content)), content


def _fields(value: Any) -> dict[str, Any]:
    set_fields = getattr(value, "model_fields_set", None)
    # Of pydantic models only the fields that the user set, so that defaults stay defaults.
    if set_fields is not None:
        names = sorted(set_fields)
    else:
        names = [field.name for field in fields(value)]
    return {name: getattr(value, name) for name in names}


def _write_tensor(tensor: torch.Tensor, parts: list[bytes]) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ConfigError(
            f"a tensor of {tensor.layout} on {tensor.device} cannot cross to other ranks"
        )
    host_tensor = tensor.detach().cpu().contiguous()
    parts.append(b"x")
    _write([str(host_tensor.dtype), list(host_tensor.shape)], parts, 0)
    _append(b"b", host_tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), parts)


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self.at = 0

    def value(self, level: int) -> Any:
        if level > _MAX_LEVELS:
            raise CodecError(f"it has more than {_MAX_LEVELS} levels")
        tag = self._take(1)
        match tag:
            case b"n":
                return None
            case b"T" | b"F":
                return tag == b"T"
            case b"i":
                return _INT.unpack(self._take(8))[0]
            case b"I":
                return self._large_int()
            case b"f":
                return _FLOAT.unpack(self._take(8))[0]
            case b"u":
                return self._text()
            case b"b":
                return self._bytes()
            case b"l" | b"t" | b"s" | b"z":
                return self._container(tag, [self.value(level + 1) for _ in range(self._count())])
            case b"L" | b"U":
                return self._numbers(tag)
            case b"d":
                return {self._key(level): self.value(level + 1) for _ in range(self._count())}
            case b"x":
                return self._tensor(level)
            case b"D":
                return self._dtype(self._text())
            case b"P":
                return Path(self._text())
            case b"C":
                return self._construct(Config, level)
            case b"o":
                return self._instance(level)
        raise CodecError(f"{tag!r} is no kind of value")

    def _take(self, count: int) -> bytes:
        end = self.at + count
        # Checked before slicing, which would silently return fewer bytes.
        if end > len(self._content):
            raise CodecError(f"it ends at byte {len(self._content)} of {end}")
        content = self._content[self.at : end]
        self.at = end
        return content

    def _count(self) -> int:
        """Read a number of elements, each of which takes at least one byte."""
        count = int(_LENGTH.unpack(self._take(8))[0])
        if count > len(self._content) - self.at:
            raise CodecError(f"{count} parts do not lie in {len(self._content) - self.at} bytes")
        return count

    def _bytes(self) -> bytes:
        return self._take(self._count())

    def _text(self) -> str:
        try:
            return self._bytes().decode(*_TEXT)
        except UnicodeDecodeError as error:
            raise CodecError(f"a text is no UTF-8: {error}") from None

    def _large_int(self) -> int:
        try:
            return int(self._bytes())
        except ValueError as error:
            raise CodecError(f"it holds no number: {error}") from None

    def _numbers(self, tag: bytes) -> list[int] | tuple[int, ...]:
        numbers, content = array("q"), self._bytes()
        if len(content) % numbers.itemsize:
            raise CodecError(f"{len(content)} bytes are no whole numbers")
        numbers.frombytes(content)
        return numbers.tolist() if tag == b"L" else tuple(numbers)

    def _key(self, level: int) -> Any:
        key = self.value(level + 1)
        try:
            hash(key)
        except TypeError:
            raise CodecError(f"{type(key).__name__} is a key of a dict") from None
        return key

    def _fields_by_name(self, level: int) -> dict[str, Any]:
        fields_by_name = self.value(level + 1)
        if type(fields_by_name) is not dict or not all(
            type(name) is str for name in fields_by_name
        ):
            raise CodecError("fields of a class are not values by name")
        return fields_by_name

    def _container(self, tag: bytes, parts: list[Any]) -> Any:
        try:
            return _CONTAINERS[tag](parts)
        except TypeError as error:
            raise CodecError(f"a set holds what no set can: {error}") from None

    def _instance(self, level: int) -> Any:
        name = self._text()
        if name not in _classes():
            raise CodecError(f"{name!r:.80} is no class that crosses")
        return self._construct(_classes()[name], level)

    def _construct(self, kind: type[Any], level: int) -> Any:
        try:
            return kind(**self._fields_by_name(level))
        except (TypeError, ValueError) as error:
            raise CodecError(f"no {kind.__name__}: {error}") from error

    def _dtype(self, name: object) -> torch.dtype:
        if not isinstance(name, str) or name not in _DTYPES:
            raise CodecError(f"{name!r:.80} is no dtype")
        return _DTYPES[name]

    def _tensor(self, level: int) -> torch.Tensor:
        form, content = self.value(level + 1), self.value(level + 1)
        if type(form) is not list or len(form) != 2 or type(content) is not bytes:
            raise CodecError("a tensor has no form")
        dtype, shape = self._dtype(form[0]), form[1]
        if type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
            raise CodecError(f"{shape!r:.80} is no shape")
        num_bytes = dtype.itemsize
        for n in shape:
            num_bytes *= n
        if num_bytes != len(content):
            raise CodecError(f"a tensor {shape!r:.80} of {dtype} has {len(content)} bytes")
        if not content:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)
