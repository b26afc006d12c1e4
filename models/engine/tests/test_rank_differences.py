"""Processes of torchrun that differ are told in what, on every one of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tests.forks import forks
from tests.waiting import WAIT_SECONDS

PROGRAM = Path(__file__).with_name("rank_differences.py")


@pytest.fixture(scope="module")
def told(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank said of each difference."""
    folder = tmp_path_factory.mktemp("differences")
    for name in ("same", "config", "tokenizer", "weights"):
        shutil.copytree(llama, folder / name)
    config = json.loads((folder / "config" / "config.json").read_text())
    (folder / "config" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    weights = folder / "weights" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1  # of the same size, as of a model that was trained further
    weights.write_bytes(content)
    program = forks().command(PROGRAM, folder)
    options = ("--standalone", "--nproc-per-node", "2", "--no-python")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forks().run(
        *("-m", "torch.distributed.run", *options, *program), env=environment, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.landing(2)
@pytest.mark.process
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("config", "rank 1 has a checkpoint with the digest "),
        ("tokenizer", "rank 1 has a tokenizer and defaults with the digest "),
        ("weights", "rank 1 has weights with the digest "),
        ("seed", "rank 1 has seed 1, and rank 0 0"),
        ("offload", "rank 1 has offload 100%, and rank 0 None"),
        ("prompt", "rank 1 had other requests or computed other tokens than rank 0 before step"),
    ],
)
def test_every_rank_reports_a_difference(told: list[dict[str, str]], what: str, said: str) -> None:
    for of_rank in told:
        assert said in of_rank[what]
        assert of_rank["nothing"] == ""
