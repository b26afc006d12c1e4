"""Public names are the ones that are written down, so that none comes or goes unnoticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_public_names_are_those_of_the_snapshot() -> None:
    command = [sys.executable, str(ROOT / "docs" / "_site.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_doors_are_few() -> None:
    """Names are counted in all public modules of a distribution; one module may offer another's."""
    names: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "public-names.txt").read_text(encoding="utf-8").splitlines():
        module, dot, name = line.partition("(")[0].partition(":")[0].rpartition(".")
        if dot and not line.startswith(" ") and name:
            names.setdefault(module.partition(".")[0], set()).add(name)
    # Of them, one and four are the dtype and the groups of caches of 4 bits.
    # Four are the communicator, its record, the ranks and the error of a lost one.
    # Of ops, 22 are by which layers of families, those of plugins too, are cut over ranks.
    # Five more are sums over ranks that are left to norms.
    # Of models, four are the launch of ranks, both ends of a trainer's weights and their meeting.
    # Of ops seven, and of models one, are whole experts on ranks: settings, placements and layers.
    most = {"interposer": 156, "interposer_models": 65, "interposer_ops": 297}
    too_many = {top: len(found) for top, found in names.items() if len(found) > most.get(top, 60)}
    assert not too_many
