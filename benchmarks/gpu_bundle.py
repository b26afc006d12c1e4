"""Build the bundle for a machine with an accelerator: our wheels, and what that machine lacks.

    python benchmarks/gpu_bundle.py [DIR]

``evidence/target.toml`` describes the machine. Our wheels are pure: native kernels of processors
stay out, and the plugins that have some say so there. The folder is made anew.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from evidence.packing import ROOT, Packer, PackingError, distributions
from evidence.target import read_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / ".gpu_bundle")
    parser.add_argument(
        "distributions", nargs="*", help="their folders; all, unless said otherwise"
    )
    options = parser.parse_args()
    target = read_target()
    try:
        packer = Packer(target, options.folder, ROOT / "constraints.txt")
        bundle = packer.pack(options.distributions or distributions())
    except PackingError as error:
        sys.exit(f"No bundle: {error}")
    ours = sum(wheel.ours for wheel in bundle.wheels)
    print(
        f"{options.folder}: {ours} distributions of ours and {len(bundle.wheels) - ours} others "
        f"for Python {target.python}, {bundle.num_bytes / 2**20:.1f} MiB of "
        f"{target.limit_mib}, of commit {bundle.commit}"
    )
    for folder, why in target.left_out.items():
        print(f"  without {folder}: {why}")


if __name__ == "__main__":
    main()
