"""A platform of a third party runs a model on kernels of torch, or on those of another platform."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interposer import (
    Capability,
    Config,
    Device,
    Explanation,
    Kernel,
    Memory,
    Platform,
    PlatformEntry,
    Resolver,
    Verdict,
    current_registry,
    explain,
    hookimpl,
    place,
    register,
)
from interposer_cpu import CPUPlatform
from interposer_engine import load
from interposer_ops.activations import silu_and_mul
from interposer_testing import conformance

MODEL = Path(__file__).parents[1] / "examples/models/stdlib-lm"
# An example, where it is installed, brings a norm for any platform.
OTHERS = frozenset({"interposer-example-norm"})


def policy(platform: str, **facts: Any) -> Config:
    return Config(platform=platform, disable=OTHERS, canary="off", **facts)


class Board(Platform):
    """A device that torch computes on, and that nobody has written a kernel for."""

    name = "board"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Verdict:
        return Verdict.accept("one board found")

    def devices(self) -> Sequence[Device]:
        return [Device(self.name, "cpu", "a board", self.capability("cpu"))]

    def capability(self, device: str) -> Capability:
        return Capability("board-1")

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        return [torch.float32]

    def memory(self, device: str) -> Memory:
        return Memory(total_bytes=1 << 33, free_bytes=1 << 32)

    def synchronize(self, device: str) -> None:
        pass


class Host(Board):
    """The processor under another name, with all its features."""

    name = "host"

    def capability(self, device: str) -> Capability:
        return CPUPlatform().capability(device)


def wrong(x: torch.Tensor) -> torch.Tensor:
    """Return the product without its activation."""
    gate, up = x.chunk(2, dim=-1)
    return gate * up


@contextmanager
def installed(
    platform: type[Platform], *kernels: Kernel, runs: tuple[str, ...] = ()
) -> Iterator[None]:
    entry = PlatformEntry(platform.name, f"{__name__}:{platform.__name__}", score=-5.0, runs=runs)
    provides = hookimpl(lambda: [entry])
    others = SimpleNamespace(interposer_records=hookimpl(lambda: [*kernels]))
    with (
        register(SimpleNamespace(interposer_records=provides), name="acme-platform"),
        register(others, name="acme-kernels"),
    ):
        yield


def chosen(explanation: Explanation) -> dict[str, set[str]]:
    """Return the kernels that were chosen for each op, by their qualified names."""
    found = defaultdict(set)
    for row in explanation.rows:
        if row.choice.request.kind == "kernel":
            found[row.choice.request.name].add(row.choice.chosen.qualified_name)
    return dict(found)


def everything(explanation: Explanation) -> list[tuple[str, str, str]]:
    return [
        (
            str(choice.request).replace(choice.request.platform, "it"),
            choice.chosen.qualified_name,
            choice.why,
        )
        for choice in (row.choice for row in explanation.rows)
        if choice.request.kind != "platform"
    ]


OF_TORCH = {
    "embedding": {"interposer-ops/embedding_index_select"},
    "fused_add_rms_norm": {"interposer-ops/fused_add_rms_norm_vector_norm"},
    "paged_attention": {"interposer-ops/paged_attention_sdpa"},
    "reshape_and_cache": {"interposer-ops/reshape_and_cache_index_copy"},
    "rms_norm": {"interposer-ops/rms_norm_vector_norm"},
    "rotary_embedding": {"interposer-ops/rotary_embedding_addcmul"},
    "silu_and_mul": {"interposer-ops/silu_and_mul_functional"},
}
# They are what torch has for it: one call for the first, and nothing that does more of the others.
REFERENCES = {
    name: {"interposer-ops/reference"} for name in ("apply_penalties", "linear", "sample_tokens")
}


PROMPTS = ["import os", "class Stack:\n    def "]


def told(platform: str) -> Explanation:
    return explain(MODEL, config=policy(platform), dtype="float32")


def tokens(platform: str, **facts: Any) -> list[tuple[int, ...]]:
    lm = load(MODEL, "float32", config=policy(platform, **facts))
    return [output.token_ids for output in lm.generate(PROMPTS, max_new_tokens=12)]


def test_a_platform_without_kernels_gets_the_kernels_of_torch() -> None:
    with installed(Board):
        assert chosen(told("board")) == OF_TORCH | REFERENCES


def test_tokens_equal_the_references() -> None:
    with installed(Board):
        pins = dict.fromkeys(OF_TORCH, "reference")
        assert tokens("board") == tokens("board", kernels=pins)


def test_a_platform_that_runs_the_kernels_of_another_gets_the_same_and_its_tokens() -> None:
    with installed(Host, runs=("cpu",)):
        lent, own = told("host"), told("cpu")
        assert everything(lent) == everything(own)
        assert tokens("host") == tokens("cpu")
    for row in lent.rows:
        platform = getattr(row.choice.chosen.record, "platform", "")
        said = "made for cpu, whose kernels host can run" in row.choice.notes
        assert said == (platform == "cpu")
    assert "note: made for cpu, whose kernels host can run\n" in str(lent)
    assert "whose kernels" not in str(own)


def test_without_that_statement_they_are_refused() -> None:
    with installed(Host):
        found = told("host")
    assert chosen(found) == OF_TORCH | REFERENCES
    refusals = [refusal for row in found.rows for refusal in row.choice.refusals]
    of_cpu = {r.reason for r in refusals if r.provider == "interposer-cpu 0.1.0"}
    # The platform of the package is refused as well: another one is pinned.
    assert of_cpu == {"runs on cpu, the request is for host", "accepted, but host is pinned"}


def test_what_they_need_is_judged_by_the_platforms_own_devices() -> None:
    with installed(Board, runs=("cpu",)):
        found = told("board")
    # What needs no feature runs: attention that is made of torch's operators for processors.
    (backend,) = (row.choice for row in found.rows if row.choice.request.kind == "attention")
    assert backend.chosen.qualified_name == "interposer-cpu/sdpa"
    inside = ("paged_attention", "reshape_and_cache")
    expected = {op: names for op, names in OF_TORCH.items() if op not in inside}
    assert chosen(found) == expected | REFERENCES
    (silu,) = (row.choice for row in found.rows if row.choice.request.name == "silu_and_mul")
    refused = {refusal.candidate: refusal.reason for refusal in silu.refusals}
    assert refused["silu_and_mul_native"].endswith("the device is board-1")


def test_what_it_runs_is_listed_as_fitting_the_device() -> None:
    with installed(Host, runs=("cpu",)):
        text = str(explain(config=policy("host")).all())
    assert "on cpu, fits the device: made for cpu, whose kernels host can run" in text


def test_a_kernel_for_the_other_platform_is_compared_with_the_reference_first() -> None:
    """Whoever provides the platform is trusted, and nobody else is."""
    strange = Kernel("silu_and_mul", "silu_and_mul_wrong", f"{__name__}:wrong", "cpu", score=99.0)
    config = Config(platform="host", disable=OTHERS, isolation="off")
    with installed(Host, strange, runs=("cpu",)):
        resolver = Resolver.at(place(config), config)
        dims = {"intermediate_size": 64}
        choice = resolver.kernel(silu_and_mul, torch.float32, dims, "").choice
    assert choice.chosen.name != "silu_and_mul_wrong"
    (refusal,) = (r for r in choice.refusals if r.candidate == "silu_and_mul_wrong")
    assert refusal.reason.startswith("departs from the reference of 'silu_and_mul'")


@pytest.mark.landing(1)
@pytest.mark.parametrize("runs", [(), ("cpu",)])
def test_the_suite_tests_the_kernels_that_the_platform_runs(runs: tuple[str, ...]) -> None:
    with installed(Host, runs=runs):
        registry, device = current_registry(Config(isolation="off")), Host().devices()[0]
        trials = list(conformance(registry, device, op="silu_and_mul", quick=True))
        names = {trial.candidate.name for trial in trials if trial.aspect == "numerics"}
        assert ("silu_and_mul_native" in names) == bool(runs)
        wrong = [trial.run() for trial in trials if trial.aspect == "numerics"]
    assert not any(wrong)
