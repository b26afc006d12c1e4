"""The suite's check of attention backends blames wrong ones, and only those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from interposer import AttentionBackend, AttentionBatch, AttentionSpec, KVCacheLayout, Site
from interposer.errors import MissingMemberError
from interposer_ops.attention import FlexBackend, SdpaBackend
from interposer_ops.layers.attention import PagedBackend
from interposer_testing import (
    attention_specs,
    check_attention,
    check_attention_batches,
    check_attention_determinism,
)


def spec_of(dtype: torch.dtype, mask: str, cache: str = "") -> AttentionSpec:
    spec_label = f"GQA {mask} head 32 page 4 {cache}".rstrip()
    return next(s for label, s in attention_specs() if label == spec_label and s.dtype == dtype)


class HeadsFirst(PagedBackend):
    """Right: keeps its cache ``[P, 2, K, S, D]`` with the pages innermost but one in memory."""

    def kv_layout(self) -> KVCacheLayout:
        spec = self.spec
        page_shape = (2, spec.num_kv_heads, spec.page_size, spec.head_size)
        return KVCacheLayout(page_shape, 0, (1, 2, 3, 0, 4), spec.cache_dtype)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        cache: torch.Tensor,
        plan: AttentionBatch,
        **options: Any,
    ) -> torch.Tensor:
        return super().forward(query, key, value, cache.permute(1, 0, 3, 2, 4), plan, **options)


class Filling(PagedBackend):
    """Right: writes its result to memory that it is given."""

    def forward(self, *step: Any, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        result = super().forward(*step, **options)
        return result if out is None else out.copy_(result)


class LeavingOut(Filling):
    def forward(self, *step: Any, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        return super().forward(*step, **options)


class FillingHalf(Filling):
    def forward(self, *step: Any, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        result = super().forward(*step, **options)
        if out is None:
            return result
        out[..., ::2] = result[..., ::2]
        return out


class WithoutWindow(PagedBackend):
    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(replace(spec, window_tokens=None), site)


class WithoutSoftcap(PagedBackend):
    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(replace(spec, softcap=None), site)


class OfUsualScale(PagedBackend):
    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(replace(spec, scale=spec.head_size**-0.5), site)


class ReadingWholePages(PagedBackend):
    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        size = self.spec.page_size
        return replace(batch, seq_lens=(batch.seq_lens + size - 1) // size * size)


class TakingPagesForConsecutive(PagedBackend):
    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        table = batch.page_table[:, :1] + torch.arange(batch.page_table.shape[1])
        return replace(batch, page_table=table.clamp(max=int(batch.page_table.max())))


class WritingToTheNeighbour(PagedBackend):
    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return replace(batch, slots=batch.slots ^ 1)


class ForgettingEarlierSteps(PagedBackend):
    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        cache: torch.Tensor,
        plan: AttentionBatch,
        **options: Any,
    ) -> torch.Tensor:
        return super().forward(query, key, value, torch.zeros_like(cache), plan, **options)


class SpendingItsPlan(PagedBackend):
    def plan(self, batch: AttentionBatch) -> Any:
        return [batch]

    def forward(
        self, query: Any, key: Any, value: Any, cache: torch.Tensor, plan: Any, **options: Any
    ) -> torch.Tensor:
        batch = plan.pop() if plan else None
        return (
            query if batch is None else super().forward(query, key, value, cache, batch, **options)
        )


class ScalingTheQueryInPlace(PagedBackend):
    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        cache: torch.Tensor,
        plan: AttentionBatch,
        **options: Any,
    ) -> torch.Tensor:
        out = super().forward(query, key, value, cache, plan, **options)
        query.mul_(self.spec.scale)
        return out


class ReturningFloat32(PagedBackend):
    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        cache: torch.Tensor,
        plan: AttentionBatch,
        **options: Any,
    ) -> torch.Tensor:
        return super().forward(query, key, value, cache, plan, **options).float()


class FlatteningHeads(PagedBackend):
    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        cache: torch.Tensor,
        plan: AttentionBatch,
        **options: Any,
    ) -> torch.Tensor:
        return super().forward(query, key, value, cache, plan, **options).flatten(1)


class MixingHeads(PagedBackend):
    """Query heads take turns over the kv heads, instead of standing in groups."""

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        cache: torch.Tensor,
        plan: AttentionBatch,
        **options: Any,
    ) -> torch.Tensor:
        kv_heads = self.spec.num_kv_heads
        order = torch.arange(query.shape[1]).view(-1, kv_heads).T.flatten()
        out = super().forward(query[:, order], key, value, cache, plan, **options)
        return out[:, order.argsort()]


@pytest.mark.landing(6)
@pytest.mark.parametrize("mask", ["full", "window", "softcap", "window+softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [PagedBackend, HeadsFirst])
def test_correct_backends_pass(
    backend: type[AttentionBackend],
    dtype: torch.dtype,
    mask: str,
    make_site: Callable[..., Site],
) -> None:
    assert check_attention(backend, spec_of(dtype, mask), make_site("attention", dtype)) == []


@pytest.mark.landing(11)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("backend", "mask", "check"),
    [
        (WithoutWindow, "window", "value"),
        (WithoutSoftcap, "softcap", "value"),
        (OfUsualScale, "full", "value"),
        (ReadingWholePages, "full", "value"),
        (TakingPagesForConsecutive, "full", "value"),
        (WritingToTheNeighbour, "full", "value"),
        (ForgettingEarlierSteps, "full", "value"),
        (SpendingItsPlan, "full", "value"),
        (ScalingTheQueryInPlace, "full", "mutation"),
        (FlatteningHeads, "full", "shape"),
        (MixingHeads, "full", "value"),
    ],
)
def test_wrong_backends_fail(
    backend: type[AttentionBackend],
    mask: str,
    check: str,
    dtype: torch.dtype,
    make_site: Callable[..., Site],
) -> None:
    faults = check_attention(backend, spec_of(dtype, mask), make_site("attention", dtype))
    assert check in {fault.check for fault in faults}


def test_a_wrong_dtype_fails(make_site: Callable[..., Site]) -> None:
    spec, site = spec_of(torch.bfloat16, "full"), make_site("attention", torch.bfloat16)
    faults = check_attention(ReturningFloat32, spec, site)
    assert [fault.check for fault in faults] == ["dtype"]


@pytest.mark.parametrize("quick", [False, True])
def test_labels_are_unique_within_a_dtype(quick: bool) -> None:
    labels = [(label, spec.dtype) for label, spec in attention_specs(quick=quick)]
    assert len(set(labels)) == len(labels)


def test_few_specs_have_every_value_of_all() -> None:
    quick_specs, all_specs = (dict(attention_specs(quick=quick)) for quick in (True, False))
    assert len(quick_specs) * 4 < len(all_specs)
    for name in ("num_kv_heads", "head_size", "page_size", "window_tokens", "softcap"):
        assert {getattr(s, name) for s in quick_specs.values()} == {
            getattr(s, name) for s in all_specs.values()
        }
    caches = [
        {(s.cache_dtype, s.head_scales, s.sinks) for s in some.values()}
        for some in (quick_specs, all_specs)
    ]
    assert caches[0] == caches[1]


class WithoutSinks(PagedBackend):
    def forward(self, *step: Any, sinks: Any = None, **options: Any) -> torch.Tensor:
        return super().forward(*step, **options)


class SharingTheFirstSink(PagedBackend):
    def forward(self, *step: Any, sinks: Any = None, **options: Any) -> torch.Tensor:
        return super().forward(*step, sinks=sinks[:1].expand_as(sinks), **options)


class PromisingMuch(AttentionBackend):
    """Wrong: accepts specs whose keywords its ``forward`` does not take."""

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Any) -> Any:
        return PagedBackend.accepts(spec, capability)

    def kv_layout(self) -> KVCacheLayout:
        return PagedBackend.kv_layout(self)  # type: ignore[arg-type]

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(self, *step: Any) -> torch.Tensor:
        return step[0]  # type: ignore[no-any-return]


@pytest.mark.landing(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["full", "window", "softcap", "window+softcap"])
def test_sinks_are_checked(dtype: torch.dtype, mask: str, make_site: Callable[..., Site]) -> None:
    spec, site = spec_of(dtype, mask, "sinks"), make_site("attention", dtype)
    assert spec.sinks
    assert check_attention(PagedBackend, spec, site) == []
    for wrong in (WithoutSinks, SharingTheFirstSink):
        assert "value" in {fault.check for fault in check_attention(wrong, spec, site)}
    assert check_attention_determinism(PagedBackend, spec, site) == []


class WithoutPrefixes(PagedBackend):
    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(replace(spec, prefix_lm=False), site)


class PrefixesOfWholeSteps(PagedBackend):
    """Wrong: takes all tokens of a sequence's first step for its prompt."""

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        prefixes = None if batch.prefix_lens is None else batch.seq_lens
        return replace(batch, prefix_lens=prefixes)


class PrefixesOfOneTokenLess(PagedBackend):
    """Wrong: the last token of a prompt is seen by those behind it alone."""

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        prefixes = batch.prefix_lens
        return replace(batch, prefix_lens=None if prefixes is None else prefixes - 1)


@pytest.mark.landing(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", ["prefix-LM", "prefix-LM with ALiBi"])
def test_prefixes_are_checked(
    dtype: torch.dtype, extra: str, make_site: Callable[..., Site]
) -> None:
    spec, site = spec_of(dtype, "full", extra), make_site("attention", dtype)
    assert spec.prefix_lm
    assert check_attention(PagedBackend, spec, site) == []
    for wrong in (WithoutPrefixes, PrefixesOfWholeSteps, PrefixesOfOneTokenLess):
        assert "value" in {fault.check for fault in check_attention(wrong, spec, site)}
    assert check_attention_determinism(PagedBackend, spec, site) == []
    windowed = spec_of(dtype, "window", extra)
    assert check_attention(PagedBackend, windowed, site) == []


class UsualSlopes(PagedBackend):
    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(replace(spec, alibi_bias_max=8.0), site)


def test_slopes_are_checked(make_site: Callable[..., Site]) -> None:
    spec = spec_of(torch.float32, "full", "ALiBi of long contexts")
    site = make_site("attention", torch.float32)
    assert check_attention(PagedBackend, spec, site) == []
    assert "value" in {fault.check for fault in check_attention(UsualSlopes, spec, site)}


@pytest.mark.parametrize(
    ("extra", "keyword"),
    [("sinks", "sinks"), ("e4m3", "scales"), ("shared", "stored"), ("source", "stored")],
)
def test_accepting_a_spec_without_its_keyword_fails(
    extra: str, keyword: str, make_site: Callable[..., Site]
) -> None:
    spec, site = spec_of(torch.float32, "full", extra), make_site("attention", torch.float32)
    message = f"PromisingMuch accepted a spec with .*, but its forward takes no '{keyword}'"
    with pytest.raises(MissingMemberError, match=message):
        check_attention(PromisingMuch, spec, site)
    assert PagedBackend.takes(keyword)
    assert not PromisingMuch.takes(keyword)


def test_memory_for_the_output_is_checked(make_site: Callable[..., Site]) -> None:
    spec, site = spec_of(torch.float32, "full"), make_site("attention", torch.float32)
    assert check_attention(Filling, spec, site) == []
    for wrong, check in ((LeavingOut, "structure"), (FillingHalf, "value")):
        assert check in {fault.check for fault in check_attention(wrong, spec, site)}


class WritingQueries(PagedBackend):
    """Wrong: writes the cache while it reads stored keys, though its result is right."""

    def forward(self, *step: Any, stored: bool = False, **options: Any) -> torch.Tensor:
        out = super().forward(*step, stored=stored, **options)
        if stored:
            cache, plan = step[3:]
            cache.flatten(1, 2)[0, plan.slots] += 1
        return out


class AttendingBeforeTheStep(PagedBackend):
    def forward(self, *step: Any, stored: bool = False, **options: Any) -> torch.Tensor:
        if stored:
            *tensors, plan = step
            earlier = replace(plan, seq_lens=(plan.seq_lens - 1).clamp(min=1))
            step = (*tensors, earlier)
        return super().forward(*step, stored=stored, **options)


@pytest.mark.parametrize("extra", ["shared", "int8 with sinks, shared"])
def test_stored_keys_are_checked(extra: str, make_site: Callable[..., Site]) -> None:
    spec, site = spec_of(torch.float32, "window", extra), make_site("attention", torch.float32)
    assert check_attention(PagedBackend, spec, site) == []
    for wrong, check in ((WritingQueries, "mutation"), (AttendingBeforeTheStep, "value")):
        assert check in {fault.check for fault in check_attention(wrong, spec, site)}


class SeeingWhatCameBefore(PagedBackend):
    """Wrong: queries of one sequence see a source as a decoder sees its own tokens."""

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch


class SeeingItsFirstPage(PagedBackend):
    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        plan = super().plan(batch)
        return replace(plan, seq_lens=plan.seq_lens.clamp(max=self.spec.page_size))


class ForgettingToWrite(PagedBackend):
    def forward(self, *step: Any, **options: Any) -> torch.Tensor:
        query: torch.Tensor = step[0]
        return super().forward(*step, **options) if len(query) else query


@pytest.mark.parametrize("mask", ["full", "softcap"])
def test_cross_attention_is_checked(mask: str, make_site: Callable[..., Site]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        spec, site = spec_of(dtype, mask, "source"), make_site("attention", dtype)
        for backend in (PagedBackend, SdpaBackend):
            if backend.accepts(spec, site.resolver.device.capability):
                assert check_attention(backend, spec, site) == []
        for wrong in (SeeingWhatCameBefore, SeeingItsFirstPage, ForgettingToWrite):
            assert "value" in {fault.check for fault in check_attention(wrong, spec, site)}
        assert "mutation" in {f.check for f in check_attention(WritingQueries, spec, site)}
        assert check_attention_determinism(PagedBackend, spec, site) == []


def test_only_some_backends_accept_cross_attention(make_site: Callable[..., Site]) -> None:
    capability = make_site("attention", torch.float32).resolver.device.capability
    plain = spec_of(torch.float32, "full", "source")
    assert PagedBackend.accepts(plain, capability)
    assert SdpaBackend.accepts(plain, capability)
    for spec, reason in (
        (spec_of(torch.float32, "window", "source"), "has no windows in a source"),
        (replace(plain, alibi=True), "does not do alibi"),
        (replace(plain, sinks=True), "does not do sinks"),
        (replace(plain, shared=True), "does not attend to a cache without writing it"),
        (replace(plain, cache_dtype=torch.int8), "stores the cache as torch.float32"),
    ):
        assert reason in PagedBackend.accepts(spec, capability).reason
    assert "softcap is 2.0" in SdpaBackend.accepts(replace(plain, softcap=2.0), capability).reason
    refused = FlexBackend.accepts(plain, capability).reason
    assert "serves decoder attention only, got encoder_decoder" in refused


class SwappingScales(PagedBackend):
    def prepare_scales(self, key_scale: torch.Tensor, value_scale: torch.Tensor) -> Any:
        return super().prepare_scales(value_scale, key_scale)


class ScalingByTheFirstHead(PagedBackend):
    def prepare_scales(self, key_scale: torch.Tensor, value_scale: torch.Tensor) -> Any:
        return super().prepare_scales(key_scale[:1], value_scale[:1])


class ForgettingScalesOnReading(PagedBackend):
    def prepare_scales(self, key_scale: torch.Tensor, value_scale: torch.Tensor) -> Any:
        _, rounding = super().prepare_scales(key_scale, value_scale)
        return (torch.ones_like(key_scale), torch.ones_like(value_scale)), rounding


class StoringCoarsely(PagedBackend):
    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(replace(spec, cache_dtype=torch.float8_e5m2), site)


class StoringPrecisely(PagedBackend):
    """Wrong: what the checkpoint was made for is the rounded cache."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(replace(spec, cache_dtype=spec.dtype), site)

    def prepare_scales(self, key_scale: torch.Tensor, value_scale: torch.Tensor) -> Any:
        return None

    def forward(self, *step: Any, scales: Any = None, **options: Any) -> torch.Tensor:
        return super().forward(*step, **options)


CACHES = ("e4m3", "e4m3 per head", "e5m2")


@pytest.mark.landing(6)
@pytest.mark.parametrize("mask", ["full", "window+softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", CACHES)
def test_a_quantized_cache_is_rounded_as_its_op_says(
    cache: str, dtype: torch.dtype, mask: str, make_site: Callable[..., Site]
) -> None:
    site = make_site("attention", dtype)
    assert check_attention(PagedBackend, spec_of(dtype, mask, cache), site) == []


@pytest.mark.landing(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("backend", "cache"),
    [
        (SwappingScales, "e4m3"),
        (SwappingScales, "e4m3 per head"),
        (ScalingByTheFirstHead, "e4m3 per head"),
        (ForgettingScalesOnReading, "e5m2"),
        (StoringCoarsely, "e4m3"),
        (StoringPrecisely, "e4m3"),
        (StoringPrecisely, "e5m2"),
    ],
)
def test_wrong_quantized_caches_fail(
    backend: type[AttentionBackend],
    cache: str,
    dtype: torch.dtype,
    make_site: Callable[..., Site],
) -> None:
    spec, site = spec_of(dtype, "full", cache), make_site("attention", dtype)
    assert "value" in {fault.check for fault in check_attention(backend, spec, site)}


class Unsettled(PagedBackend):
    """Wrong: what it returns depends on how often it was called."""

    calls = 0

    def forward(self, *step: Any, **options: Any) -> torch.Tensor:
        Unsettled.calls += 1
        output = super().forward(*step, **options)
        return output * (1 + 1e-6 * Unsettled.calls)


class OneByOne(PagedBackend):
    """Right in both respects: each sequence goes through the reference by itself."""

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        cache: torch.Tensor,
        plan: AttentionBatch,
        **options: Any,
    ) -> torch.Tensor:
        outputs = []
        bounds = plan.query_starts.tolist()
        for b, (start, end) in enumerate(pairwise(bounds)):
            length = int(plan.seq_lens[b])
            rows, num_pages = slice(start, end), -(-length // self.spec.page_size)
            part = AttentionBatch(
                query_starts=torch.tensor([0, end - start]),
                seq_lens=plan.seq_lens[b : b + 1],
                page_table=plan.page_table[b : b + 1, :num_pages],
                slots=plan.slots[rows],
                max_query_tokens=end - start,
                max_seq_tokens=length,
            )
            outputs.append(
                super().forward(query[rows], key[rows], value[rows], cache, part, **options)
            )
        return torch.cat(outputs)


class ScaledByBatch(OneByOne):
    """Wrong: a bit more with every sequence of the batch."""

    def forward(self, *step: Any, **options: Any) -> torch.Tensor:
        batch: AttentionBatch = step[-1]
        return super().forward(*step, **options) * (1 + 1e-6 * len(batch.seq_lens))


def test_declared_properties_of_backends_are_checked(make_site: Callable[..., Site]) -> None:
    spec, site = spec_of(torch.float32, "full"), make_site("attention", torch.float32)
    (first, *_) = check_attention_determinism(Unsettled, spec, site)
    assert first.check == "determinism"
    assert first.where == "output of step 0"
    (first, *_) = check_attention_batches(ScaledByBatch, spec, site)
    assert first.check == "batch"
    # Step 0 is of one sequence only, which is the same by itself.
    assert first.where == "output of step 1"
    for check in (check_attention_determinism, check_attention_batches):
        assert check(OneByOne, spec, site) == []
    assert check_attention_determinism(PagedBackend, spec, site) == []
