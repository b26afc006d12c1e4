"""Say what is chosen for models on an accelerator, and whether decode steps become graphs.

    python benchmarks/gpu_choices.py MODEL_DIR_OR_SHAPE [...] [--platform NAME] [--json FILE]

A name of ``random_model.py`` stands for a model of that shape, of which no weight is needed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from evidence.record import Record, add_step_options
from gpu_clock import placement_of
from interposer import Config, Placement, explain
from random_model import SHAPES, write_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+")
    add_step_options(parser)
    options = parser.parse_args()
    record, told = Record(options.json), []
    placement = placement_of(options.platform, options.tiny)
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            path = Path(model)
            if model in SHAPES:
                path = Path(folder) / model
                write_model(model, path, plan=True)
            with record.guarded(path.name):
                told.append(explained(path, placement, record))
    record.headline = "; ".join(told)
    record.say(record.headline)


def explained(path: Path, placement: Placement, record: Record) -> str:
    """Return in a few words what is chosen for a model; the record gets all of it."""
    platform = placement.platform
    explanation = explain(path, config=Config(platform=platform.name))
    facts = explanation.to_dict()
    chosen = {f"{row['kind']} {row['name']}".strip(): row["chosen"] for row in facts["choices"]}
    notes = list(explanation.notes)
    record.row(str(explanation), model=path.name, chosen=chosen, notes=notes)
    attention = next((name for key, name in chosen.items() if key.startswith("attention")), "none")
    graphs = next((note for note in notes if note.startswith("decode steps run")), "")
    if platform.provides("capture_graph") and graphs != "decode steps run as graphs":
        record.fault(f"{path.name}: {graphs or 'nothing is said of graphs'}")
    short = graphs.partition(":")[0] or f"{platform.name} has no graphs"
    return f"{path.name}: {len(chosen)} choices, attention by {attention}, {short}"


if __name__ == "__main__":
    main()
