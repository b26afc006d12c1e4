"""Run all tests and benchmarks that need an accelerator, and keep their results.

    python3 benchmarks/gpu_evidence.py --bundle DIR --out DIR [--stage b,e] [--limit SECONDS]

The program starts with the standard library alone: it installs the bundle of ``gpu_bundle.py``
into a separate folder and leaves this Python unchanged. Without ``--bundle``, it uses the installed
packages. A step that fails or hangs does not stop the next one. The same command continues a run
that ``--limit`` ended: finished steps are skipped, unless ``--again`` repeats all of them or
``--retry`` the failed ones. ``--archive FILE`` also writes all results to one file after each step.

``--tiny`` rehearses with small sizes, by default on Triton's interpreter; with ``--forks``, all
steps are forks of one process that imports torch once. Exits with 1 if a step found faults or
failed, and with 3 if time ran out before all steps were run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from evidence.installation import Installation, InstallationError
from evidence.ledger import Ledger
from evidence.manifest import Bundle
from evidence.process import run, run_forked
from evidence.stage import Stage, Step
from evidence.stages import STAGES
from evidence.summary import summary

BENCHMARKS = Path(__file__).resolve().parent
MODEL = BENCHMARKS.parent / "examples" / "models" / "stdlib-lm"
# What a program needs to start and to end by itself.
_START_S, _MARGIN_S = 15.0, 10.0
_LEFT = 3


def main() -> None:
    options = parsed()
    end = time.monotonic() + options.limit
    work, ledger = options.work.resolve(), Ledger(options.out.resolve())
    work.mkdir(parents=True, exist_ok=True)
    site = work / "site" if options.bundle else None
    if site is not None:
        install(options.bundle, site)
    environment = environment_of(options, work, site)
    os.environ.update(environment if options.forks else {})
    left = False
    for stage in options.stages:
        for step in steps_of(stage, options.tiny):
            entry = ledger.entry(step.name)
            if entry is not None and not (
                options.again or (options.retry and entry.state not in ("held", "faults"))
            ):
                continue
            room = end - time.monotonic()
            if room < min(step.limit_s, _START_S + _MARGIN_S):
                left = True
                continue
            limit = min(int(step.limit_s * options.patience), int(room))
            print(f"{stage.letter} {step.name}: {stage.subject} (limit {limit} s)", flush=True)
            if options.forks:
                preload()
            take(step, ledger, environment, work, limit, options)
            report(ledger, options)
    print(report(ledger, options), end="")
    if left:
        print("The time limit ended the run before all steps were run. Try: the same command again")
        sys.exit(_LEFT)
    entries = [ledger.entry(step.name) for stage in options.stages for step in stage.steps]
    sys.exit(any(entry is not None and entry.state not in ("held", "cut") for entry in entries))


def install(folder: Path, site: Path) -> None:
    start = time.monotonic()
    try:
        new = Installation(site).install(Bundle.read(folder))
    except InstallationError as error:
        sys.exit(f"error: no step was run: {error}")
    if new:
        print(f"installed in {time.monotonic() - start:.0f} s: {', '.join(new)}", flush=True)


def preload() -> None:
    """Import what the programs of the steps share, for their forks."""
    for name in ("torch._dynamo", "transformers", "interposer_engine", "interposer_tools"):
        importlib.import_module(name)


def environment_of(options: argparse.Namespace, work: Path, site: Path | None) -> dict[str, str]:
    """Return the environment of the steps; what they compile and find out stays in ``work``."""
    environment = dict(os.environ)
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    caches = {
        "INTERPOSER_CACHE_DIR": "interposer",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
    }
    environment |= {name: str(work / "cache" / folder) for name, folder in caches.items()}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if options.tiny and options.platform == "interpreter":
        # An interpreted program runs on one thread; others would only wait.
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    if options.platform:
        environment["INTERPOSER_PLATFORM"] = options.platform
    return environment


def take(
    step: Step,
    ledger: Ledger,
    environment: dict[str, str],
    work: Path,
    limit_s: int,
    options: argparse.Namespace,
) -> None:
    """Run one step and keep what came of it."""
    ledger.begin(step.name)
    given = step.tiny if options.tiny else step.arguments
    program = [
        str(BENCHMARKS / step.script),
        *(part.format(model=MODEL, work=work) for part in given),
        *("--json", str(ledger.record(step.name))),
        *("--seconds", str(limit_s - _MARGIN_S if limit_s > 2 * _MARGIN_S else limit_s / 2)),
        *(("--platform", options.platform) if options.platform else ()),
        *(("--tiny",) if options.tiny else ()),
    ]
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if options.forks:
        ended = run_forked(program, environment, ledger.log(step.name), limit_s)
    else:
        command = [sys.executable, "-X", "faulthandler", *program]
        ended = run(command, environment, ledger.log(step.name), limit_s)
    ledger.end(step.name, ended, limit_s, date, options.tiny)


def report(ledger: Ledger, options: argparse.Namespace) -> str:
    """Write the summary, and the archive if one is wanted; return the summary."""
    text = summary(STAGES, ledger, options.tiny)
    (ledger.folder / "summary.txt").write_text(text, encoding="utf-8")
    if options.archive:
        ledger.archive(options.archive)
    return text


def steps_of(stage: Stage, tiny: bool) -> list[Step]:
    """Return the steps to run; of several that differ in sizes only, a rehearsal takes one."""
    if not tiny or len(stage.steps) == 1:
        return list(stage.steps)
    return [step for step in stage.steps if step.tiny]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bundle", type=Path, help="bundle that gpu_bundle.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, default=BENCHMARKS.parent / ".gpu_work")
    parser.add_argument(
        "--stage", default="", help="letters or names of stages, separated by commas"
    )
    parser.add_argument(
        "--limit", type=float, default=1500.0, help="time limit of the run, in seconds"
    )
    parser.add_argument("--archive", type=Path, help="write all results to this file, too")
    parser.add_argument(
        "--platform", default="", help="platform to run on; default: selected automatically"
    )
    parser.add_argument("--tiny", action="store_true", help="rehearse with small sizes")
    parser.add_argument("--forks", action="store_true", help="run steps as forks of one process")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor for the limits of all steps"
    )
    parser.add_argument("--again", action="store_true", help="run finished steps again")
    parser.add_argument(
        "--retry", action="store_true", help="run steps again that failed or were incomplete"
    )
    options = parser.parse_args()
    if options.tiny and not options.platform:
        options.platform = "interpreter"
    wanted = [name for name in options.stage.split(",") if name]
    known = {name: stage for stage in STAGES for name in (stage.letter, stage.name)}
    for name in wanted:
        if name not in known:
            parser.error(f"--stage {name!r} is unknown; stages are {', '.join(known)}")
    chosen = [known[name] for name in wanted]
    options.stages = [stage for stage in STAGES if not wanted or stage in chosen]
    return options


if __name__ == "__main__":
    main()
