"""Worker process with one engine of ``media.py``.

    python media_worker.py MODULE PATH OPTION THREADS

Started by that script. Loads the model, then runs one command per JSON line on stdin, and answers
each with a JSON line on the original stdout:

- ``{"kind": "encode", "seed": 1, "size": 336}``: the vectors of an image. With ``"save": FILE``,
  they are also written as a numpy file;
- ``{"kind": "answer", "seeds": [1, 2], "size": 336, "new_tokens": 32}``: requests at once;
- ``{"kind": "transcribe", "seed": 1, "seconds": 28}``: a sound.

``"blocks": 1`` makes images of one colour. An answer has the seconds and the tokens. Inputs are
made before the time is taken. Output of the libraries is redirected to stderr. The worker runs in
the engines' environments: standard library and numpy only.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from media_engines.contract import picture, sound, text


def run(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Run a command and return its seconds and tokens."""
    blocks = {"blocks": command["blocks"]} if "blocks" in command else {}
    if command["kind"] == "encode":
        image = picture(command["seed"], command["size"], **blocks)
        start = time.perf_counter()
        vectors = np.asarray(engine.encode(image))
        seconds = time.perf_counter() - start
        if "save" in command:
            np.save(command["save"], vectors)
        return {"seconds": seconds, "shape": vectors.shape}
    if command["kind"] == "transcribe":
        samples = sound(command["seed"], command["seconds"])
        start = time.perf_counter()
        tokens = engine.transcribe(samples)
        return {"seconds": time.perf_counter() - start, "tokens": [tokens]}
    images = [picture(seed, command["size"], **blocks) for seed in command["seeds"]]
    texts = [text(seed) for seed in command["seeds"]]
    start = time.perf_counter()
    answer = engine.answer(images, texts, command["new_tokens"])
    seconds = time.perf_counter() - start
    lengths = {len(tokens) for tokens in answer.tokens}
    if lengths != {command["new_tokens"]}:
        raise RuntimeError(f"answers have {sorted(lengths)} tokens, not {command['new_tokens']}")
    return {"seconds": seconds, "first_s": answer.first_s, "tokens": answer.tokens}


def main() -> None:
    module, path, option, threads = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    library = importlib.import_module(f"media_engines.{module}")
    is_sound = Path(path).name.startswith("whisper")
    engine = (library.open_speech if is_sound else library.open_images)(
        Path(path), option, int(threads)
    )
    print(json.dumps({"facts": engine.facts()}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(engine, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
