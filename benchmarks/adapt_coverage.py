"""Adapt a tiny random model of every architecture of transformers, and write the table of it.

python benchmarks/adapt_coverage.py [MODEL_TYPE ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models.building import model_classes
from tiny_models.judge import Row, judge

SECONDS = 60


class Unchanged:
    """Stands for an adapted model that is the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        pass

    places = ()

    def restore(self) -> None:
        pass


def forked(model_type: str, class_name: str, adapt: Any, dtype: torch.dtype) -> Row:
    """Return the row of an architecture that is judged in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        signal.alarm(SECONDS)
        status = 1
        try:
            row = judge(model_type, class_name, adapt, dtype)
            with os.fdopen(write, "w") as pipe:
                json.dump(row.as_dict(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return Row(**json.loads(text))
    row = Row(model_type, class_name, str(dtype).removeprefix("torch."))
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    row.status = "timed out" if ended == signal.SIGALRM else "crashed"
    row.reason = f"{SECONDS} s" if ended == signal.SIGALRM else f"status {status}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_type", nargs="*")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--identity", action="store_true")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    classes = model_classes()
    if chosen.identity:
        adapt: Any = Unchanged
    else:
        from interposer_models import adapt
    for model_type in ("llama", "bert"):  # imports and asks what every family does
        judge(model_type, classes[model_type], adapt)
    rows = []
    out = chosen.json.open("w") if chosen.json else None
    for model_type in chosen.model_type or classes:
        row = forked(model_type, classes[model_type], adapt, getattr(torch, chosen.dtype))
        rows.append(row)
        if out:
            print(json.dumps(row.as_dict()), file=out, flush=True)
        else:
            print(row, flush=True)
    print(Counter(row.status for row in rows), file=sys.stderr)


if __name__ == "__main__":
    main()
