"""Tune for models on an accelerator, and write the table that the plugin of its platform ships.

    python benchmarks/gpu_tune.py MODEL_DIR_OR_SHAPE [...] [--precisions bf16,fp8,int4]
        [--platform NAME] [--seconds N] [--json FILE]

A name of ``random_model.py`` stands for a model of that shape, of which no weight is needed. The
table lies beside the JSON file, under the name of the device; ``gpu_results.py`` puts it in its
place. Requests that there is no time for are left out, and chosen by score.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from evidence.record import Deadline, Record, add_step_options, file_name
from gpu_clock import placement_of
from gpu_decode import METHODS
from interposer import Config, Placement, planned
from interposer.tooling import default_store
from interposer_tools import Table, tune
from random_model import SHAPES, write_model

_TOKENS, _REPEATS = (1, 16, 256), 15
_TINY_TOKENS, _TINY_REPEATS = (1,), 3


class _TimeIsOverError(Exception):
    """Tuning is to end; what was measured is kept already."""


def main() -> None:
    options = parsed()
    placement = placement_of(options.platform, options.tiny)
    record, deadline = Record(options.json), Deadline(options.seconds)
    record.facts |= {"device": placement.device.name, "platform": placement.platform.name}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "measurements"
        tuning = Tuning(placement, record, deadline, kept, options.tiny)
        for path, precision in jobs(options, Path(folder)):
            if deadline.left_s() <= 0:
                record.skip(f"no time for {path.name} {precision}")
                continue
            with record.guarded(f"{path.name} {precision}"):
                tuning.run(path, precision)
        table = tuning.table
    for entry in table.entries:
        for name, (_, why) in entry.value.failed.items():
            record.fault(f"{entry.key}: {name}: {why}")
    if options.json:
        file = options.json.with_name(f"{file_name(placement.device.name)}.table.json")
        table.write(file)
        record.facts["table"] = file.name
    wins = Counter(entry.fastest.partition("/")[2] for entry in table.entries)
    told = ", ".join(f"{name} {count}" for name, count in wins.most_common(4))
    record.headline = f"{len(table.entries)} requests measured; the fastest: {told or 'none'}"
    record.say(record.headline)


def jobs(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Path, str]]:
    for precision in options.precisions:
        for model in options.models:
            path = Path(model)
            if model in SHAPES:
                path = folder / model
                write_model(model, path, plan=True)
            yield path, precision


class Tuning:
    """Tunes for plans, one after the other, until the time is over.

    What is measured is kept in a folder of its own, apart from what this host goes by.
    """

    def __init__(
        self, placement: Placement, record: Record, deadline: Deadline, folder: Path, tiny: bool
    ) -> None:
        self.record = record
        self.deadline = deadline
        self.tokens = _TINY_TOKENS if tiny else _TOKENS
        self.repeats = _TINY_REPEATS if tiny else _REPEATS
        self.config = Config(platform=placement.platform.name, cache_dir=str(folder), tables=False)

    @property
    def table(self) -> Table:
        """Return everything that was measured."""
        return Table.stored(default_store(self.config))

    def run(self, path: Path, precision: str) -> None:
        """Tune for one plan."""
        plan = planned(path, self.config, "bfloat16", None, METHODS[precision])
        known = len(self.table.entries)

        def advance(done: int, total: int, subject: str) -> None:
            if subject and self.deadline.left_s() <= 0:
                left = f"{total - done} requests of {path.name} {precision}"
                self.record.skip(f"no time for {left}, the next: {subject}")
                raise _TimeIsOverError

        with contextlib.suppress(_TimeIsOverError):
            tune(plan, tokens=self.tokens, repeats=self.repeats, progress=advance)
        new = len(self.table.entries) - known
        self.record.row(f"{path.name} {precision}: {new} requests", model=path.name, requests=new)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+")
    add_step_options(parser)
    parser.add_argument(
        "--precisions", type=lambda text: text.split(","), default=[*METHODS], help="of the weights"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
