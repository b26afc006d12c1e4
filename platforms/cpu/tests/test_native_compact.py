"""Compact weights: bfloat16 in 12 bits per number, with the results of plain weights."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples

from interposer import Capability, Config, Device, Resolver, Rule, current_registry
from interposer_cpu import native
from interposer_cpu._kernels import embedding, linear
from interposer_ops.embedding import embedding as embedding_op
from interposer_ops.linear import linear as linear_op

pytestmark = pytest.mark.native

LEVELS = native.levels()
# From registers, from pieces of a block, and from whole blocks.
ROWS = (*range(1, 10), 12, 13, 16, 17, 31, 32, 33, 70)


SIZES = {"in_features": 1024, "out_features": 1024, "biased": False}


def described(features: set[str], config: Config | None = None) -> Resolver:
    capability = Capability("x86_64", frozenset(features))
    device = Device("cpu", "cpu", "described", capability)
    return Resolver(current_registry(), device, config or Config(), described=True)


@pytest.fixture
def forced() -> Iterator[None]:
    yield
    native.force_level(None)


def trained(out_features: int, in_features: int, seed: int = 0) -> torch.Tensor:
    """Draw numbers with exponents like those of trained weights, and some rare exponents."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.02 * torch.randn(out_features, in_features, generator=generator)
    rare = torch.tensor([0.0, -0.0, 1e-30, 1e-38, -1e-40, 3e38, 7.0])
    flat = weight.flatten()
    places = torch.randperm(flat.numel(), generator=generator)[: len(rare)]
    flat[places] = rare[: len(places)]
    return weight.bfloat16()


def num_bytes(packed: tuple[torch.Tensor, int]) -> int:
    return packed[0].numel()


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), two.view(torch.int16))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(64, 1024), (150, 1032), (1003, 136), (256, 688)]
)
def test_results_have_the_bits_of_a_plain_weight(
    out_features: int, in_features: int, level: str, forced: None
) -> None:
    native.force_level(level)
    weight = trained(out_features, in_features)
    bias = torch.randn(out_features).bfloat16()
    plain = linear.pack(weight, bias)["weight"]
    compact = linear.pack_compact(weight, bias)["weight"]
    assert num_bytes(compact) < 0.8 * num_bytes(plain)
    for rows in ROWS:
        x = torch.randn(rows, in_features).bfloat16()
        assert same_bits(linear.linear(x, compact, None), linear.linear(x, plain, None)), rows


@settings(max_examples=num_examples(25), deadline=None)
@given(st.integers(1, 200), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_a_weight_is_restored_bit_for_bit(
    out_features: int, steps: int, is_random: bool, seed: int
) -> None:
    weight = trained(out_features, 8 * steps, seed)
    if is_random:  # all exponents, so that the weight stays plain
        weight = torch.randint(-(1 << 15), 1 << 15, weight.shape).short().view(torch.bfloat16)
    packed = linear.pack_compact(weight, None)
    into = torch.empty_like(weight)
    linear.unpack(**packed, into={"weight": into})
    assert same_bits(into, weight)


@pytest.mark.parametrize("in_features", [1023, 1030])
def test_a_weight_that_does_not_fill_words_stays_plain(in_features: int) -> None:
    weight = trained(128, in_features)
    assert num_bytes(linear.pack_compact(weight, None)["weight"]) == num_bytes(
        linear.pack(weight, None)["weight"]
    )


def test_infinities_and_nan_are_kept() -> None:
    weight = trained(64, 512)
    weight[3, 7], weight[5, 9] = float("inf"), float("nan")
    packed = linear.pack_compact(weight, None)["weight"]
    out = linear.linear(torch.ones(1, 512).bfloat16(), packed, None)
    assert out[0, 3] == float("inf")
    assert out[0, 5].isnan()
    assert out.isfinite().sum() == 62


def test_a_tied_table_and_head_share_one_copy() -> None:
    weight = trained(300, 64)
    table = embedding.pack_compact_embedding(weight)["weight"]
    head = linear.pack_compact(weight, None)["weight"]
    assert table[0][0] is head[0]
    ids = torch.tensor([0, 299, 64, 17])
    assert same_bits(embedding.embedding(ids, table), weight[ids])


@pytest.mark.parametrize(
    ("features", "chosen"),
    [
        ({"avx512_bf16"}, "compact"),
        ({"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}, "compact"),
        (set(), "native"),
    ],
)
def test_a_user_gets_compact_weights_with_dot_products_of_bfloat16(
    features: set[str], chosen: str
) -> None:
    needs = native.NEEDS["x86_64"]
    all_features = needs["avx2"] | needs["avx512"] | needs["avx512_vnni"] | features
    prefer = {name: Rule(prefer=[f"{name}_compact"]) for name in ("linear", "embedding")}
    resolver = described(all_features, Config(kernels=prefer))
    choice = resolver.kernel(linear_op, torch.bfloat16, SIZES, "").choice
    assert choice.chosen.name == f"linear_{chosen}"
    is_noted = "keeps bfloat16 weights in 12 bits per number, without loss" in choice.notes
    assert is_noted == (chosen == "compact")
    tied = {"vocab_size": 1024, "hidden_size": 64, "tied": True}
    table = resolver.kernel(embedding_op, torch.bfloat16, tied, "").choice
    assert table.chosen.name == f"embedding_{chosen}"


def test_weights_stay_plain_unless_a_user_asks() -> None:
    resolver = described(set[str]().union(*native.NEEDS["x86_64"].values()))
    choice = resolver.kernel(linear_op, torch.bfloat16, SIZES, "").choice
    assert choice.chosen.name == "linear_native"
