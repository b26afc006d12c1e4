"""Spoiled checkpoints of every scheme and kind of family load or raise a documented error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.forks import forks

from interposer import current_registry
from interposer.records import SchemeEntry

SCRIPT = Path(__file__).parent / "fuzz_checkpoints.py"
METHODS = sorted(
    {
        record.method
        for plugin, record in current_registry().records(SchemeEntry)
        if plugin.distribution == "interposer-quantization" and record.examples
    }
)
# A family of each kind: dense, with norms around its parts, with fused projections and two sets of
# angles, mixtures, groups of experts, latent attention, parts side by side, layer norms, learned
# positions, chunks, settings of attention apart, and encoders.
FAMILIES = (
    "llama",
    "gemma3",
    "phi3",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v32",
    "gemma4",
    "bloom",
    "cohere2",
    "starcoder2",
    "gpt2",
    "llama4",
    "mpt",
    "bart",
    "t5gemma",
)


def check(method: str, count: int, seed: int) -> None:
    """Fail with the mutations that crash, hang, take too much memory, or raise anything else."""
    done = forks().run(SCRIPT, method, f"--count={count}", f"--seed={seed}", timeout=3000)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert not report["wrong"], "\n\n".join(report["wrong"][:5])
    found = report["found"]
    assert sum(found.values()) == count
    # Some spoil what nobody reads, and some are found by every kind of check.
    assert found.get("", 0) < count / 2
    assert "CheckpointError" in found
    assert "ConfigError" in found or method in FAMILIES


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", [*METHODS, *FAMILIES])
def test_two_thousand_spoiled_checkpoints_load_or_raise_an_interposer_error(method: str) -> None:
    check(method, count=2000, seed=1)
