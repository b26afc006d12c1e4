"""The ops that vLLM registers, and its layers with kernels inside, compute what ops here define."""

from __future__ import annotations

import pytest

from interposer_testing import verify

# While vLLM is imported, torch compiles something, and warns of what it calls itself.
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]


def test_vllm_ops_agree_with_the_references() -> None:
    report = verify("interposer-vllm", quick=True)
    assert report.in_state("wrong") == [], str(report)
    correct = {candidate.name for candidate in report.in_state("correct")}
    assert {"rms_norm_vllm", "silu_and_mul_vllm", "rotary_embedding_vllm"} <= correct


@pytest.mark.parametrize(
    ("distribution", "op"),
    [
        ("interposer-cpu", "linear"),
        ("interposer-ops", "linear"),
        ("interposer-cpu", "rms_norm"),
        ("interposer-cpu", "silu_and_mul"),
    ],
)
def test_kernels_agree_with_the_references_inside_vllm_layers(distribution: str, op: str) -> None:
    report = verify(distribution, op=op, host="vllm", quick=True)
    assert report.host.startswith("vllm 0.")
    assert report.state == "correct", str(report)
    cases = sum(t.cases for c in report.in_state("correct") for t in c.tallies)
    assert cases >= 20
