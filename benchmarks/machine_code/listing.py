"""Functions and their innermost loops, in what a disassembler printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Loop", "is_jump", "loops_of"]

# Instructions that go elsewhere and come back.
_CALLS = {"bl", "blr", "brasl", "basr", "call", "callq"}
_PLACE = re.compile(r"[\s,]([0-9a-f]+) <")


@dataclass(frozen=True)
class Loop:
    """An innermost loop of a function, as the text of its instructions.

    ``on_stack`` are the registers that hold addresses of the function's own memory.
    """

    function: str
    instructions: tuple[str, ...]
    on_stack: frozenset[str] = frozenset()


def is_jump(text: str) -> bool:
    """Return whether an instruction names a place in the code, to which it may go."""
    first = text.split()[0]
    return first in _CALLS or (_PLACE.search(text) is not None and first not in {"adrp", "larl"})


def loops_of(listing: str) -> Iterator[Loop]:
    """Yield the innermost loops of what ``objdump -d -C --no-show-raw-insn -w`` printed.

    They follow each other as they lie in the object file; that of a function which was compiled
    into another one has the other one's name.
    """
    for part in re.split(r"\n\s*\n", listing):
        head = re.match(r"\s*[0-9a-f]+ <(.*)>:", part)
        if head is None:
            continue
        found = re.findall(
            r"^\s*([0-9a-f]+):\s+(.*?)\s*(?:\s(?://|# [0-9a-f]+ <).*)?$", part, re.MULTILINE
        )
        index = {int(address, 16): at for at, (address, _) in enumerate(found)}
        texts = tuple(" ".join(text.split()) for _, text in found)
        spans = set(_spans(texts, index))
        for begin, end in sorted(spans):
            if not any(begin <= b and e <= end for b, e in spans - {(begin, end)}):
                body = texts[begin : end + 1]
                yield Loop(_name(head.group(1)), body, frozenset(_stack_registers(body)))


def _spans(texts: tuple[str, ...], index: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield where each jump backwards goes, and where it stands."""
    for end, text in enumerate(texts):
        place = _PLACE.search(text)
        if place is None or not is_jump(text) or text.split()[0] in _CALLS:
            continue
        begin = index.get(int(place.group(1), 16))
        if begin is not None and begin <= end:
            yield begin, end


def _stack_registers(texts: tuple[str, ...]) -> Iterator[str]:
    """Yield the pointers to the stack of any architecture, and registers computed from them."""
    yield from ("sp", "x29", "%rsp", "%rbp")
    for text in texts:
        # ARM and s390x name the result first, x86 last.
        if found := re.match(r"(?:add|mov) (x\d+), sp\b|lay? (%r\d+),-?\d+\(%r15\)", text):
            yield found.group(1) or found.group(2)
        elif found := re.match(r"(?:mov|lea) (?:.*\()?%rsp\)?,(%r\w+)$", text):
            yield found.group(1)


def _name(demangled: str) -> str:
    """Return the name of a function without its arguments, its result and its namespace."""
    name = demangled.replace("(anonymous namespace)::", "").partition("(")[0]
    return re.sub(r"^(?:void|float|int|long|bool) (?=\w+<)", "", name).strip()
