"""Load a model with packed files whose headers were changed, one after the other.

    python crafted_headers.py MODEL CACHE BATCH/BATCHES COUNT

Each leaf of a header is replaced by each of ``VALUES``, with the checksum made right again. A line
of JSON is printed for each of ``COUNT`` changes of a batch: its place and value, and the first note
of the load, "unchanged" or "wrong tokens". A crash ends this process before the last line, which is
the number of all changes.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from interposer import Config
from interposer.tooling import checksum
from interposer_engine import load

PROMPT = [5, 6, 7, 8]
LENGTH_BYTES = 8
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 64, 2**31, 2**63, 10**30, 1.5, float("inf"), float("nan")),
    *("", "a", "__class__", "float64", [], [1], [[1, 2]], {}, {"a": 1}),
    ["tensor", [0, ["uint8", [1 << 40], [1], 0]]],
    ["tensor", [0, ["float32", [4], [-4], 64]]],
    ["plain", 3],
]


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each value in nested lists and dicts, containers as well."""
    if place:
        yield place
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, (*place, name))


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with another value at a place."""
    changed = copy.deepcopy(value)
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = new
    return changed


def lenient_checksum(value: Any) -> str:
    """Return the checksum, or one of another value where JSON has none for this one."""
    try:
        return checksum(value)
    except ValueError:
        return checksum(None)


class CraftedFile:
    """A packed file whose header can be exchanged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content = path.read_bytes()
        self._end = LENGTH_BYTES + int.from_bytes(self._content[:LENGTH_BYTES], "little")
        self._header = json.loads(self._content[LENGTH_BYTES : self._end])
        self.facts = json.loads(self._header["__metadata__"]["interposer"])
        self.tensors = {k: v for k, v in self._header.items() if k != "__metadata__"}

    def write(self, facts: Any, tensors: Any) -> None:
        """Write the file with another header that has a fitting checksum."""
        metadata = dict(self._header["__metadata__"])
        metadata["interposer"] = json.dumps(facts, separators=(",", ":"))
        metadata["checksum"] = lenient_checksum(facts)
        header = {"__metadata__": metadata, **tensors}
        text = json.dumps(header, separators=(",", ":")).encode()
        room = self._end - LENGTH_BYTES
        content = self._content[:LENGTH_BYTES] + text.ljust(room) + self._content[self._end :]
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(content)


def loaded(model: str, cache: str) -> tuple[list[int], str]:
    """Return the tokens of a load, and its first note on packed weights."""
    config = Config(packed="on", cache_dir=cache)
    lm = load(model, config=config, cache_tokens=256, max_sequences=2)
    (done,) = lm.generate([PROMPT], max_new_tokens=4)
    for thread in threading.enumerate():
        if thread.name == "interposer-packed":
            thread.join()
    notes = [note for note in lm.resolver.notes if note.startswith("packed weights")]
    return [*done.token_ids], notes[0]


def main() -> None:
    """Print what became of the changes that were asked for."""
    model, cache = sys.argv[1:3]
    Path(cache, "verdicts").symlink_to(Path(os.environ["INTERPOSER_CACHE_DIR"], "verdicts"))
    logging.disable()
    expected, note = loaded(model, cache)
    crafted = CraftedFile(Path(note.partition("mapped from ")[2]))
    changes = [
        (kind, place, new)
        for kind, value in (("facts", crafted.facts), ("tensors", crafted.tensors))
        for place in leaves(value)
        for new in VALUES
    ]
    batch, batches = map(int, sys.argv[3].split("/"))
    count = int(sys.argv[4])
    for number in range(count):
        kind, place, new = changes[(number * batches + batch) * len(changes) // (count * batches)]
        facts, tensors = crafted.facts, crafted.tensors
        if kind == "facts":
            facts = replaced(facts, place, new)
        else:
            tensors = replaced(tensors, place, new)
        print(end=json.dumps([kind, place, repr(new)])[:-1], flush=True)
        crafted.write(facts, tensors)
        is_same = json.dumps([facts, tensors]) == json.dumps([crafted.facts, crafted.tensors])
        tokens, note = loaded(model, cache)
        result = "unchanged" if is_same else note
        print(f", {json.dumps(result if tokens == expected else 'wrong tokens')}]", flush=True)
    print(len(changes), flush=True)


if __name__ == "__main__":
    main()
