"""Ranks whose hosts have different names share no memory, and say what one process says.

The second rank runs in a namespace with a host name of its own, as nothing else of a machine is.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from interposer import Config
from interposer_models import load

SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "stdlib-lm"
PROMPTS = ["import os", "def f("]
PROGRAM = """
import json, sys
from datetime import timedelta
import torch.distributed as dist
import interposer
from interposer import Config
from interposer_models import load
folder, port, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2,
                        timeout=timedelta(seconds=120))
lm = load(folder, "float32", config=Config(platform="cpu"), tensor_parallel=2, cache_tokens=512)
found = [list(done.token_ids) for done in lm.generate(PROMPTS, max_new_tokens=12)]
print(json.dumps([found, str(interposer.explain(lm))]))
"""


def has_namespaces() -> bool:
    """Return whether this user may have a host name in a namespace."""
    tool = shutil.which("unshare")
    command = [str(tool), "--uts", "hostname", "interposer-test"]
    return tool is not None and not subprocess.run(command, capture_output=True).returncode


@pytest.mark.slow
def test_ranks_of_two_host_names_say_what_one_process_says() -> None:
    if not has_namespaces():
        pytest.skip("unshare --uts is not there, or not permitted")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    program = PROGRAM.replace("PROMPTS", repr(PROMPTS))
    command = [sys.executable, "-c", program, str(SHIPPED), port]
    elsewhere = ["unshare", "--uts", "sh", "-c", 'hostname interposer-test && exec "$@"', "sh"]
    with (
        subprocess.Popen([*elsewhere, *command, "1"], env=environment, stdout=subprocess.PIPE) as b,
        subprocess.Popen([*command, "0"], env=environment, stdout=subprocess.PIPE) as a,
    ):
        told = [json.loads(process.communicate(timeout=240)[0]) for process in (a, b)]
    lm = load(SHIPPED, "float32", config=Config(platform="cpu"), cache_tokens=512)
    expected = [list(done.token_ids) for done in lm.generate(PROMPTS, max_new_tokens=12)]
    for found, explanation in told:
        assert found == expected
        assert "hosts=2" in explanation
        assert (
            "not shared_memory (interposer-cpu 0.1.0): hosts is 2, must be at most 1" in explanation
        )
