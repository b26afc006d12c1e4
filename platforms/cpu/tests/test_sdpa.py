"""Dimensions: T tokens, N heads, K kv heads, D head size, P pages, S page size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples
from torch.nn.functional import scaled_dot_product_attention

from interposer import (
    AttentionBatch,
    AttentionSpec,
    Capability,
    Config,
    Registry,
    Resolver,
    Site,
    current_registry,
)
from interposer.tooling import Plugins
from interposer_cpu._attention import SdpaBackend
from interposer_cpu._attention_plan import Decode, Decodes, Plan, Prompt
from interposer_cpu._platform import CPUPlatform

NUM_PAGES = 96
CAPABILITY = Capability("x86_64")


def spec(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    dtype: torch.dtype = torch.float32,
    page_size: int = 4,
    window_tokens: int | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        cache_dtype=dtype,
        page_size=page_size,
        scale=head_size**-0.5,
        window_tokens=window_tokens,
    )


class Sequences:
    """Growing sequences on one cache, each step checked against float64 without any cache."""

    def __init__(self, spec: AttentionSpec, pages: list[int], seed: int = 0) -> None:
        resolver = Resolver(Registry(Plugins()), CPUPlatform().devices()[0], Config())
        self.backend = SdpaBackend(spec, Site(resolver, "attention", spec.dtype))
        self.spec = spec
        layout = self.backend.kv_layout()
        self.cache = layout.allocate(1, len(pages), "cpu")[0].fill_(torch.nan)
        self.free = list(pages)
        self.pages: dict[int, list[int]] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)
        self.plan = Plan(torch.empty(0), None, ())

    def step(self, new_tokens: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the backend's and the exact result for new tokens of each sequence."""
        spec, slots, starts, lengths, expected = self.spec, [], [0], [], []
        total = sum(new_tokens.values())
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        fused = torch.randn(total, sum(heads), spec.head_size, generator=self.generator)
        query, key, value = fused.to(spec.dtype).split(heads, dim=1)
        for name, count in new_tokens.items():
            rows = slice(starts[-1], starts[-1] + count)
            empty = key[:0].double()
            self.keys[name] = torch.cat((self.keys.get(name, empty), key[rows].double()))
            self.values[name] = torch.cat((self.values.get(name, empty), value[rows].double()))
            length = len(self.keys[name])
            slots += [self._slot(name, at) for at in range(length - count, length)]
            starts.append(rows.stop)
            lengths.append(length)
            expected.append(self._exact(query[rows], name))
        table = [torch.tensor(self.pages[name]) for name in new_tokens]
        batch = AttentionBatch(
            query_starts=torch.tensor(starts),
            seq_lens=torch.tensor(lengths),
            page_table=torch.nn.utils.rnn.pad_sequence(table, batch_first=True),
            slots=torch.tensor(slots, dtype=torch.int64),
            max_query_tokens=max(new_tokens.values()),
            max_seq_tokens=max(lengths),
        )
        self.plan = self.backend.plan(batch)
        actual = self.backend.forward(query, key, value, self.cache, self.plan)
        assert actual.dtype == spec.dtype
        return actual, torch.cat(expected)

    def _slot(self, name: int, position: int) -> int:
        pages = self.pages.setdefault(name, [])
        if position // self.spec.page_size == len(pages):
            pages.append(self.free.pop(0))
        return pages[position // self.spec.page_size] * self.spec.page_size + (
            position % self.spec.page_size
        )

    def _exact(self, query: torch.Tensor, name: int) -> torch.Tensor:
        group = self.spec.num_heads // self.spec.num_kv_heads
        keys = self.keys[name].repeat_interleave(group, dim=1)
        values = self.values[name].repeat_interleave(group, dim=1)
        length, count = len(keys), len(query)
        scores = torch.einsum("qnd,lnd->nql", query.double(), keys) * self.spec.scale
        distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
        visible = (distance >= 0) & (distance < (self.spec.window_tokens or length))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("nql,lnd->qnd", weights, values)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 4 * torch.finfo(actual.dtype).eps * (1 + float(expected.abs().max()))
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=0)


def page_orders() -> st.SearchStrategy[list[int]]:
    ordered = list(range(NUM_PAGES))
    return st.just(ordered) | st.permutations(ordered)


@settings(max_examples=num_examples(60))
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    head_size=st.sampled_from([8, 20, 64]),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    pages=page_orders(),
    steps=st.lists(
        st.dictionaries(st.integers(0, 3), st.integers(0, 7), min_size=1).filter(
            lambda step: any(step.values())
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_mixed_batches_are_exact(
    heads: tuple[int, int],
    head_size: int,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    pages: list[int],
    steps: list[dict[int, int]],
) -> None:
    sequences = Sequences(spec(*heads, head_size, dtype, page_size, window), pages)
    for step in steps:
        begun = {name: count for name, count in step.items() if count or name in sequences.keys}
        if any(begun.values()):
            assert_close(*sequences.step(begun))


@pytest.mark.landing(22)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_sequence_is_correct_over_chunked_prefill_and_decoding(
    window: int | None, shuffled: bool, dtype: torch.dtype, num_kv_heads: int
) -> None:
    order = torch.randperm(NUM_PAGES).tolist() if shuffled else list(range(NUM_PAGES))
    attention_spec = spec(4, num_kv_heads, dtype=dtype, window_tokens=window)
    sequences = Sequences(attention_spec, order)
    for count in (9, 6, 1, 1, 13, 1):
        assert_close(*sequences.step({0: count}))


@pytest.mark.parametrize("shuffled", [False, True])
def test_long_sequences_are_decoded_one_by_one(shuffled: bool) -> None:
    order = torch.randperm(NUM_PAGES).tolist() if shuffled else list(range(NUM_PAGES))
    sequences = Sequences(spec(4, 4, head_size=128, page_size=16), order)
    assert_close(*sequences.step({0: 90, 1: 70, 2: 3}))
    assert_close(*sequences.step({2: 1, 0: 1, 1: 1}))
    assert sum(isinstance(part, Decode) for part in sequences.plan.parts) == 3
    sequences.step({3: 5})
    assert_close(*sequences.step({2: 1, 0: 1, 3: 1}))
    assert {type(part) for part in sequences.plan.parts} == {Decode, Decodes}


def test_consecutive_pages_are_read_in_place() -> None:
    sequences = Sequences(spec(), list(range(NUM_PAGES)))
    sequences.step({0: 11})
    (prompt,) = sequences.plan.parts
    assert isinstance(prompt, Prompt)
    assert prompt.causal
    assert prompt.mask is None
    sequences.step({0: 1})
    (decode,) = sequences.plan.parts
    assert isinstance(decode, Decode)
    assert decode.span.pages is None
    assert sequences.plan.first_slot == 11


@pytest.mark.parametrize(
    ("prompts", "num_sequences"),
    [
        ({0: 80, 1: 80, 2: 80, 3: 1, 4: 80}, [3, 1]),
        ({0: 63, 1: 63}, [1, 1]),
        ({0: 100, 1: 101}, [1, 1]),
        ({0: 400, 1: 400}, [1, 1]),
    ],
)
def test_short_prompts_of_equal_length_are_one_call(
    prompts: dict[int, int], num_sequences: list[int]
) -> None:
    attention_spec = spec(dtype=torch.bfloat16, num_heads=4, num_kv_heads=2, head_size=32)
    sequences = Sequences(attention_spec, list(range(4 * NUM_PAGES)))
    sequences.step({3: 7})
    assert_close(*sequences.step(prompts))
    parts = [part for part in sequences.plan.parts if isinstance(part, Prompt)]
    assert [part.num_sequences for part in parts] == num_sequences
    # A prompt behind cached tokens: masked products instead of causal ones.
    assert_close(*sequences.step(dict.fromkeys(prompts, 70)))


def test_a_window_reads_no_more_than_its_tokens() -> None:
    sequences = Sequences(spec(window_tokens=5), list(range(NUM_PAGES)))
    sequences.step({0: 30})
    sequences.step({0: 1})
    (decode,) = sequences.plan.parts
    assert isinstance(decode, Decode)
    assert decode.span.num_tokens == 5


def test_an_empty_batch_is_empty() -> None:
    sequences = Sequences(spec(), list(range(NUM_PAGES)))
    nothing = torch.empty(0, dtype=torch.int64)
    batch = AttentionBatch(
        query_starts=torch.zeros(1, dtype=torch.int64),
        seq_lens=nothing,
        page_table=nothing.view(0, 1),
        slots=nothing,
        max_query_tokens=1,
        max_seq_tokens=1,
    )
    plan = sequences.backend.plan(batch)
    query, key = torch.empty(0, 4, 16), torch.empty(0, 2, 16)
    assert sequences.backend.forward(query, key, key, sequences.cache, plan).shape == (0, 4, 16)


@pytest.mark.parametrize("num_kv_heads", [2, 8])
@pytest.mark.parametrize("prompt", [1, 64])
def test_bfloat16_is_as_accurate_as_torch_with_repeated_keys(
    num_kv_heads: int, prompt: int
) -> None:
    attention_spec = spec(8, num_kv_heads, head_size=64, dtype=torch.bfloat16, page_size=16)
    sequences = Sequences(attention_spec, list(range(NUM_PAGES)))
    sequences.step({0: 200})
    state = sequences.generator.get_state()
    actual, exact = sequences.step({0: prompt})
    sequences.generator.set_state(state)
    fused = torch.randn(prompt, 8 + 2 * num_kv_heads, 64, generator=sequences.generator)
    query = fused[:, :8].to(torch.bfloat16)
    keys, values = (
        cached[0].to(torch.bfloat16).repeat_interleave(8 // num_kv_heads, dim=1).transpose(0, 1)
        for cached in (sequences.keys, sequences.values)
    )
    length = keys.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool).tril()[length - prompt :]
    usual = scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=visible
    )[0].transpose(0, 1)
    error, usual_error = ((out.double() - exact).abs().mean() for out in (actual, usual))
    # Plain products round the weights of the softmax once more than the fused kernel does: an
    # error as large as that of rounding the result, and independent of it.
    assert error <= 2**0.5 * usual_error


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"type": "encoder"}, "encoder"),
        ({"dtype": torch.float64, "cache_dtype": torch.float64}, "float64"),
        ({"cache_dtype": torch.float8_e4m3fn}, "float8_e4m3fn"),
        ({"num_kv_heads": 3}, "3 kv heads"),
        ({"softcap": 30.0}, "softcap"),
        ({"sinks": True}, "sinks"),
        ({"latent": True}, "latent"),
        ({"sparse": True}, "sparse"),
        ({"prefix_lm": True}, "prefix_lm"),
    ],
)
def test_refusals_have_reasons(change: dict[str, object], reason: str) -> None:
    facts = {name: getattr(spec(), name) for name in AttentionSpec.__slots__}
    verdict = SdpaBackend.accepts(AttentionSpec(**{**facts, **change}), CAPABILITY)
    assert not verdict
    assert reason in verdict.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sdpa_can_be_requested_for_plain_decoders(dtype: torch.dtype) -> None:
    attention_spec = Config(attention={"decoder": "sdpa"})
    device = CPUPlatform().devices()[0]
    site = Site(Resolver(current_registry(), device, attention_spec), "attention", dtype)
    assert isinstance(site.resolver.attention(spec(dtype=dtype), site), SdpaBackend)
