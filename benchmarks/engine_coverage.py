"""Load a tiny random decoder of every architecture of transformers, and write the table of it.

python benchmarks/engine_coverage.py [MODEL_TYPE ...] [--table FILE]

Each checkpoint is written by transformers and opened by ``interposer_engine.load``. Two prompts run
in one batch, the longer one in chunks. Their greedy tokens must be those of the model of
transformers, which computes each of them without a cache. Each architecture is judged in a process
of its own.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import warnings
from collections import Counter
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from interposer_engine import load
from tiny_models.building import SHRUNK, make, where
from tiny_models.processes import called_apart

# Longer than the windows, chunks and top-k of the tiny models.
PROMPTS = ([7, 11, 5, 19, 23, 40, 31, 6, 90, 17, 55, 12, 71, 9], [44, 8, 101])
COUNT = 6
_COLUMNS = ("model type", "class", "status", "run by")


def judge(model_type: str, class_name: str) -> dict[str, Any]:
    """Return the row of one architecture.

    Its status is ``not run`` (the model itself cannot be built or run), ``equal``, ``differs``, or
    ``refused`` with the reason.
    """
    row = {"model_type": model_type, "class_name": class_name, "status": "not run", "by": ""}
    try:
        model = _model(model_type, class_name)
        expected = [_greedy(model, prompt) for prompt in PROMPTS]
    except Exception as error:  # noqa: BLE001  the row says so
        return row | {"reason": where(error)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            lm = load(folder, "float32", cache_tokens=256, max_sequences=2, max_step_tokens=9)
            found = [list(one.token_ids) for one in lm.generate(PROMPTS, max_new_tokens=COUNT)]
        except Exception as error:  # noqa: BLE001
            reason = re.sub(r"^\S*?" + re.escape(folder) + r"\S*: ", "", str(error))
            return row | {"status": "refused", "reason": f"{type(error).__name__}: {reason}"}
        notes = lm.resolver.notes
    row["by"] = "family"
    if any("the model of transformers is adapted" in note for note in notes):
        own = any("each sequence has a cache of transformers" in note for note in notes)
        row["by"] = "adapted, own caches" if own else "adapted, pages"
    return row | {"status": "equal" if found == expected else "differs", "reason": f"{found}"}


def _model(model_type: str, class_name: str) -> Any:
    """Return a tiny model that no end token stops."""
    failures = []
    for widths, images in SHRUNK.values():
        try:
            model: Any = make(model_type, class_name, widths, images)
        except Exception as error:  # noqa: BLE001
            failures.append(where(error))
            continue
        for holder in (model.config, model.config.get_text_config(decoder=True)):
            if hasattr(holder, "eos_token_id"):
                holder.eos_token_id = None
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.eos_token_id = None
        return model
    raise RuntimeError("; ".join(dict.fromkeys(failures)))


@torch.no_grad()
def _greedy(model: Any, prompt: list[int]) -> list[int]:
    """Return the likeliest tokens, each computed without a cache."""
    tokens = list(prompt)
    for _ in range(COUNT):
        logits = model(torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def render(rows: list[dict[str, Any]]) -> str:
    """Return the table as text."""
    names = ("transformers", "torch", "interposer-models")
    run = [row for row in rows if row["status"] != "not run"]
    by = Counter(row["by"] for row in run if row["status"] == "equal")
    lines = [
        ", ".join(f"{name} {version(name)}" for name in names),
        "",
        f"{len(run)} of {len(rows)} decoders run as tiny random models",
        f"{by.total()} of {len(run)} have the tokens of transformers: "
        + ", ".join(f"{count} by {name}" for name, count in by.most_common()),
        "",
    ]
    cells = [_COLUMNS, *((r["model_type"], r["class_name"], r["status"], r["by"]) for r in run)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(_COLUMNS))]
    for line in cells:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append(padded.rstrip())
    for title, status in (("Differs", "differs"), ("Refused", "refused"), ("Not run", "not run")):
        lines += ["", f"{title}:", ""]
        for row in rows:
            if row["status"] == status or (title == "Refused" and row["status"] in _ENDED):
                lines.append(f"{row['model_type']}: {row['reason'].partition(chr(10))[0][:220]}")
    return "\n".join(lines) + "\n"


_ENDED = ("crashed", "timed out")


def main() -> None:
    """Print a row a line, and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_type", nargs="*")
    parser.add_argument("--table", type=Path)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    classes = {
        name: kind
        for name, kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if name in CONFIG_MAPPING
    }
    judge("llama", classes["llama"])  # imports what all of them do, and has plugins examined, once
    rows = []
    for model_type in chosen.model_type or sorted(classes):
        class_name = classes[model_type]
        found = called_apart(partial(judge, model_type, class_name))
        rows.append({"model_type": model_type, "class_name": class_name, "by": "", **found})
        print(rows[-1]["model_type"], rows[-1]["status"], rows[-1]["by"], file=sys.stderr)
    table = render(rows)
    if chosen.table:
        chosen.table.write_text(table, encoding="utf-8")
    else:
        print(table)


if __name__ == "__main__":
    main()
