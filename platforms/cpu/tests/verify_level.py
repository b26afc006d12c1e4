"""Verifies the platform's distribution with one level of instructions forced, and prints as JSON.

    python verify_level.py LEVEL [--library FILE] [--quick]

In this one process, so that the level holds for every trial. ``--library`` is used in place of the
installed one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from importlib.machinery import ExtensionFileLoader

from interposer_testing import verify

_MODULE = "interposer_cpu._native"


def replace_library(file: str) -> None:
    """Make the native module that of ``file``. Nothing may have loaded the installed one."""
    if _MODULE in sys.modules:
        raise RuntimeError(f"{_MODULE} is loaded already, from {sys.modules[_MODULE].__file__}")
    loader = ExtensionFileLoader(_MODULE, file)
    spec = importlib.util.spec_from_file_location(_MODULE, file, loader=loader)
    assert spec is not None
    sys.modules[_MODULE] = module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("level")
    parser.add_argument("--library")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.library:
        replace_library(options.library)
    from interposer_cpu import native

    native.force_level(options.level)
    report = verify("interposer-cpu", quick=options.quick)
    reasons = sorted(
        f"{candidate.subject} {candidate.name}, {tally.aspect}: {reason}"
        for candidate in report.candidates
        for tally in candidate.tallies
        for reason in tally.not_run
    )
    print(
        json.dumps(
            {
                "level": native.level(),
                "text": str(report),
                "wrong": [candidate.name for candidate in report.in_state("wrong")],
                "correct": [candidate.name for candidate in report.in_state("correct")],
                "not run": reasons,
            }
        )
    )


if __name__ == "__main__":
    main()
