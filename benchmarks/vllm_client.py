"""The client of ``vllm bench serve``, with its arguments, for a Python whose command is unusable.

The command asks for the version of a distribution named vllm, which the build for CPUs is not.
"""

from __future__ import annotations

import importlib
from typing import Any


def main() -> None:
    client: Any = importlib.import_module("vllm.benchmarks.serve")
    arguments: Any = importlib.import_module("vllm.utils.argparse_utils")
    parser = arguments.FlexibleArgumentParser()
    client.add_cli_args(parser)
    client.main(parser.parse_args())


if __name__ == "__main__":
    main()
