"""Ranks of two hosts, and of two platforms, share no memory and say what one process says.

A host is a namespace with a host name of its own, which is all that the ranks can tell.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from interposer import Config
from interposer_engine import LanguageModel, load

pytestmark = [pytest.mark.process, pytest.mark.slow]
PROMPTS = [[5, 6, 7, 8], [9] * 12]
PROGRAM = """
import json, sys
from datetime import timedelta
import torch.distributed as dist
import interposer
from interposer import Config
from interposer_engine import load
folder, port, rank, platform, prompts = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2,
                        timeout=timedelta(seconds=200))
lm = load(folder, "float32", config=Config(platform=platform), tensor_parallel=2, cache_tokens=256)
found = [list(done.token_ids) for done in lm.generate(json.loads(prompts), max_new_tokens=6)]
print(json.dumps([found, str(interposer.explain(lm))]))
"""


def has_namespaces() -> bool:
    """Return whether this user may have a host name in a namespace."""
    tool = shutil.which("unshare")
    command = [str(tool), "--uts", "hostname", "interposer-test"]
    return tool is not None and not subprocess.run(command, capture_output=True).returncode


def tokens(lm: LanguageModel) -> list[list[int]]:
    return [list(done.token_ids) for done in lm.generate(PROMPTS, max_new_tokens=6)]


def said(
    folder: Path, platforms: Sequence[str], within: Sequence[str] = ()
) -> list[tuple[list[list[int]], str]]:
    """Return the tokens and the explanation of two ranks, of which the second runs ``within``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank, platform in enumerate(platforms):
        own = {"TRITON_INTERPRET": "1"} if platform == "interpreter" else {}
        asked = [sys.executable, "-c", PROGRAM, str(folder), port, str(rank), platform]
        asked = [*(within if rank else ()), *asked, json.dumps(PROMPTS)]
        ranks.append(subprocess.Popen(asked, env=environment | own, stdout=subprocess.PIPE))
    try:
        return [tuple(json.loads(process.communicate(timeout=280)[0])) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_ranks_of_two_hosts_generate_the_tokens_of_one_process(llama: Path) -> None:
    if not has_namespaces():
        pytest.skip("unshare --uts is not there, or not permitted")
    elsewhere = ["unshare", "--uts", "sh", "-c", 'hostname interposer-test && exec "$@"', "sh"]
    expected = tokens(load(llama, "float32", config=Config(platform="cpu"), cache_tokens=256))
    for found, explanation in said(llama, ["cpu", "cpu"], elsewhere):
        assert found == expected
        assert (
            "not shared_memory (interposer-cpu 0.1.0): hosts is 2, must be at most 1" in explanation
        )


def test_ranks_of_two_platforms_generate_the_tokens_of_one_process(llama: Path) -> None:
    pytest.importorskip("triton")
    expected = tokens(load(llama, "float32", config=Config(platform="cpu"), cache_tokens=256))
    ours, others = said(llama, ["cpu", "interpreter"])
    assert ours[0] == others[0] == expected
    assert "not shared_memory (interposer-cpu 0.1.0): platforms is 2, must be at most 1" in ours[1]
    assert "_triton (interposer-ops" in others[1]
