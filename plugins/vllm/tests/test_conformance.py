"""The ops that vLLM registers, and its layers with kernels inside, compute what ops here define."""

from __future__ import annotations

import pytest

from interposer_testing import verify

# torch's compiler, which vLLM imports, warns of what it uses itself.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_ops_of_vllm_compute_what_ops_define() -> None:
    report = verify("interposer-vllm", quick=True)
    assert report.in_state("wrong") == [], str(report)
    correct = {candidate.name for candidate in report.in_state("correct")}
    assert {"rms_norm_vllm", "silu_and_mul_vllm", "rotary_embedding_vllm"} <= correct


@pytest.mark.parametrize("distribution", ["interposer-cpu", "interposer-ops"])
def test_kernels_compute_the_same_inside_layers_of_vllm(distribution: str) -> None:
    report = verify(distribution, op="linear", host="vllm", quick=True)
    assert report.host.startswith("vllm 0.")
    assert report.state == "correct", str(report)
    cases = sum(t.cases for c in report.in_state("correct") for t in c.tallies)
    assert cases >= 20
