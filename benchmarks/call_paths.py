"""Count the files and frames that one passes on the three paths through interposer.

The paths lead from ``load`` to the import of a kernel, from ``generate`` to the call of a kernel,
and from ``place`` to the import of a plugin, the first step of every selection. Frames of Python's
import system and of torch are not counted: nobody reads them to follow a choice.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

MODEL = Path(__file__).resolve().parents[1] / "examples" / "models" / "stdlib-lm"
KERNELS = "interposer_cpu._kernels"
PLUGIN = "interposer_cpu.plugin"

Frames = list[tuple[str, str]]
"""File and function of each frame, the caller first."""


def passed(frame: FrameType | None, first: str) -> Frames:
    """Return the frames from the outermost call of ``first`` to ``frame``."""
    stack: Frames = []
    while frame is not None:
        stack.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    stack.reverse()
    start = next(at for at, (_, name) in enumerate(stack) if name == first)
    return [(file, name) for file, name in stack[start:] if "/src/interposer" in file]


class ImportWatch:
    """Notes the way to the first import of a module below ``package``."""

    def __init__(self, package: str, first: str, by: str) -> None:
        self.found: Frames = []
        self._package = package
        self._first = first
        self._by = by

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Note the frames; other finders do the work."""
        if not self.found and f"{name}.".startswith(f"{self._package}."):
            frames = passed(sys._getframe(1), self._first)
            if any(file.endswith(self._by) for file, _ in frames):
                self.found = frames
        return None


@contextmanager
def import_of(package: str, first: str, by: str) -> Iterator[ImportWatch]:
    """Watch imports within a block."""
    watch = ImportWatch(package, first, by)
    sys.meta_path.insert(0, watch)
    try:
        yield watch
    finally:
        sys.meta_path.remove(watch)


def call_path(model: Any, code: CodeType) -> Frames:
    """Return the frames from ``generate`` to the first call of a function."""
    found: Frames = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is code and not found:
            found.extend(passed(frame, "generate"))

    sys.setprofile(note)
    try:
        model.generate([[1, 2, 3]], max_new_tokens=1)
    finally:
        sys.setprofile(None)
    return found


def measured() -> dict[str, Frames]:
    """Return the frames of every path."""
    import interposer
    from interposer_models import load
    from interposer_ops.norms import rms_norm

    config = interposer.Config(kernels={"rms_norm": "reference", "fused_add_rms_norm": "reference"})
    with import_of(PLUGIN, "place", "discovery.py") as plugin:
        interposer.place(config)
    with import_of(KERNELS, "load", "gates.py") as kernel:
        model = load(MODEL, platform="cpu", config=config, cache_tokens=64)
    return {
        "load to kernel": kernel.found,
        "token to kernel": call_path(model, rms_norm.reference.__code__),
        "entry point to selection": plugin.found,
    }


def main() -> None:
    """Print the paths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--frames", action="store_true", help="Show every frame.")
    options = parser.parse_args()
    paths = measured()
    if options.json:
        print(json.dumps(paths))
        return
    for name, path in paths.items():
        files = {file for file, _ in path}
        chosen = [function for file, function in path if "/_selection/" in file]
        print(f"{name}: {len(files)} files, {len(path)} frames, {len(chosen)} in the selection")
        for file, function in path if options.frames else ():
            print(f"    {file.partition('/src/')[2]}: {function}")


if __name__ == "__main__":
    main()
