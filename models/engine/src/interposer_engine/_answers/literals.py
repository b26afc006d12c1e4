"""Conversion of values in the notations of call formats to JSON text, piece by piece."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from interposer_engine._answers.source import Malformed, Sink, Source, Steps

MAX_DEPTH = 128
_MAX_WORD = 1024
_WORD = re.compile(r"[\w+.\-]+")
_KEY = re.compile(r"[^:{}\[\],\s]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {
    "true": "true",
    "True": "true",
    "false": "false",
    "False": "false",
    "null": "null",
    "None": "null",
}
_HEX = re.compile(r"[0-9a-fA-F]+")
_NO_JSON_SPACE = re.compile(r"[^ \t\n\r]")
_PYTHON_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Notation:
    """How a format writes values.

    Attributes:
        quotes: Texts that open a string; the same text closes it.
        escapes: Escape sequences inside strings.
        has_bare_keys: Whether the keys of objects are written without quotes.
        words: The written forms of true, false and null.
    """

    quotes: tuple[str, ...] = ('"',)
    escapes: Literal["json", "python", "none"] = "json"
    has_bare_keys: bool = False
    words: tuple[str, str, str] = ("true", "false", "null")

    def write(self, value: Any) -> str:
        """Return a value of JSON in this notation.

        Raises: ValueError: the notation cannot write a string or a key.
        """
        if isinstance(value, dict):
            separator = ":" if self.has_bare_keys else ": "
            comma = "," if self.has_bare_keys else ", "
            items = (
                f"{self._write_key(key)}{separator}{self.write(item)}"
                for key, item in value.items()
            )
            return "{" + comma.join(items) + "}"
        if isinstance(value, list):
            return "[" + ("," if self.has_bare_keys else ", ").join(map(self.write, value)) + "]"
        if isinstance(value, str):
            return self._write_string(value)
        if value is None or isinstance(value, bool):
            return self.words[2 if value is None else 0 if value else 1]
        return json.dumps(value)

    def _write_key(self, key: str) -> str:
        if not self.has_bare_keys:
            return self.write(key)
        if not _KEY.fullmatch(key) or any(quote in key for quote in self.quotes):
            raise ValueError(f"the key {key!r:.100} cannot stand without quotes")
        return key

    def _write_string(self, value: str) -> str:
        if self.escapes == "python":
            return repr(value)
        if self.escapes == "json":
            return json.dumps(value, ensure_ascii=False)
        (quote,) = self.quotes
        if quote in value:
            raise ValueError(f"a string contains {quote!r}, which ends strings in this format")
        return f"{quote}{value}{quote}"


JSON = Notation()
PYTHON = Notation(("'", '"'), "python", words=("True", "False", "None"))


def escaped(text: str) -> str:
    """Return ``text`` with the escapes of a JSON string, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_value(source: Source, notation: Notation, sink: Sink) -> Steps[None]:
    """Read one value and pass its JSON text to ``sink`` in pieces.

    White space of JSON is kept. In strings of JSON, control characters are escaped and a backslash
    before a character that needs none is kept as a character, as models often write them so.

    Raises: Malformed: the text is no value, is deeper than 128, or ends early.
    """
    keeps_space = notation is JSON
    closers: list[str] = []
    separator = ""  # the comma before the next item, which a closing bracket may still drop
    is_first = False  # whether a closing bracket may come instead of an item
    while True:
        # Read one item, with its key inside an object.
        space = _json_space((yield from source.read_space()))
        character = yield from source.peek()
        if closers and character == closers[-1] and (is_first or (separator and not keeps_space)):
            sink((space if keeps_space else "") + source.take())
            closers.pop()
            if not closers:
                return
        else:
            if closers or keeps_space:
                # Only an item makes the comma before it valid JSON, so the comma waits until here.
                sink(separator + (space if keeps_space else ""))
            separator, is_first = "", False
            if closers and closers[-1] == "}":
                yield from _read_key(source, notation, sink)
            if opened := (yield from _read_item(source, notation, sink)):
                closers.append("}" if opened == "{" else "]")
                if len(closers) > MAX_DEPTH:
                    raise Malformed(f"the arguments are nested deeper than {MAX_DEPTH}")
                is_first = True
                continue
        # Read to the next item, or close the containers that end here.
        while closers:
            space = _json_space((yield from source.read_space()))
            character = yield from source.peek()
            if character == ",":
                source.take()
                separator = (space if keeps_space else "") + ("," if keeps_space else ", ")
                break
            if character != closers[-1]:
                raise _unexpected(character, f"',' or {closers[-1]!r}")
            sink((space if keeps_space else "") + source.take())
            closers.pop()
        else:
            return


def _json_space(space: str) -> str:
    """Return white space with the characters that JSON does not allow replaced."""
    return _NO_JSON_SPACE.sub(" ", space)


def _read_key(source: Source, notation: Notation, sink: Sink) -> Steps[None]:
    if not (yield from _read_string(source, notation, sink)):
        if not notation.has_bare_keys:
            raise _unexpected((yield from source.peek()), "a key in quotes")
        key = yield from source.read_run(_KEY, _MAX_WORD)
        if not key:
            raise _unexpected((yield from source.peek()), "a key")
        sink(json.dumps(key, ensure_ascii=False))
    space = _json_space((yield from source.read_space()))
    if not (yield from source.read_literal(":")):
        raise _unexpected((yield from source.peek()), "':'")
    following_space = _json_space((yield from source.read_space()))
    sink(f"{space}:{following_space}" if notation is JSON else ": ")


def _read_item(source: Source, notation: Notation, sink: Sink) -> Steps[str]:
    """Read a string or a word, or return the opening bracket of a container."""
    character = yield from source.peek()
    if character and character in "{[":
        sink(source.take())
        return character
    if (yield from _read_string(source, notation, sink)):
        return ""
    word = yield from source.read_run(_WORD, _MAX_WORD)
    if word in _WORDS:
        sink(_WORDS[word])
    elif _NUMBER.fullmatch(word):
        sink(word)
    else:
        raise _unexpected(word or (yield from source.peek()), "a value")
    return ""


def _read_string(source: Source, notation: Notation, sink: Sink) -> Steps[bool]:
    """Read a string if the next character is a quote; return whether a string was read."""
    for quote in notation.quotes:
        if (yield from source.read_literal(quote)):
            break
    else:
        return False
    sink('"')
    while True:
        stops = (quote,) if notation.escapes == "none" else (quote, "\\")
        stop = yield from source.read_until(stops, lambda text: sink(escaped(text)))
        if stop == quote:
            sink('"')
            return True
        if not stop:
            raise Malformed("the answer ends inside a string")
        yield from _read_escape(source, notation, sink)


def _read_escape(source: Source, notation: Notation, sink: Sink) -> Steps[None]:
    """Read the rest of an escape sequence after its backslash, and write the escape in JSON."""
    character = yield from source.peek()
    if not character:
        raise Malformed("the answer ends inside a string")
    source.take()
    if notation.escapes == "json" and character in '"\\/bfnrt':
        sink("\\" + character)
    elif notation.escapes == "python" and character in _PYTHON_ESCAPES:
        sink(escaped(_PYTHON_ESCAPES[character]))
    elif character == "u" or (notation.escapes == "python" and character in _HEX_DIGITS):
        digits = ""
        while len(digits) < _HEX_DIGITS[character] and _HEX.match((yield from source.peek())):
            digits += source.take()
        if len(digits) < _HEX_DIGITS[character] or int(digits, 16) > 0x10FFFF:
            raise Malformed(f"a string has the incomplete escape '\\{character}{digits}'")
        # Two escapes may be the halves of one character, so write halves as escapes again.
        code = int(digits, 16)
        sink(f"\\u{digits}" if character == "u" else json.dumps(chr(code))[1:-1])
    else:
        sink(escaped("\\" + character))


def _unexpected(actual: str, expected: str) -> Malformed:
    return Malformed(f"{actual[:40]!r} is not {expected}" if actual else "the answer ends early")


def read_string(source: Source) -> Steps[str | None]:
    """Read a JSON string and return its value; None if the next character is no quote."""
    pieces: list[str] = []
    if not (yield from _read_string(source, JSON, pieces.append)):
        return None
    value = json.loads("".join(pieces))
    assert isinstance(value, str)
    return value


def converted(text: str, notation: Notation) -> str:
    """Return the JSON text of a complete value.

    Raises: Malformed: ``text`` is not one value.
    """
    source = Source()
    source.push(text)
    source.end()
    pieces: list[str] = []
    for _ in read_value(source, notation, pieces.append):
        raise AssertionError("reading waits for text after its end")
    for _ in source.read_space():
        raise AssertionError("reading waits for text after its end")
    if following := source.take():
        raise Malformed(f"{following!r} comes after the value")
    return "".join(pieces)
