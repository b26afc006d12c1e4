"""Count the files and frames that one passes on the three paths through interposer.

The paths lead from ``load`` to the function of a kernel, from ``generate`` to the call of a kernel,
and from ``place`` to the module of a plugin, the first step of every selection. Layers are the
standard ones. Frames of Python and torch are not counted: nobody reads them to follow a choice.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

MODEL = Path(__file__).resolve().parents[1] / "examples" / "models" / "stdlib-lm"

Frames = list[tuple[str, str]]
"""File and function of each frame, the caller first."""


def call_path(action: Callable[[], object], first: str, through: str, reached: str) -> Frames:
    """Return the frames from ``first`` to the first call of a function that goes by ``through``."""
    found: Frames = []

    def note(frame: FrameType | None, event: str, _: object) -> None:
        if found or event != "call" or frame is None or frame.f_code.co_name != reached:
            return
        if "/src/interposer" not in frame.f_code.co_filename:
            return
        stack: Frames = []
        while frame is not None:
            stack.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        stack.reverse()
        names = [name for _, name in stack]
        if first in names and through in names:
            stack = stack[names.index(first) :]
            found.extend(pair for pair in stack if "/src/interposer" in pair[0])

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


def measured() -> dict[str, Frames]:
    """Return the frames of every path."""
    import interposer
    from interposer_engine import LanguageModel, load

    config = interposer.Config(
        kernels={"rms_norm": "reference", "fused_add_rms_norm": "reference"},
        layers={"*": interposer.Rule(prefer=("interposer-ops/*",))},
    )
    models: list[LanguageModel] = []

    def start() -> None:
        models.append(load(MODEL, platform="cpu", config=config, cache_tokens=64))

    def generate() -> None:
        models[0].generate([[1, 2, 3]], max_new_tokens=1)

    def place() -> None:
        interposer.place(config)

    return {
        "entry point to selection": call_path(place, "place", "discover", "load_value"),
        "load to kernel": call_path(start, "load", "kernel", "load_target"),
        "token to kernel": call_path(generate, "generate", "generate", "rms_norm"),
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
