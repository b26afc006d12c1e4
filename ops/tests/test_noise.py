from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_ops.sampling import gumbel_noise, uniform_noise

WORD = 2**64
GAMMA = 0x9E3779B97F4A7C15


def mix(word: int) -> int:
    """SplitMix64's finalizer in unbounded integers."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def test_splitmix_of_the_test_yields_known_values() -> None:
    outputs = [mix(GAMMA * n % WORD) for n in (1, 2, 3)]  # of a generator that starts at 0
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(seed=st.integers(-(2**63), 2**63 - 1), step=st.integers(0, 2**40), token=st.integers(0, 300))
def test_uniform_noise_has_the_documented_bits(seed: int, step: int, token: int) -> None:
    key = mix((mix(seed % WORD) + (step + 1) * GAMMA) % WORD)
    bits = mix((key + (token + 1) * GAMMA) % WORD) >> 24 | 1
    (exact,) = struct.unpack("f", struct.pack("f", bits * 2.0**-40))
    actual = uniform_noise(torch.tensor([seed]), torch.tensor([step]), token + 1)
    assert actual.dtype == torch.float32
    assert float(actual[0, token]) == min(exact, 1 - 2.0**-24)


def unmixed(word: int) -> int:
    """Undo ``mix``."""
    word ^= word >> 31 ^ word >> 62
    word = word * pow(0x94D049BB133111EB, -1, WORD) % WORD
    word ^= word >> 27 ^ word >> 54
    word = word * pow(0xBF58476D1CE4E5B9, -1, WORD) % WORD
    return word ^ word >> 30 ^ word >> 60


@pytest.mark.parametrize(
    ("extreme", "uniform", "gumbel"),
    [(0, 2.0**-40, 40 * math.log(2)), (WORD - 1, 1 - 2.0**-24, -math.log(24 * math.log(2)))],
)
def test_the_extreme_hashes_give_finite_noise(extreme: int, uniform: float, gumbel: float) -> None:
    key = (unmixed(extreme) - GAMMA) % WORD
    word = unmixed((unmixed(key) - GAMMA) % WORD)
    seed = torch.tensor([word - WORD if word >= WORD // 2 else word])
    step = torch.zeros(1, dtype=torch.int64)
    assert uniform_noise(seed, step, 1).tolist() == [[uniform]]
    for dtype in (torch.float32, torch.float64):
        assert gumbel_noise(seed, step, 1, dtype).tolist() == [[pytest.approx(gumbel, rel=1e-6)]]


def noise(seeds: range, steps: range, num_tokens: int) -> torch.Tensor:
    """Return uniform noise ``[seeds, steps, tokens]`` in float64."""
    pairs = torch.tensor(list(itertools.product(seeds, steps)))
    flat = uniform_noise(pairs[:, 0].contiguous(), pairs[:, 1].contiguous(), num_tokens)
    return flat.double().reshape(len(seeds), len(steps), num_tokens)


def test_noise_is_uniform() -> None:
    u = noise(range(20), range(20), 500)
    assert 0 < float(u.min()) < float(u.max()) < 1
    count = u.numel()
    assert abs(float(u.mean()) - 1 / 2) < 4 / math.sqrt(12 * count)
    assert abs(float(u.var()) - 1 / 12) < 4 / math.sqrt(180 * count)
    bins = torch.bincount((u * 100).long().flatten(), minlength=100)
    chi_square = (bins - count / 100).square().sum() / (count / 100)
    assert chi_square < 148.2  # 0.1 % at 99 degrees of freedom


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("lag", [1, 2, 7])
def test_neighbouring_seeds_steps_and_tokens_do_not_correlate(axis: int, lag: int) -> None:
    u = noise(range(60), range(60), 60) - 0.5
    length = u.shape[axis] - lag
    products = u.narrow(axis, 0, length) * u.narrow(axis, lag, length) * 12
    assert abs(float(products.mean())) < 4 / math.sqrt(products.numel())


def test_seed_and_step_are_not_interchangeable() -> None:
    u = noise(range(30), range(30), 10)
    mirrored = u.transpose(0, 1)
    off_diagonal = ~torch.eye(30, dtype=torch.bool)
    assert not (u == mirrored)[off_diagonal].any()
    assert len(u.flatten().unique()) > 0.99 * u.numel()


def test_gumbel_noise_has_mean_and_variance_of_its_distribution() -> None:
    g = gumbel_noise(torch.arange(100), torch.arange(100), 5000, torch.float64)
    count = g.numel()
    assert abs(float(g.mean()) - 0.5772156649) < 4 * math.pi / math.sqrt(6 * count)
    assert abs(float(g.var()) - math.pi**2 / 6) < 4 * math.sqrt(4.4 / count) * math.pi**2 / 6
    assert g.isfinite().all()


def test_gumbel_noise_of_both_dtypes_differs_by_rounding() -> None:
    seeds = torch.arange(100)
    narrow, wide = (gumbel_noise(seeds, seeds, 5000, d) for d in (torch.float32, torch.float64))
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-6, atol=1e-6)
