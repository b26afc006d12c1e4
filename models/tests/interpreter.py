"""Models computed by Triton's interpreter, which a process is told of before it imports Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def interpreted(script: str, *arguments: str | Path) -> dict[str, Any]:
    """Return the JSON that a script next to this one prints: the chosen kernels, and results."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))
