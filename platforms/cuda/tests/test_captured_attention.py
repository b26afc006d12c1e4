"""Decode steps with attention by optional packages are captured and replayed with other lengths.

Packages and graph capture are stand-ins on the CPU; see ``tests/tape.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from platforms.cuda.tests.test_providers import BACKENDS, LATENT, SPEC, asked, site
from tests.landing import landing_sample
from tests.tape import TapePlatform
from transformers import AutoModelForCausalLM, DeepseekV3Config

from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    Config,
    Device,
    register,
)
from interposer.errors import MissingMemberError
from interposer.hookspecs import hookimpl
from interposer.records import PlatformEntry, Record
from interposer_cuda._flash_mla.latent_backend import FlashMLABackend
from interposer_cuda._flashinfer.attention import FlashInferBackend
from interposer_cuda._flashinfer.latent_backend import FlashInferLatentBackend
from interposer_engine import load
from interposer_ops.attention import FlexBackend, SdpaBackend
from interposer_testing.workload import paged_batch, random_projections

pytestmark = pytest.mark.process

MODEL = Path(__file__).parents[3] / "examples/models/stdlib-lm"
PARTS = frozenset({"interposer-models", "interposer-ops", "interposer-quantization"})
CAPABILITY = Capability(
    "sm_90",
    frozenset({"cp_async", "tensor_cores_2"}),
    frozenset({"bfloat16", "float16"}),
    memory_bytes=2**30,
)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [1] * 30]
NUMBERS = ("query_starts", "seq_lens", "page_table", "slots")


class Reel(TapePlatform):
    name = "reel"

    def devices(self) -> Sequence[Device]:
        return [Device("reel", "cpu", "a tape of a GPU", CAPABILITY)]

    def capability(self, device: str) -> Capability:
        return CAPABILITY

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        return [torch.bfloat16]


class Reels:
    @staticmethod
    @hookimpl
    def interposer_records() -> list[Record]:
        return [PlatformEntry("reel", f"{__name__}:Reel", runs=("cuda",))]


@pytest.fixture
def reel() -> Iterator[None]:
    Reel.captured = Reel.replayed = 0
    TapePlatform.captured = TapePlatform.replayed = 0
    with register(Reels(), "reels"):
        yield


@pytest.fixture(scope="module")
def latent_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dense model of random weights whose latent vectors are of DeepSeek's sizes."""
    config = DeepseekV3Config(
        hidden_size=64,
        intermediate_size=96,
        vocab_size=128,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=512,
        qk_nope_head_dim=16,
        qk_rope_head_dim=64,
        v_head_dim=16,
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    path = tmp_path_factory.mktemp("latent")
    model.save_pretrained(path)
    return path


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    "name",
    landing_sample(
        ["flash_attention_2", "flash_attention_3", "flashinfer", "flashinfer_latent", "flash_mla"],
        every=3,
    ),
)
def test_captured_graphs_decode_the_same_tokens(
    packages: None, reel: None, latent_lm: Path, name: str
) -> None:
    is_latent = name in ("flashinfer_latent", "flash_mla")
    path = latent_lm if is_latent else MODEL
    found: list[Any] = []
    for graphs in ("off", "on"):
        config = Config(
            graphs=graphs,
            platform="reel",
            plugins=PARTS | {"interposer-cuda"},
            attention={"decoder": name},
            canary="off",
        )
        lm = load(path, config=config, cache_tokens=1024, max_sequences=4)
        assert {type(b) for b in lm.engine.runner.backends} < {*BACKENDS, *LATENT}
        # Sequences end one after the other, so that rows become padding while others grow.
        params = [{"max_new_tokens": n, "ignore_eos": True} for n in (14, 5, 9)]
        requests = [lm.engine.add(p, _params(**q)) for p, q in zip(PROMPTS, params, strict=True)]
        while lm.engine.busy:
            lm.engine.step()
        found.append([(r.output, r.logprobs) for r in requests])
    # With rows of padding, the processor rounds other products of such a model otherwise.
    slack = 0.03 if is_latent else 0.0
    for (plain, expected), (captured, logprobs) in zip(*found, strict=True):
        assert captured == plain
        assert logprobs == pytest.approx(expected, abs=slack, rel=0)
    assert TapePlatform.captured == 3
    assert TapePlatform.replayed == 13


def _params(**settings: Any) -> Any:
    from interposer_engine import SamplingParams

    return SamplingParams(**settings)


def decoding(lengths: Sequence[int], page_size: int, most_pages: int) -> AttentionBatch:
    """Return a step of one token per sequence; the pages of each are in no order."""
    tables = torch.randperm(len(lengths) * most_pages).view(len(lengths), most_pages)
    batch = paged_batch(list(tables), [n - 1 for n in lengths], [1] * len(lengths), page_size)
    return replace(batch, max_seq_tokens=most_pages * page_size)


@pytest.mark.parametrize("kind", [FlashInferBackend, FlashInferLatentBackend])
def test_a_fixed_plan_keeps_its_buffers(packages: None, kind: type[AttentionBackend]) -> None:
    spec = replace(asked(kind), page_size=4)
    fixed, fresh = (kind(spec, site(spec.dtype)) for _ in range(2))
    torch.manual_seed(0)
    held = decoding([1, 1, 1], 4, 6)
    plan = fixed.plan_fixed(held)
    buffers = plan.wrapper.buffers
    addresses = [t.data_ptr() for t in (*buffers, plan.slots)]
    for lengths in ([5, 24, 1], [4, 8, 17], [1, 1, 2]):
        now = decoding(lengths, 4, 6)
        for name in NUMBERS:
            getattr(held, name).copy_(getattr(now, name))
        fixed.update_plan(plan, held)
        (cache,) = fixed.kv_layout().allocate(1, 18, "cpu")
        cache.normal_()
        generator = torch.Generator().manual_seed(1)
        query, key, value = random_projections(spec, 3, generator, fused=False)
        own = cache.clone()
        out = fixed.forward(query, key, value, cache, plan)
        # A step in between that is not captured changes nothing of it.
        fixed.plan(now)
        assert torch.equal(out, fresh.forward(query, key, value, own, fresh.plan(now)))
        assert torch.equal(cache, own)
        assert torch.equal(fixed.forward(query, key, value, cache, plan), out)
        assert [t.data_ptr() for t in (*buffers, plan.slots)] == addresses


def test_backends_of_a_model_share_a_workspace(packages: None) -> None:
    held = decoding([1, 1, 1], 4, 6)

    def workspace(kind: type[AttentionBackend], of: Any) -> int:
        backend = kind(replace(asked(kind), page_size=4), of)
        address: int = backend.plan_fixed(held).wrapper._float_workspace_buffer.data_ptr()
        return address

    one, other = site(torch.bfloat16), site(torch.bfloat16)
    kinds = FlashInferBackend, FlashInferLatentBackend, FlashInferBackend
    of_one = {workspace(kind, one) for kind in kinds}
    assert len(of_one) == 1
    # Another model may run at the same time.
    assert workspace(FlashInferBackend, other) not in of_one


def test_flash_mla_is_captured_and_replayed_with_other_lengths(packages: None) -> None:
    spec = asked(FlashMLABackend)
    backend = FlashMLABackend(spec, site(spec.dtype))
    torch.manual_seed(0)
    held = decoding([1, 1, 1], spec.page_size, 3)
    (cache,) = backend.kv_layout().allocate(1, 9, "cpu")
    cache.normal_()
    query, key, value = random_projections(spec, 3, torch.Generator().manual_seed(1), fused=False)
    replay = TapePlatform().capture_graph(
        lambda: backend.forward(query, key, value, cache, backend.plan(held))
    )
    for lengths in ([5, 130, 1], [64, 65, 192]):
        now = decoding(lengths, spec.page_size, 3)
        for name in NUMBERS:
            getattr(held, name).copy_(getattr(now, name))
        own = cache.clone()
        expected = backend.forward(query, key, value, own, backend.plan(now))
        torch.testing.assert_close(replay(), expected, rtol=0, atol=0)
        assert torch.equal(cache, own)


class OnDevice(torch.Tensor):
    """A tensor of a device, and what is computed of it: whoever asks for a value waits."""

    waits: ClassVar[set[Any]] = {
        *(torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.numpy),
        *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__),
        *(torch.Tensor.__index__, torch.Tensor.nonzero, torch.nonzero, torch.equal),
        *(torch.masked_select, torch.Tensor.masked_select, torch.unique, torch.Tensor.equal),
    }

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.waits:
            raise AssertionError(f"the host waits for {func.__name__}")
        if func is torch.Tensor.__getitem__:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(getattr(place, "dtype", None) == torch.bool for place in places):
                raise AssertionError("the host waits for a number of rows")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def on_device(batch: AttentionBatch) -> AttentionBatch:
    moved = {name: getattr(batch, name).clone().as_subclass(OnDevice) for name in NUMBERS}
    return replace(batch, **moved, host=batch)


PLANNING: list[Any] = [
    *(
        (backend, replace(SPEC, window_tokens=window))
        for backend in (*BACKENDS, SdpaBackend, FlexBackend)
        for window in (None, 5)
    ),
    *((backend, asked(backend)) for backend in LATENT),
]


@pytest.mark.parametrize(("backend", "spec"), PLANNING)
def test_planning_does_not_synchronize(
    packages: None, backend: type[AttentionBackend], spec: AttentionSpec
) -> None:
    made = backend(spec, site(spec.dtype))
    tables = list(torch.arange(18).view(3, 6))
    for starts, lengths in (
        ((0, 0, 0), (3, 1, 7)),
        ((8, 300, 0), (1, 1, 1)),
        ((8, 0, 3), (1, 4, 2)),
    ):
        batch = paged_batch(tables, starts, lengths, spec.page_size)
        made.plan(on_device(batch))
        with pytest.raises(AssertionError, match="the host waits"):
            on_device(batch).seq_lens.tolist()


def test_a_backend_that_plans_on_the_host_must_define_plan_fixed() -> None:
    class Half(SdpaBackend):
        plans_on_host = True

    backend = Half(SPEC, site(SPEC.dtype))
    batch = decoding([2], 4, 1)
    with pytest.raises(MissingMemberError, match="Half plans on the host but has no plan_fixed"):
        backend.plan_fixed(batch)
    with pytest.raises(MissingMemberError, match="Half plans on the host but has no update_plan"):
        backend.update_plan(None, batch)
